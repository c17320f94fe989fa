# Sets the power mode $mode, by name, and with it the highest clocks that it allows, which a reboot loses.
# `flowspec deploy` runs this, and puts it into releases for flowspec-power.service.
number=$(awk -v name="NAME=$mode" '{ gsub(/[<>]/, " ") }
    $1 == "POWER_MODEL" && $3 == name { sub("ID=", "", $2); print $2; exit }' /etc/nvpmodel.conf)
[ -n "$number" ] || { echo "/etc/nvpmodel.conf knows no $mode" >&2; exit 1; }
is_set() { [ "$(nvpmodel -q | tail -n 1)" = "$number" ]; }  # its last line is the number, after the name
# Some modes ask whether to reboot: not now.  However nvpmodel ends then, the line after it says what to do.
is_set || nvpmodel -m "$number" < /dev/null || true
is_set || { echo "this change takes a reboot: run nvpmodel -m $number there, and confirm it" >&2; exit 1; }
! command -v jetson_clocks > /dev/null || jetson_clocks

"""The files of an Orin that is as it should be, by their names below the root; groups are this process'."""

from __future__ import annotations

import os

ORIN = {
    "sys/firmware/devicetree/base/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=25W >\n"
                         "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n",
    "var/lib/nvpmodel/status": "pmode:0002 fmode:quiet",
    "proc/meminfo": "MemTotal:        7802680 kB\nMemAvailable:    6812340 kB\n",
    "proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n",
    "sys/class/thermal/thermal_zone0/temp": "51250\n",
    "etc/group": f"root:x:0:\nvideo:x:{os.getgid()}:\nrender:x:{os.getgid()}:\n",
}

"""release, switch, activate, settle: install a release, and make it the running one.

0. A release's files are installed in /opt/flowspec/releases/ID/, renamed from ID.partial after a sync.
1. ``current`` is switched on all stages, then on the draft device, whose release decides which one runs.
2. The draft device restarts; without a stage of its release it waits.
3. The stages restart.  Until the rollout ends, every board that had a release before has the mark
   ``UNSETTLED``.  If a service ends with an error there, it restarts with the board's other release: a stage
   that cannot start or whose release the draft device rejects, and a draft device that fails before a token
   has come through.  So all boards come to run one release, even if the rollout is interrupted.
4. Once a token has come through, ``UNSETTLED`` is removed: the draft device's when its service is ready, the
   stages' by ``settle``, which also removes older releases and shards; earlier they may be needed to go
   back.  On the draft device a release that has made no token yet is marked ``UNTRIED``: a failed rollout
   goes back to another one, if there is one, and a rollback to it is refused.

Links are replaced atomically.  The next run completes an interrupted one, because it decides from the boards'
facts alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.actions import Action, BoardState, quote
from flowspec_edge.boards.deploy.steps.image import images_removed
from flowspec_edge.boards.deploy.steps.power import power_at_boot
from flowspec_edge.boards.images.archive import Image
from flowspec_edge.boards.probe.facts import BoardFacts, ReleaseFacts, ServiceFacts
from flowspec_edge.boards.services.keys import key_command

_RETAINED_RELEASES = 3  # releases kept besides current and previous
_START_S = 960.0  # longer than any TimeoutStartSec, so that systemd reports the failure
# Prints the last line that the unit's program logged since the start, else systemd's last line about it.
_START = """since=$(date +%s.%N)
sync -f {home}; sync -f {units}
systemctl reset-failed {unit} 2>/dev/null || true
if systemctl {verb} {unit}; then {then}; fi
journalctl --sync
for match in _SYSTEMD_UNIT={unit} --unit={unit}; do
    said=$(journalctl --no-pager --quiet --output=cat --lines=20 --since=@$since $match | grep . | tail -n 1)
    [ -z "$said" ] || {{ echo "$said" >&2; exit 1; }}
done
exit 1"""
# A draft device whose release ended with an error has started the previous one.
_RUNS = """runs=$(readlink /proc/$(systemctl show --property=MainPID --value {unit})/cwd)
[ "$runs" != {release} ] || exit 0
said=$(journalctl --no-pager --quiet --output=cat --lines=99 _SYSTEMD_UNIT={unit} | grep -i error | tail -n 1)
echo "the release before runs again: ${{said:-see flowspec deploy logs}}" >&2
exit 1"""
# Waits until the former process has ended, because that process would reject the stages of this release.
_RESTART_DRAFT = """sync -f {home}; sync -f {units}
before=$(systemctl show --property=MainPID --value {unit})
systemctl restart --no-block {unit}
for i in $(seq 100); do
    [ "$(systemctl show --property=MainPID --value {unit})" = "$before" ] || exit 0
    sleep 0.2
done"""


def release(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    link = f"../../venvs/{state.environment.digest}" if state.environment else ""
    if facts.releases.get(state.release) == ReleaseFacts(file_digests(state), link):
        yield Action("release")
        return
    directory = paths.release_dir(state.release)
    target, partial, old = quote(directory), quote(f"{directory}.partial"), quote(f"{directory}.old")
    untried = f"[ -e {target} ] && [ ! -e {target}/{paths.UNTRIED} ] || touch {partial}/{paths.UNTRIED}"
    yield Action("release", (
        f"rm -rf {partial} {old} && mkdir {partial}", f"tar -xf - --no-same-owner -C {partial}",
        f"chmod -R u=rwX,go=rX {partial}", *([f"ln -s {quote(link)} {partial}/venv"] if link else []),
        *([untried] if state.unit == paths.DRAFT_UNIT else []),
        f"sync -f {partial}",  # a power failure could otherwise leave empty files
        f"if [ -e {target} ]; then mv -T {target} {old}; fi", f"mv -T {partial} {target}",
        f"rm -rf {old}"), state.files)


def file_digests(state: BoardState) -> dict[str, str]:
    """Return the sha256 of the release's files, by path."""
    return {path: hashlib.sha256(text.encode()).hexdigest() for path, text in state.files.items()}


def switch(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    links_action = links(state, facts)
    yield units(state, facts)
    yield links_action
    yield from power_at_boot(state, facts, links_action.changes)
    yield Action("enabled at boot", () if _service(state, facts).enabled else (
        f"systemctl enable --quiet {quote(state.unit)}",))
    if state.unit == paths.DRAFT_UNIT:
        yield _stop_others(state, facts)
        yield Action("restarting", (_RESTART_DRAFT.format(
            home=paths.HOME, units=paths.UNITS, unit=quote(state.unit)),) if _outdated(state, facts) else ())


def activate(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    if state.unit != paths.DRAFT_UNIT:
        yield _stop_others(state, facts)
    yield started(state, facts)


def settle(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    yield tidy(state, facts)
    yield from old_parts(state, facts)
    # Last: a rollback that fails before it is completed by the next one, and afterwards undone.
    marked = facts.modes.get(paths.UNSETTLED) or _marks(state, facts)
    yield Action("settled", (quote("rm", "-f", paths.UNSETTLED),) if marked else ())
    if state.public:  # after that mark, with which a service might return to the release before and its pair
        yield unused_keys(state, facts)


def units(state: BoardState, facts: BoardFacts) -> Action:
    """Install the release's units where systemd reads them."""
    board_release = facts.releases.get(state.release)
    files = file_digests(state) if state.files else board_release.files if board_release else {}
    digests = {path.removeprefix("units/"): sha256 for path, sha256 in files.items()
               if path.startswith("units/")}
    changed = sorted(name for name, sha256 in digests.items() if facts.units.get(name) != sha256)
    new = {name: f"{paths.UNITS}/.{name}.new" for name in changed}
    directory = f"{paths.release_dir(state.release)}/units"
    # The copies are synced before they are renamed: otherwise a power failure could leave an empty unit file,
    # which systemd treats as masked.
    return Action("units", (
        *(quote("install", "-m", "644", f"{directory}/{name}", new[name]) for name in changed),
        f"sync -f {paths.UNITS}",
        *(quote("mv", "-T", new[name], f"{paths.UNITS}/{name}") for name in changed),
        "systemctl daemon-reload") if changed else ())


def links(state: BoardState, facts: BoardFacts) -> Action:
    """Point ``current`` at the release; ``previous`` moves only when ``current`` does."""
    target = paths.release_dir(state.release)
    if facts.current == target:
        return Action("current release")
    text = f"{paths.GOING_BACK}{state.release}" if state.back else ""
    mark = (f"{quote('echo', text)} > {paths.UNSETTLED}",) if _marks(state, facts) else ()
    before = (_link(_before(state, facts), paths.PREVIOUS),) if facts.current else ()
    return Action("current release", (*mark, *before, _link(target, paths.CURRENT), f"sync -f {paths.HOME}"))


def started(state: BoardState, facts: BoardFacts) -> Action:
    """Restart an outdated stage; wait for an outdated draft device, which ``switch`` has told to restart."""
    if not _outdated(state, facts):
        return Action("running")
    # The script syncs first, so that after a power failure the board boots with the started release.  Only
    # links and units, a few kilobytes, are still to be written; the rest was synced before.
    unit, then, verb = quote(state.unit), "exit", "restart"  # a stage follows the draft device by itself
    if state.unit == paths.DRAFT_UNIT:
        then, verb = _RUNS.format(unit=unit, release=quote(paths.release_dir(state.release))), "start"
    return Action("running", (_START.format(home=paths.HOME, units=paths.UNITS, verb=verb, unit=unit,
                                            then=then),), timeout_s=_START_S)


def tidy(state: BoardState, facts: BoardFacts) -> Action:
    """Remove old releases, and environments and images that no release uses."""
    switched = facts.current != paths.release_dir(state.release)
    used_releases = {state.release, _name(_before(state, facts) if switched and facts.current else facts.previous)}
    spare = [name for name in facts.releases if name not in used_releases and not name.endswith((".partial", ".old"))]
    retained = used_releases | {*spare[:_RETAINED_RELEASES]}
    in_use = {_name(release.venv) for name, release in facts.releases.items() if name in retained}
    if state.environment:
        in_use.add(state.environment.digest)
    releases = [paths.release_dir(name) for name in facts.releases if name not in retained]
    venvs = [f"{paths.VENVS}/{name}" for name in facts.venvs if name not in in_use]
    # The mark is removed first, because half an environment must not count as complete.
    marks = (quote("rm", "-f", "--", *(f"{venv}/.complete" for venv in venvs)),) if venvs else ()
    removal = (quote("rm", "-rf", "--", *releases, *venvs),) if releases or venvs else ()
    tags = {facts.venv_images[digest] for digest in in_use if digest in facts.venv_images}
    if isinstance(state.environment, Image):
        tags.add(state.environment.tag)
    return Action("old releases", (*marks, *removal, *images_removed([tag for tag in facts.images if tag not in tags])))


def unused_keys(state: BoardState, facts: BoardFacts) -> Action:
    """Remove all key pairs but the release's, after a rotation or one that was given up."""
    others = set(facts.publics) - {state.public} or facts.modes.get(paths.FORMER_KEY)
    keep = quote(*key_command(f"{paths.release_dir(state.release)}/venv/bin/python", "keep", paths.KEY,
                              state.public))
    return Action("unused keys", (f"{keep} > /dev/null",) if others else ())


def old_parts(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    """Remove parts of models that neither this release nor the previous one needs.

    A model without parts has had none when the facts were read: its first one may have been sent since.
    """
    if state.parts is None:
        return
    models = {part.partition("/")[0] for part in state.parts}
    unneeded = {part if (model := part.partition("/")[0]) in models else model for part in facts.parts
                if part not in state.parts and part not in models}
    if unneeded:
        yield Action("old shards", (quote("rm", "-rf", "--", *(f"{paths.MODELS}/{name}" for name in
                                                               sorted(unneeded))),))


def _stop_others(state: BoardState, facts: BoardFacts) -> Action:
    return stop_and_forget("units of another role", [unit for unit in facts.services if unit != state.unit])


def _marks(state: BoardState, facts: BoardFacts) -> bool:
    """Return whether ``links`` marks the rollout as unfinished: on a board that has a release to return to."""
    return facts.current not in ("", paths.release_dir(state.release))


def _before(state: BoardState, facts: BoardFacts) -> str:
    """Return the target of ``previous`` once ``current`` points at the new release.

    The target is the draft device's release, not that of an interrupted rollout.  A stage that restarts before the
    draft device has switched must return to the draft device's.
    """
    is_there = state.before in facts.releases and state.before != state.release
    return paths.release_dir(state.before) if is_there else facts.current


def _outdated(state: BoardState, facts: BoardFacts) -> bool:
    """Return whether the unit is not active, or runs with another release or unit file.

    A unit's working directory is ``current``, so its process shows which release it was started in.
    """
    unit = _service(state, facts)
    return (not unit.active or unit.release != paths.release_dir(state.release)
            or units(state, facts).changes)


def _service(state: BoardState, facts: BoardFacts) -> ServiceFacts:
    return facts.services.get(state.unit, ServiceFacts())


def _link(target: str, path: str) -> str:
    return f"ln -sfn {quote(target)} {path}.new && mv -T {path}.new {path}"


def _name(target: str) -> str:
    return target.rpartition("/")[2]


def stop_and_forget(step: str, units: Sequence[str]) -> Action:
    """Stop and disable units, and clear their failed state."""
    return Action(step, (f"systemctl disable --quiet --now {quote(*units)}",
                         f"systemctl reset-failed {quote(*units)} 2>/dev/null || true") if units else (),
                  timeout_s=120.0)

"""The chaos run: faults under clients, one server after the other."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from flowspec_edge.model.opened import OpenModel, resolve_model
from flowspec_edge.strategies.draft_choice import draft_kind
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES, strategy_class
from tests.chaos.clients import DEADLINE_S, Load, Question, Violation, questions
from tests.chaos.faults import able, build_clock, strike
from tests.chaos.processes import Holdings, holdings
from tests.chaos.report import Report
from tests.chaos.schedule import SETUPS, Episode, Fault, Setup, schedule
from tests.chaos.services import LinkedService, LocalService, Service

_TOKENS = (4, 24, 64)
_WARM = 3  # faults after which a server holds what it needs for good
# After these a stage is forked, which waits until a killed fork server's successor has loaded.
_FORKED = {"kill", "kill_two", "kill_all", "kill_again", "stop", "fork_server_stop", "disk_full",
           "clock_back"}
_SETTLE_S = 30.0  # connections, threads and helpers of the last answers may end a moment later
_POLL_S = 0.1
# What a server may gain; of everything else nothing.
ALLOWED = {
    "draft_mib": 48.0, "stage_mib": 48.0,  # resident memory: the allocator's, and Python's caches
    "descriptors": 4,  # of connections that close meanwhile
    "threads": 1,  # the intake's second, started when two requests come at once
}


def chaos(seed: int, faults: int, directory: Path, written: Path, *, setups: Sequence[Setup] = SETUPS,
          clients: int = 3, prompts: int = 6, tokens: Sequence[int] = _TOKENS, longest_s: float = 18.0
          ) -> Report:
    """Run them all; ``directory`` gets the servers' logs and temporary files, ``written`` the report, after
    every server."""
    kinds, report = able(), Report(seed)
    setups = [setup for setup in setups if setup.where != "links" or "link_cut" in kinds]
    model = resolve_model("demo")
    asked = questions(model, prompts, tokens)
    shim = build_clock(directory)
    for number, episode in enumerate(schedule(seed, faults, kinds, setups, longest_s)):
        service = _service(episode.setup, directory / f"server{number}", shim, model, "disk_full" in kinds)
        try:
            _Episode(episode, service, model, asked, clients, seed + number, report).run()
        finally:
            report.write(written)
    return report


def _service(setup: Setup, directory: Path, shim: Path | None, model: OpenModel, small_disk: bool) -> Service:
    if setup.where == "links":
        return LinkedService(directory, shim, model, setup.strategy, setup.stages)
    return LocalService(directory, shim, model, setup.strategy, setup.stages, small_disk)


def together(strategy: str, model: OpenModel) -> list[str]:
    """The strategies that a server for ``strategy`` has the draft models of."""
    chosen, params = strategy_class(strategy), Params()
    loaded = {None, "ngram", draft_kind(chosen, params, model)}
    return [other.name for other in STRATEGIES.values() if other.parallelism == "pipeline"
            and draft_kind(other, params, model) in loaded]


class _Episode:
    def __init__(self, episode: Episode, service: Service, model: OpenModel, asked: Sequence[Question],
                 clients: int, seed: int, report: Report) -> None:
        self._episode, self._service, self._report = episode, service, report
        self._strategies = together(episode.setup.strategy, model)
        self._load = Load(service, asked, self._strategies, seed, clients)
        self._probe = min((one for one in asked if one.tokens), key=lambda question: len(question.tokens))
        self._rested: Holdings | None = None
        self._loading = False  # the fork server, perhaps: no time for the first rest
        self._name = f"{episode.setup.where} {episode.setup.strategy}"

    def run(self) -> None:
        service, report, load = self._service, self._report, self._load
        self._say(f"{len(self._episode.faults)} faults, strategies {', '.join(self._strategies)}")
        try:
            service.start()
            with service.network():
                for strategy in self._strategies:  # undisturbed
                    load.ask(self._probe, strategy, stream=True)
            load.start()
            for number, fault in enumerate(self._episode.faults):
                if (number >= _WARM and self._rested is None and fault.kind != "draft_kill"
                        and not self._loading):
                    self._rested = self._rest()
                self._one(number, fault)
            load.go_on()
            self._check_growth(self._rest())
        except (Violation, TimeoutError, RuntimeError, AssertionError) as error:
            report.violations.append(f"{self._name}: {error}")
        finally:
            load.end()
            for wrong in [*load.violations, *service.close(), *self._in_log()]:
                report.violations.append(f"{self._name}: {wrong}")
            report.answers.update(load.answers)
            report.refusals.update(load.refusals)
            report.longest_s = max(report.longest_s, load.longest_s)

    def _one(self, number: int, fault: Fault) -> None:
        load, service = self._load, self._service
        load.wait(fault.tokens)
        before = len(load.violations)
        start = time.monotonic()
        undo = strike(fault, service)
        answered = threading.Event()
        took: list[float] = []

        def probe() -> None:
            try:
                with service.network():
                    load.ask(self._probe, self._strategies[number % len(self._strategies)], stream=False)
                took.append(time.monotonic() - start)
            except Violation as error:
                load.violations.append(f"after {fault}: {error}")
            finally:
                answered.set()

        thread = threading.Thread(target=probe, daemon=True)
        thread.start()
        if undo:
            time.sleep(fault.hold_s)  # the fault's duration
            undo()
        if not answered.wait(2 * DEADLINE_S) or not took:
            raise Violation(f"no recovery from {fault}")
        thread.join()
        if fault.kind in _FORKED:
            self._loading = False
        elif fault.kind == "fork_server_kill":
            self._loading = True
        self._report.recovered(fault.kind, took[0])
        new = "; ".join(load.violations[before:])
        self._say(f"{number + 1}/{len(self._episode.faults)} {fault.kind} {took[0]:.2f} s {new[:400]}")

    def _rest(self) -> Holdings:
        """What the server holds while it has nothing to do, as soon as nothing has grown by more than it may,
        or after _SETTLE_S."""
        service = self._service
        self._load.pause()
        deadline = time.monotonic() + _SETTLE_S
        try:
            while True:
                try:
                    held = holdings(service.draft_pid, service.processes(), service.temporary)
                    if not self._excess(held) or time.monotonic() > deadline:
                        return held
                except OSError as error:  # a process has just ended
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"the server does not come to rest: {error}") from error
                time.sleep(_POLL_S)  # between two looks, up to the deadline: no event tells of what ends
        finally:
            self._load.go_on()

    def _excess(self, now: Holdings) -> dict[str, float]:
        """What has grown since the first rest by more than it may."""
        grown = now.growth(self._rested) if self._rested else {}
        return {name: value for name, value in grown.items() if value > ALLOWED.get(name, 0)}

    def _check_growth(self, now: Holdings) -> None:
        if self._rested is None:
            return
        self._report.growth[self._name] = now.growth(self._rested)
        self._report.held[self._name] = vars(now)
        for name, value in self._excess(now).items():
            self._report.violations.append(f"{self._name}: {name} grew by {value:g}: {now}, before "
                                           f"{self._rested}")

    def _in_log(self) -> list[str]:
        log = self._service.log.read_text(errors="replace")
        return [f"{words} in the log: …{log[max(0, at - 500):at + 2500]}"
                for words in ("Traceback", "internal error") if (at := log.find(words)) >= 0]

    def _say(self, line: str) -> None:
        print(f"{self._name}: {line}", file=sys.stderr, flush=True)

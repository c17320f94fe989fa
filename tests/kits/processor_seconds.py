"""Processor seconds of tests: what a run costs, and which tests and files cost most.

Unlike wall clock, they can be compared between machines with other loads.  Processes that a test starts count
once they have ended and been waited for.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator

import pytest

OPTION = "--processor-seconds"
_KEY = "processor_seconds"


def so_far(children: bool = True) -> float:
    """Return the processor seconds of this process, and of its children that have ended."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN) if children else (resource.RUSAGE_SELF,)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, whose))


class ProcessorSeconds:
    """A plugin that measures every phase of every test, and prints the sum and the dearest at the end.

    With xdist, processes measure their own tests: reports carry a test's seconds, and the output of a process
    its whole sum with imports and collection.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._output: dict[str, object] | None = getattr(config, "workeroutput", None)
        self._tests = Counter[str]()
        self._workers: list[float] = []
        self._shown: int = config.getoption(OPTION)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]
                                  ) -> Iterator[None]:
        report = yield
        now = so_far()
        spent, item.stash[_LAST] = now - item.stash.get(_LAST, now), now
        report.user_properties.append((_KEY, spent))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        item.stash[_LAST] = so_far()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for key, value in report.user_properties:
            if key == _KEY:
                self._tests[report.nodeid] += float(str(value))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        """Add what a process of xdist spent; one that died says nothing."""
        self._workers.append(float(getattr(node, "workeroutput", {}).get(_KEY, 0.0)))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._output is not None:
            self._output[_KEY] = so_far()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files = Counter[str]()
        for test, spent in self._tests.items():
            files[test.partition("::")[0]] += spent
        if self._shown:
            terminalreporter.section("most processor seconds")
            for counts in (files, self._tests):
                for name, spent in counts.most_common(self._shown):
                    terminalreporter.write_line(f"{spent:8.2f} {name}")
                terminalreporter.write_line("")
        whole = so_far(children=not self._workers) + sum(self._workers)
        terminalreporter.write_line(f"processor seconds of the run: {whole:.0f}")


_LAST = pytest.StashKey[float]()

"""The table of faults fits the sources: each fault changes one place."""

from __future__ import annotations

import pytest

from tests.faults.__main__ import ROOT, Fault, faults


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_fault_changes_one_place_and_names_tests(fault: Fault) -> None:
    source = (ROOT / fault.path).read_text()
    assert fault.planted(source) != source
    assert [name for name in fault.tests if not (ROOT / name).exists()] == []

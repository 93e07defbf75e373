"""A sweep disturbed at moments of one seed; ``python -m tests.fuzz.durability`` goes on with others."""

from __future__ import annotations

import pytest

from tests.fuzz.durability import explore


@pytest.mark.nightly
def test_a_sweep_whose_power_was_cut_is_resumed_to_what_an_undisturbed_one_leaves() -> None:
    report = explore(600, seed=0, most=1, models=("small",))
    assert report.findings == []
    assert list(report.cases) == ["the power"]

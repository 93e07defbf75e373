"""A few sweeps killed at moments of one seed; ``python -m tests.fuzz.durability`` goes on with others."""

from __future__ import annotations

import pytest

from tests.fuzz.durability import DISTURBANCES, explore


@pytest.mark.nightly
def test_killed_sweeps_are_resumed_to_what_an_undisturbed_one_leaves() -> None:
    seed = list(DISTURBANCES).index("the tool and the supervisor, SIGKILL")
    report = explore(60, seed, most=2, models=("small",))
    assert report.findings == []
    assert report.cases.total() == 2

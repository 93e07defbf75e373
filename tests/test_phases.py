"""Tests which phase the name of a range means."""

from __future__ import annotations

import pytest

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.trace.phase_names import PhaseNames
from tests.support.cases import read_names


@pytest.mark.parametrize(("role", "name"), [*read_names("phase_names"), ("none", "")])
def test_usual_spellings(role: str, name: str) -> None:
    assert PhaseNames().find_role(name) == (None if role == "none" else role)


def test_an_option_takes_the_place_of_the_default_names() -> None:
    names = PhaseNames.parse(["forward=my fwd", "forward=other fwd"])
    roles = [names.find_role(name) for name in ("my fwd", "other fwd", "forward", "backward")]
    assert roles == ["forward", "forward", None, "backward"]


def test_a_phase_of_the_users_own_comes_last() -> None:
    assert PhaseNames.parse(["data=load"]).leaf_phases == ("forward", "loss", "backward", "optimizer", "data")


@pytest.mark.parametrize("option", ["forward", "=name", "forward=", ""])
def test_an_option_that_is_no_pair(option: str) -> None:
    with pytest.raises(ConfigurationError, match="PHASE=RANGE"):
        PhaseNames.parse([option])

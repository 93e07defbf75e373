"""The page that leads a newcomer through the code: every name on it is there."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT

NAMES = re.findall(r"`((?:\w+\.)+\w+)`", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"))


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("name", sorted({name for name in NAMES if not name.endswith((".csv", ".sqlite"))}))
def test_a_name_on_the_page_is_in_the_code(name: str) -> None:
    words = f"nsys_analyzer.{name}".split(".")
    last = max(place for place in range(1, len(words) + 1) if is_module(".".join(words[:place])))
    assert reduce(getattr, words[last:], import_module(".".join(words[:last])))

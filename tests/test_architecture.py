"""Checks that every name on the pages that lead a newcomer through the code exists."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT

NAMES = re.findall(r"`((?:\w+\.)+\w+)`", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"))


#: The table of additions in CONTRIBUTING.md. A name in it may be followed by "of" and the file that defines it.
ROWS = re.search(
    r"\| a new \| needs \| test \|\n(.*?)\n\n", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL
)
CODE = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for folder in ("nsys_analyzer", "profiling_targets", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def is_defined(name: str, code: str) -> bool:
    return is_listing(name, code) or re.search(rf"\b(?:def|class) {name}\b|[\"']{name}[\"']", code) is not None


def is_listing(name: str, code: str) -> bool:
    """Checks whether a name is a collection of values, to which a line can be added, and not a function."""
    return re.search(rf"^ *(?:\w+, )*{name}(?:, \w+)*(?:: .*)? = |^ +{name}: ", code, re.MULTILINE) is not None


@pytest.mark.parametrize("row", ROWS[1].splitlines()[1:] if ROWS else [], ids=lambda row: row.split(" | ")[0][2:])
def test_what_an_addition_costs_names_what_is_there(row: str) -> None:
    for text in re.findall(r"`([^`]+)`", row):
        if "/" in text or text.endswith((".py", ".md", ".yml", ".json")):
            places = [ROOT / folder / text for folder in ("", "nsys_analyzer", "nsys_analyzer/analysis/findings")]
            assert any(path.exists() for path in places) or any(path.endswith(f"/{text}") for path in CODE), text
        elif re.fullmatch(r"(?:\w+\.)*\w+", text):
            *_, name = text.split(".")
            is_file = any(path.endswith((f"/{name}.py", f"/{name}/__init__.py")) for path in CODE)
            assert is_file or any(is_defined(name, code) for code in CODE.values()), text
    for name in re.findall(r"(?:line|entry|row|word|key|pattern) (?:in|of) (?:the )?`(\w+)`", row):
        assert any(is_listing(name, code) for code in CODE.values()), name
    for name, file in re.findall(r"`(\w+)` of `([\w/]+\.py)`", row):
        assert is_defined(name, next(code for path, code in CODE.items() if path.endswith(f"/{file}"))), name


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

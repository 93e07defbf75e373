"""Tests that each id of a fact has one sentence, and that each fact provides the values for its sentence."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from nsys_analyzer.analysis.facts import Fact, FactId
from nsys_analyzer.report.facts import SENTENCES, say, say_all
from nsys_analyzer.report.renderers.json_report import to_plain_data
from nsys_analyzer.text import plain

PACKAGE = Path(__file__).parent.parent / "nsys_analyzer"


def facts_in_code() -> Iterator[tuple[str, str, set[str]]]:
    """Yields the place, the ids and the names of the values of each fact that the package makes."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Fact":
                for constant in ast.walk(node.args[0]):
                    if isinstance(constant, ast.Constant) and constant.value in get_args(FactId):
                        names = {str(keyword.arg) for keyword in node.keywords}
                        yield f"{path.name}:{node.lineno}", str(constant.value), names


FACTS = list(facts_in_code())


def test_each_id_has_a_sentence() -> None:
    assert set(SENTENCES) == set(get_args(FactId))


@pytest.mark.parametrize(("place", "fact_id", "names"), FACTS, ids=[f"{place}-{name}" for place, name, _ in FACTS])
def test_a_fact_gives_its_sentence_the_values_that_it_needs(place: str, fact_id: FactId, names: set[str]) -> None:
    assert names == set(inspect.signature(SENTENCES[fact_id]).parameters), place


def test_each_id_is_made_somewhere() -> None:
    # The limits take these two from a table of kernel classes.
    by_table = {"skipped_scores", "skipped_convolution_work"}
    assert {fact_id for _, fact_id, _ in FACTS} | by_table == set(get_args(FactId))


def test_a_fact_is_its_sentence_in_json_and_a_sentence_stays_as_it_is() -> None:
    fact = Fact("missing_range", name="fwd", phase="forward")
    assert to_plain_data([fact]) == ["No range has the name `fwd`, which was given for forward."]
    assert say("read from JSON") == "read from JSON"
    assert [plain(text) for text in say_all((fact, "read"))] == [plain(say(fact)), "read"]


def test_facts_are_compared_by_their_values() -> None:
    fact, other = Fact("open_phase", name="a"), Fact("open_phase", name="b")
    assert fact == Fact("open_phase", name="a") != other
    assert len({fact, other, Fact("open_phase", name="a")}) == 2
    assert "open_phase" in repr(fact)

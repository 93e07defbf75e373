"""The calls of modules among ranges, and the call that a kernel of forward or backward belongs to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.ranges.calls import (
    CallFinder,
    ModuleCalls,
    find_module_calls,
    find_parents,
    split_module_path,
)
from nsys_analyzer.analysis.summary.summarize import summarize
from tests.support.cases import Capture, make_case_test
from tests.support.export import GEMM, Export


def calls_of(capture: Capture) -> ModuleCalls:
    calls = find_module_calls(capture.attributed)
    assert calls is not None
    return calls


def called(capture: Capture) -> list[str] | None:
    """Returns the path of each call in the order of the file; None where there are no modules."""
    calls = find_module_calls(capture.attributed)
    return [".".join(calls.paths[code]) for code in calls.path.tolist()] if calls else None


def places(capture: Capture) -> dict[str, str | None]:
    """Returns the path of the module that each kernel belongs to, by the kernel's name; None for no module."""
    calls, operations = calls_of(capture), capture.trace.operations
    call = CallFinder(capture.attributed, calls).find_calls(np.arange(len(operations)))
    paths = [".".join(calls.paths[calls.path[one]]) if one >= 0 else None for one in call.tolist()]
    return dict(zip([operations.names[i] for i in operations.name.tolist()], paths, strict=True))


test_module_calls = make_case_test(
    "module_calls",
    {
        "calls": called,
        "kinds": lambda capture: dict(
            zip(map(".".join, calls_of(capture).paths), calls_of(capture).kinds, strict=True)
        ),
        "source": lambda capture: calls_of(capture).source,
        "modules of kernels": places,
    },
)


@pytest.mark.parametrize(
    ("text", "path"),
    [("GPT", ("GPT",)), ("GPT/h.0.attn", ("GPT", "h", "0", "attn")), ("Net/fc", ("Net", "fc"))],
)
def test_slash_and_dot_separate_the_words_of_a_path(text: str, path: tuple[str, ...]) -> None:
    assert split_module_path(text) == path


@pytest.mark.parametrize("name", ["nn.Module: Block_{}", "nn.Module: M/{}: Block"])
def test_of_very_many_nested_calls_the_deepest_are_part_of_the_hundredth(tmp_path: Path, name: str) -> None:
    """Each of 700 ranges lies in the one before, and the last one launches a kernel."""
    export = Export().gpu().range("forward", 0, 10_000)
    for depth in range(700):
        words = ".".join(["x"] * (depth + 1)) if "/" in name else depth
        export.range(name.format(words), 10 + depth, 9_990 - depth)
    export.kernel(GEMM, 800, 900, 1_000)
    (summary,) = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    assert summary.modules
    # Their paths have a hundred words; the second kind's outermost has two.
    assert max(module.depth for module in summary.modules.modules) == (98 if "/" in name else 99)


def test_the_parent_of_a_range_is_the_innermost_one_around_it() -> None:
    """In its own group; of two equal ones the second lies in the first, and one that ends later is no child."""
    #                 0       1       2       3       4       5       6
    group = np.array([1, 1, 1, 2, 1, 1, 1])
    start = np.array([0, 10, 20, 25, 50, 50, 85])
    end = np.array([90, 40, 30, 28, 60, 60, 95])
    # 1 and 4 lie in 0, 2 in 1, 5 in 4; 3 is of another group, 6 goes across the end of 0.
    assert find_parents(group, start, end).tolist() == [-1, 0, 1, -1, 0, 4, -1]

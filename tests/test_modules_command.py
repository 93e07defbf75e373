"""``nsys-analyze modules`` and its section, from a capture to what is printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import Table
from nsys_analyzer.report.sections.modules import modules_section
from nsys_analyzer.text import plain
from tests.conftest import Main, Outcome
from tests.support.commands import make_command_test
from tests.support.export import ADD, AUTOGRAD, GEMM, Export

RealSummary = Callable[[str], CaptureSummary]
MS = 1_000_000


def gpt(layers: tuple[int, ...] = (4, 4, 4, 7), *, backward: bool = True) -> Export:
    """One step of a model whose layers take so many ms in forward and, with ranges there, as many in backward.

    Besides, ``ln_f`` takes 1 ms, the loss 2 ms in no module, and backward 3 ms before the first module.
    """
    export, us = Export().thread(AUTOGRAD, "pt_autograd_0").gpu(), 1000
    at, end = 0, len(layers) * MS
    step = end + sum(layers) * 2 * MS + 20 * MS
    export.range("step", 0, step).range("forward", 0, end).range("nn.Module: GPT: GPT", us, end - us)
    gpu = 0
    for number, length in enumerate(layers):
        at = number * 100 * us + 10 * us
        export.range(f"nn.Module: GPT/h.{number}: Block", at, at + 90 * us)
        export.range(f"nn.Module: GPT/h.{number}.attn: Attention", at + 10 * us, at + 80 * us)
        gpu = max(gpu, at + 30 * us)
        export.kernel(GEMM, at + 20 * us, gpu, gpu + length * MS)
        gpu += length * MS
    at += 100 * us
    export.range("nn.Module: GPT/ln_f: LayerNorm", at, at + 90 * us).kernel(ADD, at + 10 * us, gpu, gpu + MS)
    export.range("loss", end, end + MS).kernel(ADD, end + us, gpu + MS, gpu + 3 * MS)
    gpu += 3 * MS
    export.range("backward", end + MS, step - us).kernel(ADD, end + MS + us, gpu, gpu + 3 * MS, tid=AUTOGRAD)
    gpu, at = gpu + 3 * MS, end + MS + 10 * us
    for number, length in reversed(list(enumerate(layers))):
        if backward:
            export.range(f"nn.Module: GPT/h.{number}.attn: Attention", at, at + 50 * us, AUTOGRAD)
        export.kernel(GEMM, at + 10 * us, gpu, gpu + length * MS, tid=AUTOGRAD)
        gpu, at = gpu + length * MS, at + 100 * us
    return export


def modules_of(ended: Outcome) -> list[dict[str, Any]]:
    modules: list[dict[str, Any]] = json.loads(ended.out)["captures"][0]["modules"]["modules"]
    return modules


def flops_of(ended: Outcome) -> dict[str, tuple[int | None, int | None]]:
    """The FLOPs of each module, forward and backward."""
    return {module["label"]: (module["forward"]["flops"], module["backward"]["flops"]) for module in modules_of(ended)}


def cells_of(ended: Outcome) -> list[list[str]]:
    """The cells of each row of the markdown tables, heads left out."""
    lines = [line for line in ended.out.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


test_modules = make_command_test("modules_command", builders={
    "gpt": gpt, "two_layers": lambda: gpt((2, 2)), "forward_ranges": lambda: gpt(backward=False),
}, figures={
    "modules": lambda ended: [cells[0] for cells in cells_of(ended)],
    "line_of_modules": lambda ended: {
        cells[0].strip("· "): cells[-1] for cells in cells_of(ended) if cells[0] != "(no module)"
    },
    "line_of_forward": lambda ended: re.findall(r"^\| forward \|.*\| (.*) \|$", ended.out, re.MULTILINE),
    "flops": flops_of,
    "tables": lambda ended: [
        line.split()[0] for line in ended.out.splitlines()
        if line in ("a", "b", "c") or line.startswith("Modules, ms of kernel time per ")
    ],
    "without_modules": lambda ended: [
        capture["name"] for capture in json.loads(ended.out)["captures"] if capture["modules"] is None
    ],
})  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four layers of 4, 4, 4 and 7 ms in either direction: 19 + 1 + 2 ms forward and 19 + 3 ms backward, 44 in all."""
    return gpt().write(tmp_path / "train.sqlite")


def rows(table: Table) -> list[dict[str, Any]]:
    """The cells of a table by the titles of their columns."""
    titles = [plain(column.title) for column in table.columns]
    return [dict(zip(titles, row, strict=True)) for row in table.rows]


@pytest.mark.parametrize("name", ["functions_autograd_gpt2", "mem_small256"])
def test_the_outermost_rows_and_the_rest_are_all_of_the_time(real_summary: RealSummary, name: str) -> None:
    """Their shares add up to 100 %: nothing is in no row, folded or not."""
    summary = real_summary(name)
    modules = summary.modules
    assert modules is not None
    roots = {one.path for one in modules.modules if not one.depth}
    for every in (False, True):
        (shown,) = (one for one in modules_section((summary,), each_layer=every).blocks if isinstance(one, Table))
        shares = [row["share"] for row in rows(shown) if row["module"] in {*roots, "(no module)"}]
        assert len(shares) == len(roots) + 1
        assert sum(shares) == pytest.approx(1, abs=1e-9)
    assert len(shown.rows) == len(modules.modules) + 1


def test_a_report_holds_the_section(trace: Path, run_main: Main) -> None:
    """With the rows that the command prints."""
    page = run_main("report", trace, "-o", "-", "--no-figures").out
    table = run_main("modules", trace, "--format", "markdown").out
    (row,) = (line for line in table.splitlines() if line.startswith("| `· · attn`"))
    assert "Which modules take the time?" in page
    assert "".join(row.split()) in "".join(page.split())  # folded, its columns are not padded


def test_json_is_that_of_the_report(trace: Path, run_main: Main) -> None:
    (capture,) = json.loads(run_main("modules", trace, "--format", "json").out)["captures"]
    (reported,) = json.loads(run_main("report", trace, "--format", "json").out)["captures"]
    assert capture == {key: reported[key] for key in capture}

"""Tests a report over any two kinds of capture: neither stops the other, and each keeps its row."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from click.testing import CliRunner

from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import TraceError
from nsys_analyzer.experiments.evidence import make_evidence
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.renderers import RENDERERS
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.trace.kineto import read_tables
from nsys_analyzer.trace.reader import write_sqlite
from tests.support.export import ADD, GEMM, PID, Export, training_step

CPU = Path(__file__).parent / "data" / "cpu_train.pt.trace.json.gz"


def _one_rank_without_ranges(export: Export) -> Export:
    return training_step(export).kernel(GEMM, 20, 30, 130, tid=PID + 1, pid=PID + 1)


def _phases_of_no_length(export: Export) -> Export:
    for name in ("forward", "backward", "optimizer"):
        export.range(name, 50, 50)
    return export.kernel(GEMM, 50, 60, 70)


def _nameless(export: Export) -> Export:
    export.drop("StringIds")
    return training_step(export)


def _forward(export: Export) -> Export:
    return export.range("forward", 0, 100)


#: What each kind of capture holds.
BUILDERS: dict[str, Callable[[Export], Export]] = {
    "annotated": training_step,
    "bare": lambda export: export.kernel(GEMM, 20, 30, 130).kernel(ADD, 40, 130, 150),
    "warmup_only": lambda export: training_step(export).range("warmup", -10, 2_000),
    "ranges_only": lambda export: _forward(export).range("backward", 100, 300),
    "graphs_only": lambda export: _forward(export).graph(10, 20, 90),
    "without_launches": lambda export: _forward(export).kernel(GEMM, None, 30, 130),
    "copies_only": lambda export: _forward(export).memory("MEMCPY", 10, 20, 90),
    "two_processes": lambda export: training_step(training_step(export), pid=PID + 1),
    "one_rank_without_ranges": _one_rank_without_ranges,
    "phases_of_no_length": _phases_of_no_length,
    "kernels_of_no_length": lambda export: _forward(export).kernel(GEMM, 20, 30, 30).kernel(ADD, 40, 50, 50),
    "nameless": _nameless,
    "of_impossible_times": lambda export: _forward(export).kernel(GEMM, 20, 90, 30),
}
KINDS = (*BUILDERS, "empty", "truncated", "on_cpu")


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Two captures of each kind, whose names tell a model and context length in one of them."""
    folder = tmp_path_factory.mktemp("pairs")
    made = {}
    for kind in KINDS:
        paths = folder / f"{kind}.sqlite", folder / f"small_ctx256_{kind}.sqlite"
        for path in paths:
            if kind in BUILDERS:
                export = Export() if kind == "ranges_only" else Export().gpu()
                BUILDERS[kind](export).write(path)
            elif kind == "on_cpu":
                write_sqlite(read_tables(CPU), path)
            else:
                training_step(Export().gpu()).write(path)
                path.write_bytes(path.read_bytes()[:5000] if kind == "truncated" else b"")
        made[kind] = paths
    return made


UNREADABLE = ("empty", "truncated")
#: Each kind beside a whole capture, and beside another one of its kind.
PAIRS = [*(("annotated", kind) for kind in KINDS), *((kind, kind) for kind in KINDS[1:] if kind not in UNREADABLE)]


@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("timed", [False, True], ids=["", "timed"])
def test_every_pair(one: str, other: str, timed: bool, captures: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    paths = [captures[one][0], captures[other][1]]
    csv = tmp_path / "timings.csv"
    csv.write_text("model,context_length,phase,mean_ms,std_ms\nsmall,256,forward,5,0.1\n", encoding="utf-8")
    evidence = make_evidence(gather(paths, [csv] if timed else []), "command")
    built = build_report(evidence)
    text = render(built, {})
    data = json.loads(RENDERERS["json"].render(built, {}))
    assert {path.stem for path in paths} <= {capture["name"] for capture in data["captures"]}
    assert all(path.stem in text for path in paths)
    assert "nan" not in text.split()


@pytest.mark.parametrize(("one", "other"), list(combinations_with_replacement(UNREADABLE, 2)))
def test_a_pair_of_which_nothing_can_be_read(one: str, other: str, captures: dict[str, tuple[Path, Path]]) -> None:
    with pytest.raises(TraceError, match="None of 2 captures could be read"):
        gather([captures[one][0], captures[other][1]])


def test_every_kind_at_once_with_figures(captures: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    paths = [str(path) for pair in captures.values() for path in pair]
    result = CliRunner().invoke(cli, ["report", *paths, "-o", str(tmp_path / "report.md")])
    assert result.exit_code == 0, result.output

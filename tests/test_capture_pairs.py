"""A report over any two kinds of capture: none ends another's, and each keeps its row."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from click.testing import CliRunner

from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import TraceError
from nsys_analyzer.experiments.loading import load_evidence
from nsys_analyzer.report.renderers import RENDERERS
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.trace.kineto import read_tables
from nsys_analyzer.trace.reader import write_sqlite
from tests.support.export import ADD, GEMM, PID, Export, training_step

CPU = Path(__file__).parent / "data" / "cpu_train.pt.trace.json.gz"


def annotated(export: Export) -> Export:
    return training_step(export.gpu())


def bare(export: Export) -> Export:
    """Kernels, and no range at all."""
    return export.gpu().kernel(GEMM, 20, 30, 130).kernel(ADD, 40, 130, 150)


def warmup_only(export: Export) -> Export:
    return training_step(export.gpu()).range("warmup", -10, 2_000)


def ranges_only(export: Export) -> Export:
    return export.range("forward", 0, 100).range("backward", 100, 300)


def graphs_only(export: Export) -> Export:
    return export.gpu().range("forward", 0, 100).graph(10, 20, 90)


def gpu_only(export: Export) -> Export:
    """Kernels without launches."""
    return export.gpu().range("forward", 0, 200).kernel(GEMM, None, 30, 130)


def copies_only(export: Export) -> Export:
    return export.gpu().range("forward", 0, 100).memory("MEMCPY", 10, 20, 90)


def two_processes(export: Export) -> Export:
    return training_step(training_step(export.gpu()), pid=PID + 1)


def one_rank_without_ranges(export: Export) -> Export:
    return training_step(export.gpu()).kernel(GEMM, 20, 30, 130, tid=PID + 1, pid=PID + 1)


def phases_of_no_length(export: Export) -> Export:
    for name in ("forward", "backward", "optimizer"):
        export.range(name, 50, 50)
    return export.gpu().kernel(GEMM, 50, 60, 70)


def kernels_of_no_length(export: Export) -> Export:
    return export.gpu().range("forward", 0, 100).kernel(GEMM, 20, 30, 30).kernel(ADD, 40, 50, 50)


def nameless(export: Export) -> Export:
    export.drop("StringIds")
    return training_step(export.gpu())


def untimed(export: Export) -> Export:
    """All kernels have impossible times."""
    return export.gpu().range("forward", 0, 100).kernel(GEMM, 20, 90, 30)


BUILDERS: dict[str, Callable[[Export], Export]] = {
    build.__name__: build
    for build in (
        annotated, bare, warmup_only, ranges_only, graphs_only, gpu_only, copies_only, two_processes,
        one_rank_without_ranges, phases_of_no_length, kernels_of_no_length, nameless, untimed,
    )
}  # fmt: skip
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
                BUILDERS[kind](Export()).write(path)
            elif kind == "on_cpu":
                write_sqlite(read_tables(CPU), path)
            else:
                annotated(Export()).write(path)
                path.write_bytes(path.read_bytes()[:5000] if kind == "truncated" else b"")
        made[kind] = paths
    return made


PAIRS = list(combinations_with_replacement(KINDS, 2))
UNREADABLE = {"empty", "truncated"}


@pytest.mark.parametrize(("one", "other"), [pair for pair in PAIRS if not UNREADABLE.issuperset(pair)])
@pytest.mark.parametrize("timed", [False, True], ids=["", "timed"])
def test_every_pair(one: str, other: str, timed: bool, captures: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    paths = [captures[one][0], captures[other][1]]
    csv = tmp_path / "timings.csv"
    csv.write_text("model,context_length,phase,mean_ms,std_ms\nsmall,256,forward,5,0.1\n", encoding="utf-8")
    evidence = load_evidence(paths, [csv] if timed else [], "command")
    built = build_report(evidence)
    text = render(built, {})
    data = json.loads(RENDERERS["json"].render(built, {}))
    assert {path.stem for path in paths} <= {capture["name"] for capture in data["captures"]}
    assert all(path.stem in text for path in paths)
    assert "nan" not in text.split()


@pytest.mark.parametrize(("one", "other"), [pair for pair in PAIRS if UNREADABLE.issuperset(pair)])
def test_a_pair_of_which_nothing_can_be_read(one: str, other: str, captures: dict[str, tuple[Path, Path]]) -> None:
    with pytest.raises(TraceError, match="None of 2 captures could be read"):
        load_evidence([captures[one][0], captures[other][1]], [], "command")


def test_every_kind_at_once_with_figures(captures: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    paths = [str(path) for pair in captures.values() for path in pair]
    result = CliRunner().invoke(cli, ["report", *paths, "-o", str(tmp_path / "report.md")])
    assert result.exit_code == 0, result.output

"""The committed report of the experiments is what the committed rows make.

The page on planted faults is what the code says of the committed captures today; ``make examples`` renews it.
"""

import csv
import json
import lzma
import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from nsys_analyzer import summarize
from nsys_analyzer.experiments.benches import BENCHES
from nsys_analyzer.experiments.model import Bench
from nsys_analyzer.inputs.rows import ROWS_FILE, read_rows_file
from tests.conftest import ROOT
from tests.renew_examples import (
    ACCURACY,
    FAULTS,
    PREDICTIONS,
    PROGRAMS,
    RANKS,
    SERVED,
    SERVING,
    SHORT_TABLE,
    write_accuracy,
    write_captures_of,
    write_ranks,
)
from tests.test_bench_command import invoke

BENCHES_FOLDER = Path(__file__).parent.parent / "examples" / "benches"


def test_the_report_of_the_experiments(tmp_path: Path) -> None:
    done = invoke("report", BENCHES_FOLDER, "-o", tmp_path / "report.md", "--no-figures")
    assert done.exit_code == 0, done.output
    committed = (BENCHES_FOLDER / "report.md").read_text(encoding="utf-8")
    # What holds figures alone is left out where none are drawn.
    committed = re.sub(r"<details><summary>[^\n]*</summary>\n\n(?:!\[[^\n]*\n\n)+</details>\n", "", committed)
    made = (tmp_path / "report.md").read_text(encoding="utf-8")
    kept = [line for line in committed.splitlines() if line and not line.startswith("![")]
    links = os.path.relpath(BENCHES_FOLDER, tmp_path)
    assert [line.replace(f"{links}/", "") for line in made.splitlines() if line] == kept


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: str(bench.name))
def test_every_experiment_was_run_on_a_gpu(bench: Bench) -> None:
    header, rows = read_rows_file(BENCHES_FOLDER / bench.name / ROWS_FILE)
    assert header["bench"] == bench.name
    assert {row.status for row in rows} <= {"ok", "oom"}
    gpus = {row.machine.get("gpu") for row in rows}
    assert gpus == {"NVIDIA H100 80GB HBM3" if bench.name == "attainable" else "NVIDIA H200"}


def test_the_faults_were_timed_with_what_the_page_says() -> None:
    measured = json.loads((FAULTS / "measured.json").read_text(encoding="utf-8"))
    for faults in measured.values():
        planted = [one for name, one in faults.items() if name not in ("bf16", "double_batch")]
        assert len({(one["gpu"], one["torch"], one["model"]) for one in planted}) == 1
        assert all(len(one[times]) == one["rounds"] for one in faults.values() for times in ("fault_ms", "remedy_ms"))


def test_the_page_on_planted_faults(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the faults are described beside their target")
    short = write_accuracy(tmp_path / "accuracy.md")
    assert (tmp_path / "accuracy.md").read_text(encoding="utf-8") == ACCURACY.read_text(encoding="utf-8")
    assert SHORT_TABLE.findall(PREDICTIONS.read_text(encoding="utf-8")) == [short]


def test_the_report_of_the_programs(tmp_path: Path) -> None:
    """Programs that nobody annotated, recorded on a GPU, module by module."""
    write_captures_of(PROGRAMS, tmp_path / "report.md")
    assert (tmp_path / "report.md").read_bytes() == (PROGRAMS / "report.md").read_bytes()


def test_the_report_of_the_server(tmp_path: Path) -> None:
    write_captures_of(SERVING, tmp_path / "report.md", *SERVED)
    assert (tmp_path / "report.md").read_bytes() == (SERVING / "report.md").read_bytes()


def logged_ms(name: str) -> dict[str, list[float]]:
    """The lengths of steps by kind, as the engine itself logged them."""
    found: dict[str, list[float]] = {}
    with (SERVING / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["kind"], []).append(float(row["ms"]))
    return found


@pytest.mark.parametrize("name", ["eager", "graph"])
def test_steps_of_a_server_are_those_of_its_own_log(name: str, tmp_path: Path) -> None:
    (capture,) = summarize(unpacked(name, tmp_path))
    assert capture.serving is not None
    log = logged_ms(f"{name}_profiled")
    # A step lasts to the start of the next one, the engine's record to its last token: 0.03 to 0.07 ms less.
    for kind in capture.serving.kinds:
        assert kind.steps == len(log[kind.kind])
        assert kind.length_ms.median == pytest.approx(statistics.median(log[kind.kind]), rel=0.01)


def test_what_cuda_graphs_save_a_server_was_predicted(tmp_path: Path) -> None:
    (capture,) = summarize(unpacked("eager", tmp_path))
    assert capture.diagnosis is not None
    first = capture.diagnosis.findings[0]
    assert first.id == "launch_bound"
    # Without a profiler, 8.86 ms with eager launches and 1.96 with a graph: 6.9 ms less.
    before, after = (statistics.median(logged_ms(name)["decode"]) for name in ("eager", "graph"))
    assert first.saves_ms_low < before - after < first.saves_ms_high


def unpacked(name: str, folder: Path) -> Path:
    """A capture of the server."""
    path = folder / f"{name}.sqlite"
    path.write_bytes(lzma.decompress((SERVING / "captures" / f"{name}.sqlite.xz").read_bytes()))
    return path


def test_the_ranks_that_are_explained(tmp_path: Path) -> None:
    write_ranks(tmp_path / "explained.md")
    assert (tmp_path / "explained.md").read_bytes() == (RANKS / "explained.md").read_bytes()


def test_what_to_change_first_beside_nsys_stats(real_capture: Callable[[str], Path]) -> None:
    """The row of a table, beside what `nsys stats` says."""
    (capture,) = summarize(real_capture("train_small256"))
    assert capture.diagnosis is not None
    steps, first = capture.diagnosis, capture.diagnosis.findings[0]
    assert first.id == "launch_bound"
    said = (
        f"{first.title}: without these waits, a step of {steps.step_ms_low:.0f}–{steps.step_ms_high:.0f} ms would be "
        f"{first.saves_ms_low:.0f}–{first.saves_ms_high:.0f} ms shorter"
    )
    assert said in (ROOT / "docs" / "nsys_stats.md").read_text(encoding="utf-8")

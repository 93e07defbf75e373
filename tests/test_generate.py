"""How a report says its captures were made: what was run, as far as that is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.cli.main import cli
from nsys_analyzer.trace.metadata import Recording
from tests.support.export import Export, training_step
from tests.test_report_command import section

ENVIRONMENT = ("PROCESS_0:ENVIRONMENT_VARIABLE", 'API_KEY="swordfish9"')


def recorded(*rows: tuple[str, str]) -> Export:
    """A step, and what nsys writes of its capture: options, the program, its environment and folder."""
    export = training_step(Export().gpu())
    for name, value in (*rows, ENVIRONMENT, ("PROCESS_0:WORKING_DIR", "/home/zelda"), ("DEVICE_DISPLAY_NAME", "tower")):
        export.add("META_DATA_CAPTURE", name=name, value=value)
    return export


PROGRAM = (
    ("CAPTURE_EVENT_TYPE", "NvtxEvents"),
    ("CAPTURE_EVENT_TYPE", "Cuda"),
    ("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Node"),
    ("PROCESS_0:COMMAND", "/opt/venv/bin/python3"),
    ("PROCESS_0:ARGUMENT_10", "4"),
    ("PROCESS_0:ARGUMENT_0", "/home/zelda/train.py"),
    ("PROCESS_0:ARGUMENT_2", "tr1force"),
    ("PROCESS_0:ARGUMENT_1", "--api-key"),
    ("PROCESS_0:ARGUMENT_3", "--data=/mnt/hidden/set.bin"),
    ("PROCESS_0:ARGUMENT_4", "--steps"),
)


def generate(*paths: Path) -> str:
    words = ["report", *map(str, paths), "-o", "-"]
    return section(CliRunner().invoke(cli, words, catch_exceptions=False).stdout, "How this report was made")


def test_only_named_properties_are_read(tmp_path: Path) -> None:
    metadata = Trace.load(recorded(*PROGRAM).write(tmp_path / "t.sqlite")).metadata
    assert metadata.recording == Recording(("NvtxEvents", "Cuda"), "node")
    assert "swordfish9" not in repr(metadata)
    assert "tower" not in repr(metadata)


def test_an_export_that_says_what_was_run(tmp_path: Path) -> None:
    text = generate(recorded(*PROGRAM).write(tmp_path / "mine.sqlite"))
    assert next(line for line in text.splitlines() if line.startswith("What was run")) == (
        "What was run, as far as the captures say: mine with `--trace=cuda,nvtx`, `--cuda-graph-trace=node`."
    )
    assert not [word for word in ("zelda", "tr1force", "hidden", "swordfish9") if word in text]


def test_an_export_that_says_nothing(tmp_path: Path) -> None:
    text = generate(training_step(Export().gpu()).write(tmp_path / "mine.sqlite"))
    assert "What was run" not in text
    assert "# this report" in text


def test_events_that_have_no_option_here(tmp_path: Path) -> None:
    export = recorded(("CAPTURE_EVENT_TYPE", "Cuda"), ("CAPTURE_EVENT_TYPE", "GpuCtxSw"))
    text = generate(export.write(tmp_path / "m.sqlite"))
    assert "m with `--trace=cuda`, events GpuCtxSw." in text


def test_a_graph_trace_is_told_what_to_change(real_capture: Callable[[str], Path]) -> None:
    """It warns of the option's absence: it must not stand there as what was run."""
    text = generate(real_capture("graph_small256"))
    assert "graph_small256 with `--trace=cuda,nvtx`, `--cuda-graph-trace=graph`." in text
    assert "To change: graph_small256 traced each CUDA graph as a whole, so that its kernels are unknown." in text
    assert "`--cuda-graph-trace=node` traces them one by one." in text
    assert "To change" not in generate(real_capture("graphnode_small256"))

"""The figure of one step: lanes of ranges, calls, streams and idle time, from a few blocks to thousands."""

import struct
import time
import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.report.figures import draw
from nsys_analyzer.report.figures.palette import CAUSES, CLASSES
from nsys_analyzer.report.figures.timeline import short
from nsys_analyzer.report.model import Report, Section, Strip, Timeline
from nsys_analyzer.report.sections.step_timeline import timeline_of
from nsys_analyzer.trace.trace import Trace
from tests.support.hostile import TEXTS, WORST

SWEEP = Path(__file__).parent.parent / "examples" / "sweep"
PHASES = Strip("CPU: main thread", "ranges", (("forward", 0, 30), ("backward", 30, 80), ("optimizer", 80, 100)))


def size(figure: Timeline, tmp_path: Path) -> tuple[int, int]:
    """Draws a figure; the width and height that its PNG header says."""
    draw(figure, tmp_path / "figure.png")
    width, height = struct.unpack(">II", (tmp_path / "figure.png").read_bytes()[16:24])
    return int(width), int(height)


def pixels(figure: Timeline, tmp_path: Path) -> NDArray[np.int64]:
    """The figure as drawn, shape (height, width, 3), from 0 to 255."""
    draw(figure, tmp_path / "figure.png")
    found: NDArray[np.int64] = (matplotlib.image.imread(tmp_path / "figure.png")[:, :, :3] * 255).round().astype(int)
    return found


def count(picture: NDArray[np.int64], color: str) -> int:
    """The pixels of exactly one color."""
    return int(np.all(picture == [int(color[i : i + 2], 16) for i in (1, 3, 5)], axis=2).sum())


def timeline(*lanes: Strip, title: str = "train_small256: the step nearest the median, 100.0 ms") -> Timeline:
    return Timeline("train_small256-step", title, lanes)


def kernels(number: int, period: float, busy: float, *names: str) -> tuple[tuple[str, float, float], ...]:
    """Kernels one after another, each busy for a share of its period in ms, by turns of some classes."""
    return tuple((names[i % len(names)], i * period, (i + busy) * period) for i in range(number))


def test_a_step_of_thousands_of_kernels(tmp_path: Path) -> None:
    streams = (
        Strip("GPU stream 7", "stream", kernels(5_000, 0.02, 0.5, "matmul", "elementwise")),
        Strip("GPU stream 17", "stream", kernels(5_000, 0.02, 0.1, "communication")),
    )
    idle = Strip("GPU idle", "idle", kernels(5_000, 0.02, 0.4, "launch"))
    figure = timeline(PHASES, *streams, idle)
    assert size(figure, tmp_path)[0] == 1642  # 8.21 in at 200 dots per inch
    start = time.perf_counter()
    picture = pixels(figure, tmp_path)
    assert time.perf_counter() - start < 5  # about 0.2 s on a free processor
    # A lane of 0.5 in has 100 rows; a class that has a quarter of every column has a quarter of these, at full color.
    matmul, elementwise = count(picture, CLASSES["matmul"]), count(picture, CLASSES["elementwise"])
    assert matmul == pytest.approx(elementwise, rel=0.1)
    assert matmul == pytest.approx(1300 * 25, rel=0.15)
    assert count(picture, CLASSES["communication"]) == pytest.approx(1300 * 10, rel=0.2)
    assert count(picture, CAUSES["launch"]) == pytest.approx(1300 * 72 * 0.4, rel=0.2)


def test_a_lane_is_as_high_as_its_classes_cover(tmp_path: Path) -> None:
    full = count(pixels(timeline(Strip("", "stream", (("matmul", 0, 10),))), tmp_path), CLASSES["matmul"])
    half = timeline(Strip("", "stream", (("matmul", 0, 5), ("memset/memcpy", 10, 10))))
    assert count(pixels(half, tmp_path), CLASSES["matmul"]) == pytest.approx(full / 2, rel=0.02)


def test_height_grows_with_lanes_and_legend(tmp_path: Path) -> None:
    stream = Strip("GPU stream 7", "stream", (("matmul", 0.0, 60.0),))
    one, two = (size(timeline(PHASES, *[stream] * number), tmp_path)[1] for number in (1, 2))
    assert two - one == 114  # 0.5 + 0.07 in
    idle = Strip("GPU idle", "idle", (("sync", 60.0, 100.0),))
    assert size(timeline(PHASES, stream, idle), tmp_path)[1] - one == 124  # 0.36 + 0.07 in, and a row of 0.19


def test_more_classes_than_colors(tmp_path: Path) -> None:
    """Ten classes have their own color in the legend; of sixteen nine do, and the rest is other."""
    names = [name for name in CLASSES if name != "other"]
    blocks = tuple((name, 10.0 * i, 10.0 * i + 10 - i / 10) for i, name in enumerate([*names, "of no table"]))
    picture = pixels(timeline(Strip("GPU stream 7", "stream", blocks)), tmp_path)
    assert all(count(picture, CLASSES[name]) for name in (*names[:9], "other"))
    assert not any(count(picture, CLASSES[name]) for name in names[9:])


@pytest.mark.parametrize("kind", ["ranges", "calls", "stream", "idle"])
@pytest.mark.parametrize(
    "blocks",
    [
        (),
        (("forward", 0.0, 0.0),),
        (("matmul", 1.0, 1.0), ("sync", 2.0, 2.0), ("matmul", 2.0, 2.0)),
        (("x" * 500, 0.0, 1.0), ("y" * 500, 1.0, 100.0), ("z z " * 125, 100.0, 101.0)),
        (("forward", 0.0, 50.0), ("inside", 10.0, 20.0), ("across", 40.0, 60.0)),
        (("forward", 0.0, 1e-6), ("backward", 1e6, 1e6 + 1)),
        tuple((f"aten::op_{i}", float(i), i + 0.5) for i in range(2_000)),
    ],
    ids=["empty", "no time", "zero length", "long names", "overlaps", "far apart", "two thousand names"],
)
def test_one_lane(tmp_path: Path, kind: str, blocks: tuple[tuple[str, float, float], ...]) -> None:
    for title in ("", "GPU stream 7", "t" * 500):
        lane = Strip(title, kind, blocks)  # type: ignore[arg-type]
        assert size(timeline(lane, title="t " * 300), tmp_path)[0] == 1642


def test_no_lanes(tmp_path: Path) -> None:
    assert size(timeline(), tmp_path)[0] == 1642


@given(TEXTS)
@settings(max_examples=6, deadline=None)
def test_no_name_breaks_it(name: str) -> None:
    blocks = ((name, 0.0, 40.0), (f"{name}.", 40.0, 41.0), (name + WORST, 60.0, 61.0))
    lanes = [Strip(name, kind, blocks) for kind in ("ranges", "calls", "stream", "idle")]
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert size(Timeline("f", name, tuple(lanes), name), Path(folder))[0] == 1642


@pytest.mark.parametrize("letters", [3, 60, 500])
def test_nothing_is_cut_off(tmp_path: Path, letters: int) -> None:
    name = "W" * letters
    calls = Strip(name, "calls", ((name, 0.0, 1.0), (name, 99.9, 100.0)))
    stream = Strip("GPU stream 7", "stream", tuple((one, i, i + 1) for i, one in enumerate(CLASSES)))
    idle = Strip("GPU idle", "idle", tuple((one, i, i + 1) for i, one in enumerate(CAUSES)))
    picture = pixels(timeline(PHASES, calls, stream, idle), tmp_path)
    edges = (picture[0], picture[-1], picture[:, 0], picture[:, -1])
    assert all(np.all(edge == 255) for edge in edges)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forward", "forward"),
        ("forward (inferred from nsys's function ranges)", "forward"),
        ("torch.nn.functional.pad", "pad"),
        ("Optimizer.step#AdamW.step", "step"),
        ("autograd::engine::evaluate_function: MulBackward0", "MulBackward0"),
        ("aten::item", "item"),
        ("computing softmax", "computing softmax"),
        ("step 3. of 7", "step 3. of 7"),
        ("ends in a dot.", "ends in a dot."),
        ("dot.", "dot."),
    ],
)
def test_short_names(name: str, expected: str) -> None:
    assert short(name) == expected


def test_a_capture_as_a_figure(tmp_path: Path) -> None:
    trace = Trace.load(SWEEP / "small_ctx256_train_fp32" / "capture.sqlite")
    (capture,) = summarize(trace, "small_ctx256")
    figure = timeline_of(capture)
    assert figure
    assert figure.key == "small_ctx256-step"
    assert figure.title == "small_ctx256: the step nearest the median"
    titles = [lane.title for lane in figure.lanes if lane.title]
    assert titles == ["CPU: main thread", "CPU: blocking calls", "GPU stream 7", "GPU idle"]
    assert [name for name, _, _ in figure.lanes[0].blocks] == ["forward", "loss", "backward", "optimizer"]
    assert [name for name, _, _ in figure.lanes[1].blocks] == ["scaled dot product attention"] * 12
    # The GPU works or idles at every moment: 38.18 ms on one stream.
    spans = [end - start for lane in figure.lanes if lane.kind in ("stream", "idle") for _, start, end in lane.blocks]
    assert sum(spans) == pytest.approx(38.179, abs=0.001)
    assert size(figure, tmp_path)[0] == 1642
    assert Report("r", (Section("s", "Steps", (figure,)),)).figures == (figure,)


def test_a_program_that_runs_ahead(tmp_path: Path) -> None:
    """Its ranges belong to later work: their edges do not go through the lanes of the GPU, and the title says so."""
    stream = Strip("GPU stream 7", "stream", (("matmul", 0.0, 100.0),))
    figure = timeline(PHASES, stream)
    lines, none = (pixels(replace(figure, cpu_ahead=ahead), tmp_path) for ahead in (False, True))
    assert count(lines, CLASSES["matmul"]) < count(none, CLASSES["matmul"])
    (capture,) = summarize(Trace.load(SWEEP / "small_ctx256_train_fp32" / "capture.sqlite"), "small_ctx256")
    assert capture.step
    ahead = timeline_of(replace(capture, step=replace(capture.step, on_gpu_timeline=True)))
    assert ahead
    assert ahead.cpu_ahead
    assert ahead.title.endswith("median. The CPU runs ahead: its ranges belong to later GPU work")


def test_a_capture_without_steps() -> None:
    trace = Trace.load(SWEEP / "small_ctx256_train_fp32" / "capture.sqlite")
    (capture,) = summarize(trace, "small_ctx256")
    assert timeline_of(replace(capture, step=None)) is None

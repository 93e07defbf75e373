"""Figures of every kind, of the sizes and names that captures have, and their colors."""

import struct
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import matplotlib.image
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nsys_analyzer.report.figures import draw_png
from nsys_analyzer.report.model import Bars, Figure, Lines
from tests.support.hostile import TEXTS

Kind = Literal["grouped", "stacked"]
Series = tuple[tuple[str, tuple[float | None, ...]], ...]
KINDS: list[Kind] = ["grouped", "stacked"]
PHASES = ("forward", "backward", "optimizer", "step")


def size(figure: Figure, tmp_path: Path) -> tuple[int, int]:
    """Draws a figure; the width and height that its PNG header says."""
    path = tmp_path / "figure.png"
    draw_png(figure, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return int(width), int(height)


def bars(kind: Kind, groups: tuple[str, ...], *values: tuple[float | None, ...]) -> Bars:
    series: Series = tuple((f"series {i}", one) for i, one in enumerate(values))
    return Bars("figure", "train_small256: a figure", groups, series, "ms per instance", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_width(tmp_path: Path, kind: Kind) -> None:
    # 8.21 in at 200 dots per inch: twice the 821 pixels of a page on GitHub
    assert size(bars(kind, PHASES, (21.0, 40.2, 22.4, 84.1)), tmp_path)[0] == 1642


def test_height(tmp_path: Path) -> None:
    four = (1.0, 2.0, 3.0, 4.0)
    assert size(bars("grouped", PHASES, four), tmp_path)[1] == 840  # 4.2 in
    # 1.15 + 4 · 0.5 in; parts are too thin for their names: three rows of five in the legend, 0.2 in each
    assert size(bars("stacked", PHASES, *[four] * 13), tmp_path)[1] == 750


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "values",
    [
        (None, 1.0, None, 2.0),
        (None, None, None, None),
        (0.0, 0.0, 0.0, 0.0),
        (1e-7, 1e6, 0.5, 3.0),
        (1e300, -1e300, 1e15, 2.0),
        (1234.5, 12_345.0, 999.99, 100.0),
    ],
)
def test_values(tmp_path: Path, kind: Kind, values: tuple[float | None, ...]) -> None:
    assert size(bars(kind, PHASES, values), tmp_path)[0] == 1642
    assert size(bars(kind, PHASES, values, (1.0, None, 2.0, None), values), tmp_path)[0] == 1642


@pytest.mark.parametrize("kind", KINDS)
def test_one_group(tmp_path: Path, kind: Kind) -> None:
    assert size(bars(kind, ("forward",), (9.0,)), tmp_path)[0] == 1642


@pytest.mark.parametrize("kind", KINDS)
def test_thirty_groups(tmp_path: Path, kind: Kind) -> None:
    groups = tuple(f"kernel number {i}" for i in range(30))
    width, height = size(bars(kind, groups, tuple(float(i) for i in range(30))), tmp_path)
    assert width == 1642
    assert height < 30 * 0.7 * 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [60, 300])
def test_long_names(tmp_path: Path, kind: Kind, length: int) -> None:
    groups = tuple(f"{i} " + "x" * (length - 2) for i in range(12))
    figure = Bars("f", "t " * length, groups, (("ms", tuple(float(i) for i in range(12))),), "ms", kind)
    assert size(figure, tmp_path)[0] == 1642


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_no_formulas(tmp_path: Path, kind: Kind) -> None:
    """Dollars start no TeX, a leading underscore hides nothing, a letter that the font lacks is a box."""
    groups = ("$a$", r"$\frac$", "_private", "训练")
    figure = Bars("f", r"$x_1$ and \$ of $\nonsense$", groups, (("$y$", (1.0, 2.0, 3.0, 4.0)),), "ms", kind)
    assert size(figure, tmp_path)[0] == 1642


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_cut_off(tmp_path: Path, kind: Kind) -> None:
    """The outermost pixels of the picture are background on every side."""
    label = "elementwise mul float (strided, Binary, 2 gpu_k…impl_nocast)"
    groups = tuple(f"{label[:57]} {i}" for i in range(3))
    figure = Bars("f", "2.7B_ctx1024 rank 0: " + "kernels " * 12, groups, (("ms", (1500.0, 20.0, 3.0)),), "ms", kind)
    draw_png(figure, tmp_path / "figure.png")
    pixels = matplotlib.image.imread(tmp_path / "figure.png")[:, :, :3]
    edges = (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])
    assert all(np.all(edge == 1.0) for edge in edges)


def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    figure = bars("grouped", PHASES, (21.0, 40.2, 22.4, 84.1))
    draw_png(figure, tmp_path / "a.png")
    draw_png(figure, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def lines(**more: bool) -> Lines:
    points = ((256.0, 1.0), (1024.0, 16.0), (4096.0, None), (16384.0, 4096.0))
    return Lines("f", "time by length", (("d 16", points), ("$d_1$", points[:1])), "tokens", "ms", **more)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_lines(tmp_path: Path, log: bool, steps: bool) -> None:
    assert size(lines(log_x=log, log_y=log, steps=steps), tmp_path) == (1642, 880)  # 4.2 in, and a row of the legend


_AMOUNTS = st.one_of(st.sampled_from([0.0, -1.0, 1e-300, 1e300, 5.0, 5.0]), st.floats(-10, 10))


@given(
    st.lists(st.lists(st.tuples(_AMOUNTS, st.none() | _AMOUNTS), max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
@example([[(256.0, None), (512.0, None)]], True, True)
@example([[(-1.0, 0.0)], [(0.0, -1.0)]], True, True)
@settings(max_examples=12, deadline=None)
def test_any_curve_is_drawn(curves: list[list[tuple[float, float | None]]], log_x: bool, log_y: bool) -> None:
    """What a logarithmic axis has no place for is left out."""
    series = tuple((str(number), tuple(points)) for number, points in enumerate(curves))
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        size(Lines("key", "Curves", series, "x", "y", log_x=log_x, log_y=log_y), Path(folder))


def test_lines_that_are_logarithmic_are_drawn_otherwise(tmp_path: Path) -> None:
    pictures = []
    for log in (False, True):
        draw_png(lines(log_x=log, log_y=log), tmp_path / "figure.png")
        pictures.append((tmp_path / "figure.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_shaded_stretches_stand_in_the_legend_once(tmp_path: Path) -> None:
    spans = tuple((f"phase {i % 4}", float(i), i + 1.0) for i in range(8))
    curve = (("bytes", ((0.0, 1.0), (10.0, 2.0))),)
    figure = Lines("f", "memory", curve, "ms", "MiB", spans=spans, steps=True)
    assert size(figure, tmp_path)[1] == 880  # the curve's name and four others: one row of 0.2 in


@given(TEXTS)
@settings(max_examples=6, deadline=None)
def test_no_name_breaks_a_figure(name: str) -> None:
    """No name is a formula, breaks a line, or lets the plotting library say something of its own."""
    points = ((name, (1.0, 2.0)), (f"{name} too", (None, 3.0)))
    curves = ((name, ((1.0, 2.0), (2.0, None))), (f"{name} too", ((1.0, 3.0), (4.0, 5.0))))
    spans = ((name, 1.0, 2.0), ("forward", 2.0, 3.0))
    figures: tuple[Figure, ...] = (
        Bars("f", name, (name, "b"), points, name),
        Bars("f", name, (name, "b"), points, name, "stacked"),
        Lines("f", name, curves, name, name, spans=spans),
    )
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in figures:
            assert size(figure, Path(folder))[0] == 1642


def test_a_curve_below_others_is_seen(tmp_path: Path) -> None:
    points = ((1.0, 1.0), (2.0, 2.0))
    draw_png(Lines("f", "t", (("eager", points), ("compiled", points)), "x", "y"), tmp_path / "figure.png")
    pixels = matplotlib.image.imread(tmp_path / "figure.png")[:, :, :3]
    blue = np.all(np.abs(pixels - [0x33 / 255, 0x77 / 255, 0xDD / 255]) < 0.01, axis=2)
    assert np.sum(blue[200:, 100:1400]) > 1000

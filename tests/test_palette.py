"""The colors of figures, as people with and without color blindness see them."""

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from nsys_analyzer.analysis.steps import process
from nsys_analyzer.report.palette import (
    CAUSE_COLORS,
    CLASS_COLORS,
    COLOR_CYCLE,
    GRAY,
    PHASE_COLORS,
    assign_colors,
    luminance,
    text_color,
)

Array = NDArray[np.float64]

#: What people see who lack one kind of cones, in linear RGB: Machado, Oliveira and Fernandes, "A Physiologically-based
#: Model for Simulation of Color Vision Deficiency", IEEE TVCG 15 (2009), severity 1.0.
VISIONS = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
#: Linear RGB to XYZ, IEC 61966-2-1, and the white of D65.
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])
#: The backgrounds of GitHub's pages.
LIGHT, DARK = "#ffffff", "#0d1117"


def lab(color: str, vision: Array) -> Array:
    """L*, a* and b* of a color as seen."""
    srgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(vision @ linear, 0, 1) / WHITE
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def ciede2000(one: Array, other: Array) -> float:
    """Sharma, Wu and Dalal, "The CIEDE2000 Color-Difference Formula", Color Research and Application 30 (2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 0.5 * (1 - np.sqrt(mean**7 / (mean**7 + 25.0**7)))
    a1, a2 = (1 + g) * a1, (1 + g) * a2
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = np.degrees(np.arctan2(b1, a1)) % 360, np.degrees(np.arctan2(b2, a2)) % 360
    turn = (h2 - h1 + 180) % 360 - 180
    chroma, light = (c1 + c2) / 2, (l1 + l2) / 2
    hue = (h1 + h2) / 2 if abs(h1 - h2) <= 180 else (h1 + h2 + (360 if h1 + h2 < 360 else -360)) / 2
    dh = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    cosines = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    t = 1 + sum(factor * np.cos(np.radians(times * hue + shift)) for factor, times, shift in cosines)
    sl = 1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2)
    sc, sh = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    around_blue = np.sin(np.radians(60 * np.exp(-(((hue - 275) / 25) ** 2))))
    rt = -2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7)) * around_blue
    dl, dc, dh = (l2 - l1) / sl, (c2 - c1) / sc, dh / sh
    return float(np.sqrt(dl**2 + dc**2 + dh**2 + rt * dc * dh))


def contrast(one: str, other: str) -> float:
    """Web Content Accessibility Guidelines 2.2, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        # pairs 1, 7, 16 and 25 of the paper's table of test data
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 0.0, 0.0), (50.0, -1.0, 2.0), 2.3669),
        ((50.0, 2.5, 0.0), (50.0, 0.0, -2.5), 4.3065),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ],
)
def test_the_measure_itself(one: tuple[float, ...], other: tuple[float, ...], expected: float) -> None:
    assert ciede2000(np.array(one), np.array(other)) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize(
    ("colors", "least"),
    [
        (COLOR_CYCLE, 11.5),
        (tuple(CLASS_COLORS.values()), 8.5),
        (tuple(dict.fromkeys(PHASE_COLORS.values())), 11.5),
        (tuple(CAUSE_COLORS.values()), 8.5),
    ],
    ids=["main classes", "all classes", "phases", "causes"],
)
def test_every_pair_is_told_apart(vision: str, colors: tuple[str, ...], least: float) -> None:
    seen = [lab(color, VISIONS[vision]) for color in colors]
    distances = [ciede2000(one, other) for one, other in combinations(seen, 2)]
    assert min(distances) > least


@pytest.mark.parametrize("vision", VISIONS)
def test_a_cause_is_no_class(vision: str) -> None:
    """A timeline has lanes of both, each with a legend of its own."""
    main = [lab(color, VISIONS[vision]) for color in COLOR_CYCLE]
    causes = [lab(color, VISIONS[vision]) for name, color in CAUSE_COLORS.items() if name not in CLASS_COLORS]
    assert min(ciede2000(one, other) for one in main for other in causes) > 7.5


@pytest.mark.parametrize("color", sorted({*CLASS_COLORS.values(), *COLOR_CYCLE, *CAUSE_COLORS.values()}))
def test_contrast_to_the_page_and_to_text(color: str) -> None:
    assert contrast(color, LIGHT) >= 3
    assert contrast(color, DARK) >= 2
    assert contrast(color, {"black": "#000000", "white": "#ffffff"}[text_color(color)]) >= 4.5


def test_colors_of_classes_differ() -> None:
    assert len(set(CLASS_COLORS.values())) == len(CLASS_COLORS)


def test_every_cause_has_a_color_of_its_own() -> None:
    assert set(CAUSE_COLORS) == set(process.CAUSES)
    assert len(set(CAUSE_COLORS.values())) == len(CAUSE_COLORS)


def test_a_name_has_one_color_in_every_table() -> None:
    tables = (CLASS_COLORS, PHASE_COLORS, CAUSE_COLORS)
    named = {name: {table[name] for table in tables if name in table} for table in tables for name in table}
    assert {name for name, colors in named.items() if len(colors) > 1} == set()


def test_colors_of_a_figure() -> None:
    names = ["matmul", "mine", "optimizer", "sdpa, no cache", "sdpa, with cache"]
    found = assign_colors(names)
    assert list(found) == names
    assert found["matmul"] == CLASS_COLORS["matmul"]
    assert found["optimizer"] == CLASS_COLORS["optimizer"]
    assert len(set(found.values())) == len(names)
    assert len(assign_colors([str(number) for number in range(30)])) == 30
    assert GRAY in assign_colors([str(number) for number in range(9)]).values()

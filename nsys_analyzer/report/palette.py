"""Defines the colors of kernel classes, phases, parts of a step and causes of idle time in all drawings.

The colors of kernel classes are declared with the classes.

Every color has a contrast of at least 3:1 to white, the background of figures, and of 2:1 to the dark background of a
page. Colors that may occur in one figure also differ for people who cannot see red, green or blue. A test simulates
color blindness and checks the minimum distance between these colors.
"""

from __future__ import annotations

from collections.abc import Sequence

from nsys_analyzer.analysis.kernels.class_rules import CLASSES, OTHER

#: The color of each kernel class that has its own.
CLASS_COLORS = {name: row.color for name, row in CLASSES.items() if row.color}
#: The classes that usually take the most time. Their colors differ more than the colors of other classes.
MAIN_CLASSES = (
    "matmul", "elementwise", "reduction", "softmax", "copy/layout", "optimizer", "fused attention", "normalization",
    OTHER,
)  # fmt: skip

#: The colors of curves and bars whose names have no color, in the order in which they are used.
COLOR_CYCLE = tuple(CLASS_COLORS[name] for name in MAIN_CLASSES)
BLUE, ORANGE, GREEN, PLUM, TEAL, CRIMSON, INDIGO, FOREST, GRAY = COLOR_CYCLE

PHASE_COLORS = {
    "forward": BLUE,
    "backward": ORANGE,
    "optimizer": CRIMSON,
    "loss": PLUM,
    "step": GRAY,
    "training step": GRAY,
    "forward+backward": TEAL,
    "backward + optimizer": TEAL,
}

#: The color of each part of a step that is not a kernel class.
PART_COLORS = {
    "compute": BLUE,
    "exposed copies": CLASS_COLORS["memset/memcpy"],
    "waiting": ORANGE,
    "transferring": CLASS_COLORS["communication"],
    "exposed communication": CLASS_COLORS["communication"],
}

#: The color of each cause of idle time. These colors differ from the colors of kernel classes, which are drawn beside
#: them.
CAUSE_COLORS = {
    "launch": "#bb4477",
    "host": "#3399ee",
    "sync": "#aa88aa",
    "allocator": "#dd1133",
    "copy": "#cc7788",
    "data": "#558855",
    "communication": "#9955aa",
    "unrecorded": "#781eff",
    "profiler": "#961e3c",
    "unknown": "#554455",
}
#: The parts of the bar from the attainable step to the step have colors of causes, because the bar is drawn beside the
#: bar of kernel classes.
PART_COLORS |= {
    "attainable": CAUSE_COLORS["data"],
    "excess of operators": CAUSE_COLORS["allocator"],
    "unfused operators": CAUSE_COLORS["sync"],
    "redundant work": CAUSE_COLORS["unrecorded"],
    "launching and waiting": CAUSE_COLORS["host"],
    "unexplained": CAUSE_COLORS["unknown"],
}


def assign_colors(names: Sequence[str]) -> dict[str, str]:
    """Returns a color for each name in a figure: that of its class or phase, or an unused color of ``COLOR_CYCLE``."""
    colors: dict[str, str] = dict.fromkeys(names, "")
    for name in colors:
        defined = (CLASS_COLORS | PHASE_COLORS).get(name.lower(), "")
        colors[name] = "" if defined in colors.values() else defined
    for number, name in enumerate(colors):
        unused_colors = [color for color in COLOR_CYCLE if color not in colors.values()]
        colors[name] = colors[name] or (unused_colors[0] if unused_colors else COLOR_CYCLE[number % len(COLOR_CYCLE)])
    return colors


def text_color(background: str) -> str:
    """Returns black or white, whichever has more contrast to the background."""
    return "black" if luminance(background) > 0.179 else "white"


def luminance(color: str) -> float:
    """Computes the relative luminance of a color, from 0 for black to 1 for white.

    See https://www.w3.org/TR/WCAG22/#dfn-relative-luminance.
    """
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

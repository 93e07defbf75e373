"""The colors of figures: one for each class and phase, the same wherever it is drawn.

Every color has a contrast of at least 3:1 to white, on which figures are drawn, and 2:1 to the dark background of a
page. Those that can stand in one figure differ for people who see no red, no green or no blue, too; a test simulates
these and holds the least distance.
"""

from __future__ import annotations

from collections.abc import Sequence

BLUE, ORANGE, GREEN, PLUM, TEAL = "#3377dd", "#ee5a14", "#11aa55", "#880077", "#007755"
CRIMSON, INDIGO, FOREST, GRAY = "#bb0033", "#2233cc", "#005500", "#777788"

#: The order in which curves and bars without a color of their own take one.
CYCLE = (BLUE, ORANGE, GREEN, PLUM, TEAL, CRIMSON, INDIGO, FOREST, GRAY)

#: By kernel class; the first nine take most of the time of a transformer, and differ most.
CLASSES = {
    "matmul": BLUE,
    "elementwise": ORANGE,
    "reduction": GREEN,
    "softmax": PLUM,
    "copy/layout": TEAL,
    "optimizer": CRIMSON,
    "fused attention": INDIGO,
    "normalization": FOREST,
    "other": GRAY,
    "communication": "#9955aa",
    "embedding": "#bb77aa",
    "convolution": "#3399ee",
    "sort/scan": "#558877",
    "random": "#779977",
    "memset/memcpy": "#556666",
    "unknown": "#554455",
}

PHASES = {
    "forward": BLUE,
    "backward": ORANGE,
    "optimizer": CRIMSON,
    "loss": PLUM,
    "step": GRAY,
    "training step": GRAY,
    "forward+backward": TEAL,
    "backward + optimizer": TEAL,
}

#: What fills a step, where it is not told by kernel class.
PARTS = {
    "compute": BLUE,
    "exposed copies": CLASSES["memset/memcpy"],
    "waiting": ORANGE,
    "transferring": CLASSES["communication"],
    "exposed communication": CLASSES["communication"],
}

#: By the cause of a GPU's idle time: beside classes of kernels in one figure, from which they differ, too.
CAUSES = {
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

_KNOWN = CLASSES | PHASES


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """The color of each name of a figure: its own where it has one, else the next that no other name of it takes."""
    chosen: dict[str, str] = dict.fromkeys(names, "")
    for name in chosen:
        own = _KNOWN.get(name.lower(), "")
        chosen[name] = "" if own in chosen.values() else own
    for number, name in enumerate(chosen):
        free = [color for color in CYCLE if color not in chosen.values()]
        chosen[name] = chosen[name] or (free[0] if free else CYCLE[number % len(CYCLE)])
    return chosen


def text_color(background: str) -> str:
    """Black or white, whichever is read better on a color."""
    return "black" if luminance(background) > 0.179 else "white"


def luminance(color: str) -> float:
    """From 0 of black to 1 of white, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

"""Draws the figures of a report as PNG files, at the width of a page and twice its resolution."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any

from nsys_analyzer.report.model import Bars, Figure

#: What a PNG file says of the program that made it.
SOFTWARE = "nsys-analyze"

#: GitHub shows 821 pixels; text of 9 points is 12.5 of them high.
_WIDTH_INCHES, _DPI = 8.21, 200
#: Stands for the page's color of text in a drawing; no figure has it otherwise.
_INK = "#010203"
#: The letters that a drawing was measured with, or letters as wide.
_SANS = ["DejaVu Sans", "Verdana", "sans-serif"]
#: The ID of a group that nothing refers to.
_NUMBERED_ID = re.compile(r' id="[\w.]+_\d+"')
_PAD_INCHES = 0.07
_TITLE_ACROSS = 90
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # dollars in a name are dollars
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "figure.titlesize": 11.0,
}


def draw(figure: Figure, path: Path) -> None:
    """Draws one figure into a PNG file, which bears the name of ``SOFTWARE``.

    Its background is white on every page: no color of text has enough contrast to both a light and a dark one.
    """
    _save(figure, path, "png", {"Software": SOFTWARE}, {})


def svg(figure: Figure) -> str:
    """One figure as an SVG element for an HTML page: its lines and letters have the page's color of text."""
    written = io.StringIO()
    # The IDs of shapes that are used again differ from figure to figure of a page.
    style = {"svg.fonttype": "none", "svg.hashsalt": figure.key, "savefig.transparent": True, "font.sans-serif": _SANS}
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    _save(figure, written, "svg", none, style | dict.fromkeys(inked, _INK))
    text = written.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    return _NUMBERED_ID.sub("", text)


def _save(figure: Figure, target: Any, form: str, metadata: dict[str, Any], style: dict[Any, Any]) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from nsys_analyzer.report.figures.bars import draw_bars
    from nsys_analyzer.report.figures.curves import draw_lines
    from nsys_analyzer.report.figures.words import TITLE, wrapped

    with warnings.catch_warnings(), matplotlib.rc_context(_STYLE | style):
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # a box stands for the letter
        layout = ConstrainedLayoutEngine(w_pad=_PAD_INCHES, h_pad=_PAD_INCHES)
        canvas = Canvas(figsize=(_WIDTH_INCHES, 4.2), dpi=_DPI, layout=layout)
        FigureCanvasAgg(canvas)
        canvas.suptitle(wrapped(figure.title, _TITLE_ACROSS, TITLE), x=0.01, ha="left")
        if isinstance(figure, Bars):
            draw_bars(canvas, figure)
        else:
            draw_lines(canvas, figure)
        canvas.savefig(target, format=form, metadata=metadata)

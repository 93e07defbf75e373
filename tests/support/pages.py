"""Pages in a real browser: Chromium without a window, and what it says of a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nsys_analyzer.experiments.evidence import make_evidence
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.report.writing import write_report
from nsys_analyzer.trace.phase_names import PhaseNames
from tests.support.packed import EXAMPLES as EXAMPLES
from tests.support.packed import unpack

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Without a window, and without calls of its own to its maker's servers.
_OPTIONS = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def find_browser() -> str | None:
    """The path of a Chromium on this machine; None without one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser(*options: str) -> Iterator[Any]:
    """Chromium, driven by Playwright; ``options`` are more of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.getuid() == 0 else []  # root has none
        opened = playwright.chromium.launch(executable_path=find_browser(), args=[*_OPTIONS, *sandbox, *options])
        yield opened
        opened.close()


class View:
    """A page in a tab, and what it has said and asked for.

    Attributes:
        page: Playwright's page.
        heard: messages of its console, errors, and requests to anywhere but itself.
    """

    def __init__(self, opened: Any, path: Path, width: int = 1280, scheme: str = "light", height: int = 900) -> None:
        self.heard: list[str] = []
        self.page = opened.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page.on("console", lambda message: self.heard.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.heard.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self.heard.append(f"dialog: {dialog.message}"))
        self.page.on("request", self._requested)
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached", timeout=30_000)

    def _requested(self, request: Any) -> None:
        if not request.url.startswith(("file:", "blob:")) or request.is_navigation_request() is False:
            self.heard.append(f"request: {request.url}")

    def frames(self) -> None:
        """Waits until what was asked for is drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def unfold(self) -> None:
        """Opens all that is folded, but for the full names of kernels."""
        self.page.locator("details:not(.name)").evaluate_all("(all) => all.forEach((one) => (one.open = true))")

    def content_width(self) -> int:
        """Returns the width of the page's content, in pixels: above that of the window if it has to be scrolled."""
        return int(self.page.evaluate("document.documentElement.scrollWidth"))

    def press(self, *keys: str) -> None:
        """Presses some keys, one after the other, and waits until the timeline is drawn."""
        for key in keys:
            self.page.keyboard.press(key)
        self.frames()

    def find(self, text: str) -> str:
        """Searches the timeline for a text, and returns how many matches the page tells."""
        self.page.locator("#find").fill(text)
        return self.matches()

    def matches(self) -> str:
        """Returns what the page tells of the matches of a search."""
        return str(self.page.locator("#matches").inner_text())

    def canvas_box(self) -> dict[str, float]:
        """Scrolls to the timeline, and returns its place in the window: x, y, width and height."""
        canvas = self.page.locator("#canvas")
        canvas.scroll_into_view_if_needed()
        box: dict[str, float] = canvas.bounding_box()
        return box

    def drag(self, start: float, end: float) -> None:
        """Drags the mouse over the timeline, between two distances from its left side in pixels."""
        box, mouse = self.canvas_box(), self.page.mouse
        mouse.move(box["x"] + start, box["y"] + 60)
        mouse.down()
        mouse.move(box["x"] + end, box["y"] + 60, steps=4)
        mouse.up()
        self.frames()

    def visible_range(self) -> str:
        """Returns what the page tells of the time that the timeline shows."""
        self.frames()
        return str(self.page.locator("#visible-range").inner_text())

    def stretch_ns(self) -> float:
        """How much time the timeline shows, ns."""
        number, unit = self.visible_range().split()[:2]
        return float(number.replace(",", "")) * {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit.rstrip(",")]

    def facts(self) -> dict[str, str]:
        """What the timeline says of the selected box."""
        rows = self.page.locator("#selection tr").all()
        return {row.locator("th").inner_text(): row.locator("td").inner_text() for row in rows}


def built(*paths: Path) -> Report:
    """A report with every moment of its captures."""
    return build_report(make_evidence(gather(paths, names=PhaseNames.parse(()), with_tracks=True)))


def write_page(path: Path, *sources: Path) -> Path:
    """The page of some captures, with its figures."""
    write_report("html", built(*sources), path)
    return path


def unpack_ranks(folder: Path, run: str = "late_rank") -> Path:
    """The captures of a committed run of several ranks, in a folder."""
    for path in (EXAMPLES / "ranks" / "captures").glob(f"{run}_rank*"):
        unpack(path, folder)
    return folder


def tabbed(view: View, most: int = 500) -> Sequence[str]:
    """What the Tab key reaches from the top of a page on, each in a few words."""
    view.page.evaluate("document.activeElement.blur()")
    reached: list[str] = []
    for _ in range(most):
        view.page.keyboard.press("Tab")
        now = view.page.evaluate(
            "() => { const one = document.activeElement; if (one === document.body) return '';"
            " one.dataset.tabbed ??= String(document.querySelectorAll('[data-tabbed]').length);"
            " return `${one.dataset.tabbed} ${one.tagName} ${one.id || one.textContent.trim().slice(0, 30)}`; }"
        )
        if not now or now in reached:
            break
        reached.append(now)
    return reached

"""The HTML page of long captures in a real browser: its size, how soon it opens, how fast it moves, and its memory.

A real export is repeated, end to end, until it holds about as many kernels as asked. Each page is opened in Chromium
without a window and without a GPU, so that one core draws. Its frames are not held to a screen's 60 Hz: a frame's time
is the interval between two callbacks of requestAnimationFrame, which has all that the browser does for it, and beside
it stands what `Painter.draw` takes by performance.now(), and the processor time of all the browser's processes.

    python -m tests.benchmarks.bench_page
    python -m tests.benchmarks.bench_page --kernels 100000 --trace my.sqlite --runs 3
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_report import TOOL, TRACE, Row, report_command, run_well, unpacked
from tests.benchmarks.long_capture import enlarge
from tests.support.pages import browser, find_browser

SCALES = (12_000, 100_000, 1_000_000)  # kernels
FRAMES = 120
WINDOW = {"width": 1600, "height": 1000}
TIMEOUT_MS = 120_000
#: Frames come as fast as they are drawn.
FREE_RUNNING = ("--disable-frame-rate-limit", "--disable-gpu-vsync")

#: Notes when the page can be used: it says so, and its first frame is drawn.
WATCH = """
new MutationObserver((changes, watch) => {
  if (!document.documentElement.dataset.ready) return;
  watch.disconnect();
  requestAnimationFrame(() => setTimeout(() => (document.documentElement.dataset.usable = performance.now())));
}).observe(document, { subtree: true, attributeFilter: ["data-ready"] });
"""
#: Keeps what draws, and what each frame takes it.
CATCH = """
async () => {
  const draw = Painter.prototype.draw;
  window.drawn = [];
  Painter.prototype.draw = function (view) {
    window.timeline = view;
    const began = performance.now();
    draw.call(this, view);
    window.drawn.push(performance.now() - began);
  };
  document.getElementById("all").click();
  while (!window.timeline) await new Promise(requestAnimationFrame);
}
"""
#: Moves the timeline in each frame: `share` of the whole is shown; back and forth by a twentieth of it, or in and out.
MOVE = """
async ([share, zooms, frames]) => {
  const { timeline } = window, whole = timeline.last - timeline.first;
  const middle = (timeline.first + timeline.last) / 2, width = 1.02 * share * whole;
  const next = () => new Promise(requestAnimationFrame);
  const intervals = [];
  let before = await next();
  for (let frame = -5; frame < frames; frame++) {
    const swing = Math.sin((frame * Math.PI) / 30);
    const shown = zooms ? width * Math.exp(-2 * (1 - Math.cos((frame * Math.PI) / 30))) : width;
    const around = zooms ? middle : middle + 0.04 * swing * width;
    timeline.look(around - shown / 2, around + shown / 2);
    if (frame === 0) window.drawn.length = 0;
    await next();
    const now = performance.now();
    if (frame >= 0) intervals.push(now - before);
    before = now;
  }
  return { intervals, draws: window.drawn.splice(0) };
}
"""
#: Searches as after each letter that a person types.
SEARCH = """
(text) => {
  const began = performance.now();
  window.timeline.search(text);
  const took = performance.now() - began;
  window.timeline.search("");
  return took / 1e3;
}
"""
#: Unpacks and parses the data, and does nothing with it: the least that opening can take.
FLOOR = """
async () => {
  const lines = document.getElementById("data").textContent.split("\\n");
  const began = performance.now();
  for (const line of lines) await unpacked(line);
  return (performance.now() - began) / 1e3;
}
"""
#: What is shown while it moves, of the whole, and whether it zooms.
MOVES = {
    "pan all of it": (1.0, False),
    "zoom into all of it": (1.0, True),
    "pan a tenth": (0.1, False),
    "pan a thousandth": (0.001, False),
}
FRAMES_ALL = "pan all of it: frames"


def measure(trace: Path, kernels: int, runs: int) -> Iterator[Row]:
    """The rows of one capture: writing, opening, moving, memory."""
    page = trace.with_suffix(".html")
    command = [*TOOL, "report", trace, "--format", "html", "-o", page]
    run_well(command)
    rounds = [(run_well(command), run_well(report_command(trace))) for _ in range(runs)]
    is_small = kernels <= 12_000
    yield Row("size of the page", [page.stat().st_size / 1e6], "MB", at_most=3 if is_small else None)
    yield Row("write the page", [one.seconds for one, _ in rounds], "s")
    yield Row("write it / the report as markdown", [one.seconds / plain.seconds for one, plain in rounds], "x")
    opened = measure_opening(page, runs)
    yield Row("open the page", [seconds for seconds, _, _ in opened], "s", at_most=1 if is_small else None)
    yield Row("open it: unpack and parse its data", [floor for _, floor, _ in opened], "s")
    yield Row("open it: processor time", [cpu_s for _, _, cpu_s in opened], "s")
    yield from measure_moving(page)


def measure_opening(path: Path, runs: int) -> list[tuple[float, float, float]]:
    """Seconds from navigation until the page can be used, those that its data alone needs, and processor time.

    The browser runs already, with an empty tab.
    """
    found = []
    with browser() as opened:
        session = opened.new_browser_cdp_session()
        for _ in range(runs):
            page = opened.new_page(viewport=WINDOW)
            page.add_init_script(WATCH)
            page.goto("about:blank")
            began = cpu_seconds(session)
            page.goto(path.as_uri())
            usable = page.wait_for_selector("html[data-usable]", state="attached", timeout=TIMEOUT_MS)
            cpu_s = cpu_seconds(session) - began
            found.append((float(usable.get_attribute("data-usable")) / 1e3, page.evaluate(FLOOR), cpu_s))
            page.close()
    return found


def measure_moving(path: Path) -> Iterator[Row]:
    """Frames while the timeline pans and zooms, the time of a search, and what the page holds in memory."""
    with browser(*FREE_RUNNING) as opened:
        page = opened.new_page(viewport=WINDOW)
        session = opened.new_browser_cdp_session()
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached", timeout=TIMEOUT_MS)
        peak = memory_gb(session, "VmHWM")
        page.evaluate(CATCH)
        boxes = page.evaluate("timeline.lanes.reduce((sum, lane) => sum + (lane.row?.start.length ?? 0), 0)")
        print(f"{boxes:,} boxes", flush=True)
        for name, (share, zooms) in MOVES.items():
            began = cpu_seconds(session)
            moved = page.evaluate(MOVE, [share, zooms, FRAMES])
            cpu_ms = 1e3 * (cpu_seconds(session) - began) / FRAMES
            yield Row(f"{name}: frames", [1e3 / one for one in moved["intervals"]], "/s", at_least=30)
            yield Row(f"{name}: draw", moved["draws"], "ms")
            yield Row(f"{name}: processor time", [cpu_ms], "ms")
        for text in ("e", "gemm"):
            yield Row(f"search for {text}", [page.evaluate(SEARCH, text) for _ in range(5)], "s")
        tab = page.context.new_cdp_session(page)
        tab.send("HeapProfiler.collectGarbage")
        heap = tab.send("Runtime.getHeapUsage")
        yield Row("memory: of scripts", [(heap["usedSize"] + heap["backingStorageSize"]) / 1e9], "GB")
        yield Row("memory: peak while it opens", [peak], "GB")


def processes(session: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = session.send("SystemInfo.getProcessInfo")["processInfo"]
    return found


def cpu_seconds(session: Any) -> float:
    """Processor time of all the browser's processes."""
    return float(sum(one["cpuTime"] for one in processes(session)))


def memory_gb(session: Any, field: str) -> float:
    """Memory of the process of the page, which is the largest of those that draw pages."""
    renderers = [one["id"] for one in processes(session) if one["type"] == "renderer"]
    lines = [Path(f"/proc/{one}/status").read_text(encoding="ascii").splitlines() for one in renderers]
    return max(int(line.split()[1]) for status in lines for line in status if line.startswith(field)) * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", type=int, nargs="+", default=SCALES, help="about how many [12000 100000 1000000]")
    parser.add_argument("--trace", type=Path, default=TRACE, help="the SQLite export that is repeated, .xz or not")
    parser.add_argument("--runs", type=int, default=3, help="of each command, and pages opened [%(default)s]")
    options = parser.parse_args()
    if find_browser() is None:
        print("no Chromium on this machine (make browser): the page is not measured")
        return
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory(prefix="bench-page-") as folder:
        source = unpacked(options.trace.resolve(), Path(folder))
        shown: dict[int, Row] = {}
        for asked in options.kernels:
            trace = Path(folder) / f"{asked}.sqlite"
            kernels = enlarge(source, trace, asked)
            print(f"\n{source.name} repeated: {kernels:,} kernels{'':<6} {'median':>10} {'min':>10} {'max':>10}")
            for row in measure(trace, kernels, options.runs):
                print(row, flush=True)
                if row.name == FRAMES_ALL:
                    shown[kernels] = row
        least, most = min(shown), max(shown)
        ratio = statistics.median(shown[least].values) / statistics.median(shown[most].values)
        print(f"\nA frame of {most:,} kernels takes {ratio:.2f} times one of {least:,}.")


if __name__ == "__main__":
    main()

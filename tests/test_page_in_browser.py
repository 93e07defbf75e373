"""The page as a person uses it, in a real browser: by mouse and by keyboard, in light and in dark."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nsys_analyzer.report.renderers.html import render_fragment
from tests.conftest import DATA
from tests.support.export import AUTOGRAD, GEMM, Export, global_pid, training_step
from tests.support.hostile import WORST
from tests.support.operators import record_operators
from tests.support.pages import EXAMPLES, View, browser, built, find_browser, tabbed, unpack_ranks, write_page
from tests.test_counters import with_network
from tests.test_lines import LOADING, clocked, waiting, write_stacks
from tests.test_tracks import tracks_of

playwright = pytest.importorskip("playwright", reason="the pages are looked at with Playwright")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine: make browser"),
]

#: Where the pictures that docs/page.md shows go, by page, width and scheme; without it they are taken and not kept.
PICTURES = os.environ.get("PAGE_PICTURES")
KEPT = {("train_small256", 1600, "light"): "timeline.png", ("ranks", 1600, "light"): "ranks.png"}


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    with browser() as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, real_capture: Callable[[str], Path]) -> Callable[[str], Path]:
    """The path of a page by its name, written on first use."""
    folder = tmp_path_factory.mktemp("pages")

    def sources(name: str) -> tuple[Path, ...]:
        if name == "ranks":
            (folder / "late").mkdir()
            return (unpack_ranks(folder / "late"),)
        if name == "hostile":
            return (hostile_capture(folder / "hostile.sqlite"),)
        if name == "operators":
            (folder / "operators").mkdir()
            return (record_operators(folder / "operators"),)
        if name == "cpu":
            return (Path(shutil.copy(DATA / "cpu_train.pt.trace.json.gz", folder)),)
        if name == "memory":
            return (memory_capture(folder / "memory.sqlite"),)
        if name == "network":
            export = Export().gpu().range("step", 0, 400).kernel(GEMM, 1, 10, 390)
            return (with_network(export).write(folder / "network.sqlite"),)
        if name == "hours":
            export = training_step(training_step(Export().gpu()), 10_000_000_000_000)
            return (export.write(folder / "hours.sqlite"),)
        if name == "lines":
            (folder / "lines").mkdir()
            write_stacks(folder / "lines", LOADING)
            return (clocked(waiting(launch=(2, 6)), -20).write(folder / "lines" / "t.sqlite"),)
        if name == "deep":
            return (deep_capture(folder / "deep.sqlite"),)
        if name == "several":
            return tuple(map(real_capture, ("train_small256", "small_ctx1024_train_fp32", "bf16_sdpa_small1024")))
        return (EXAMPLES / "sweep",) if name == "sweep" else (real_capture(name),)

    def path_of(name: str) -> Path:
        path = folder / f"{name}.html"
        return path if path.exists() else write_page(path, *sources(name))

    return path_of


def hostile_capture(path: Path) -> Path:
    export = training_step(Export().thread(AUTOGRAD, "pt_autograd_0 <b>").gpu())
    writable = WORST.encode("utf-8", "ignore").decode()  # SQLite holds no half of a surrogate pair
    worst = f"{writable}<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    return export.range(worst, 810, 940).kernel(f"{worst} {GEMM}", 820, 830, 930).write(path)


def deep_capture(path: Path, depths: int = 3_600) -> Path:
    """Ranges inside each other."""
    export = training_step(Export().gpu())
    for depth in range(1, depths):
        export.range(f"depth {depth}", 10, 990)
    return export.write(path)


def memory_capture(path: Path) -> Path:
    """A step of 1,000 ns in which 3 MiB are in use from 100 ns on, and 1 MiB from 600 ns on."""
    export = training_step(Export().gpu())
    for start, mib, freed in ((100, 1, 0), (100, 2, 0), (600, 2, 1)):
        export.add(
            "CUDA_GPU_MEMORY_USAGE_EVENTS", start=start, globalPid=global_pid(), bytes=mib << 20, memKind=2,
            memoryOperationType=freed,
        )  # fmt: skip
    return export.write(path)


@pytest.fixture
def view(opened: Any, pages: Callable[[str], Path]) -> Iterator[Callable[..., View]]:
    """Opens a page by its name; at the end it must have said nothing and asked for nothing."""
    views: list[View] = []

    def show(name: str = "train_small256", **how: Any) -> View:
        views.append(View(opened, pages(name), **how))
        return views[-1]

    yield show
    for one in views:
        one.page.close()
    assert [line for one in views for line in one.heard] == []


@pytest.mark.parametrize("name", ["train_small256", "sweep", "ranks", "several", "cpu"])
def test_a_narrow_page_is_not_cut_off_and_has_no_columns_of_words(view: Callable[..., View], name: str) -> None:
    """On a phone neither the page nor what is in full view of it is wider than the window.

    Unfolded, no row has more than five lines, and tables move sideways by themselves.
    """
    shown = view(name, width=400, height=800)
    assert shown.content_width() == 400
    wide = shown.page.evaluate(
        "() => [...document.querySelectorAll('main > section:first-child :is(.table, pre, p, .answer, figure)')]"
        ".filter((one) => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1).map((one) => one.outerHTML)"
    )
    assert name == "several" or wide == []  # the table of several captures moves sideways
    shown.unfold()
    rows = shown.page.evaluate(
        "[...document.querySelectorAll('main tbody tr')].map((row) =>"
        " [row.textContent, row.clientHeight / parseFloat(getComputedStyle(row).lineHeight)])"
    )
    assert [text for text, lines in rows if lines > 5.6] == []  # with the space between rows
    assert shown.content_width() == 400


@pytest.mark.parametrize(("width", "scheme"), [(900, "dark"), (1600, "light")])
@pytest.mark.parametrize("name", ["train_small256", "sweep", "ranks"])
def test_a_page_opens_whole(view: Callable[..., View], tmp_path: Path, name: str, width: int, scheme: str) -> None:
    """It fits the window, and says and asks nothing. The pictures of docs/page.md are made here."""
    shown = view(name, width=width, scheme=scheme)
    assert shown.content_width() <= width
    section = shown.page.locator("#timeline")
    section.scroll_into_view_if_needed()
    if name == "train_small256":
        shown.page.locator("#step").click()
    shown.frames()
    kept = KEPT.get((name, width, scheme))
    picture = section.screenshot(path=Path(PICTURES) / kept if PICTURES and kept else tmp_path / "page.png")
    assert len(picture) > 20_000
    assert shown.page.locator("#canvas").bounding_box()["height"] > 100


def test_accessibility(view: Callable[..., View]) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for name, scheme, width in (
        ("train_small256", "light", 1280),
        ("train_small256", "dark", 400),
        ("ranks", "light", 1280),
        ("sweep", "dark", 1280),
    ):
        shown = view(name, scheme=scheme, width=width)
        # axe runs in the page, which lets no script in but its own.
        found = Axe().run(shown.page, options={"resultTypes": ["violations"]})
        problems = [
            (one["id"], node["target"], node["failureSummary"])
            for one in found.response["violations"]
            for node in one["nodes"]
        ]
        assert problems == []


def test_tables_sort(view: Callable[..., View]) -> None:
    shown = view()
    shown.unfold()
    table = shown.page.locator(".table table").filter(has_text="exposed copies").first  # what fills a step: 12 rows
    head = table.locator("th", has_text="ms").first
    column = head.evaluate("(head) => head.cellIndex")

    def values() -> list[float]:
        cells = [row.locator("td").nth(column) for row in table.locator("tbody tr").all()]
        known = (cell.get_attribute("data-value") for cell in cells)  # one row has none
        return [float(value) for value in known if value]

    before = values()
    states = []
    for expected in (sorted(before, reverse=True), sorted(before), before):
        head.locator("button").click()
        assert values() == expected
        states.append(head.get_attribute("aria-sort"))
    assert states == ["descending", "ascending", "none"]
    text = table.locator("th").first
    text.locator("button").click()
    names = [row.locator("td").first.inner_text() for row in table.locator("tbody tr").all()]
    assert names == sorted(names, key=str.lower)


def test_a_capture_is_picked_among_those_of_a_sweep(view: Callable[..., View]) -> None:
    page = view("sweep").page
    name = "small_ctx512_train_bf16"
    page.locator("#picker").select_option(name)
    told = page.locator(f'[data-capture="{name}"]')
    assert told.count() > 5
    assert page.locator('[data-capture="small_ctx256_train_fp32"]:visible').count() == 0
    assert not page.locator("#overview").is_visible()
    assert page.locator(f'#captures > details[data-capture="{name}"]').get_attribute("open") is not None
    assert any(one.is_visible() for one in told.all())
    page.wait_for_function(
        "(name) => document.querySelector('#view').selectedOptions[0].textContent === name", arg=name
    )
    page.locator("#picker").select_option("")
    assert page.locator("#overview").is_visible()
    assert page.locator("[data-capture][hidden]").count() == 0


def test_the_first_screen_holds_the_decision(view: Callable[..., View]) -> None:
    box = view(height=800).page.locator("#decision").bounding_box()
    assert box["y"] + box["height"] <= 800


def test_a_name_that_a_bar_has_no_room_for_is_not_seen(view: Callable[..., View]) -> None:
    names = view(width=400).page.evaluate(
        "() => [...document.querySelectorAll('#decision .bar b')].map((one) => {"
        " const [box, part] = [one, one.parentElement].map((it) => it.getBoundingClientRect());"
        " return [one.textContent, box.top < part.bottom, box.left >= part.left - 1 && box.right <= part.right + 1]; })"
    )
    seen = [name for name, shown, _ in names if shown]
    assert {"matmul", "idle"} <= set(seen)
    assert "copy/layout" not in seen
    assert all(fits for _, shown, fits in names if shown)


def test_full_names_unfold(view: Callable[..., View]) -> None:
    shown = view()
    shown.unfold()
    name = shown.page.locator("details.name").first
    full = name.locator("xpath=./code")
    assert not full.is_visible()
    name.locator("summary").click()
    assert full.is_visible()
    assert len(full.inner_text()) > len(name.locator("summary").inner_text())


def test_commands_are_copied(opened: Any, pages: Callable[[str], Path]) -> None:
    shown = View(opened, pages("train_small256"))
    shown.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    listing = shown.page.locator(".listing").first
    listing.locator("button").click()
    shown.page.wait_for_function("() => document.querySelector('.listing .copy').textContent === 'Copied'")
    assert shown.page.evaluate("navigator.clipboard.readText()") == listing.locator("code").inner_text()
    shown.page.close()


def test_search_finds_and_steps_through(view: Callable[..., View]) -> None:
    shown = view()
    whole = shown.stretch_ns()
    # In three steps the range of each of 12 layers, and the loss's softmax, forward and backward: 3 · (12 + 2).
    assert shown.find("softmax") == "42 found"
    shown.press("Enter")
    assert shown.matches() == "15 of 42"  # of the step that is seen, the second
    first = shown.facts()
    assert first["name"] == "computing softmax"
    assert first["track"] == "CPU: main thread"
    assert shown.stretch_ns() < whole / 20
    shown.page.locator("#next").click()
    assert shown.facts()["start"] > first["start"]
    shown.page.locator("#previous").click()
    assert shown.facts() == first
    shown.find("XMMA gemm f32 tn_n 64x64x8")  # as tables call sm80_xmma_gemm_f32f32_f32f32_…
    shown.press("Enter")
    assert "_xmma_gemm_f32f32" in shown.facts()["name"]
    assert shown.find("no such kernel") == "no match"


def test_matches_of_several_lanes_come_in_order_of_start(view: Callable[..., View]) -> None:
    shown = view()
    shown.find("backward")  # the ranges, and the kernels of softmax's backward
    starts, tracks = [], set()
    for _ in range(8):
        shown.page.locator("#next").click()
        facts = shown.facts()
        starts.append(float(facts["start"].split()[0]))
        tracks.add(facts["track"])
    assert starts == sorted(starts)
    assert len(tracks) > 1


def test_a_finding_leads_to_its_place(view: Callable[..., View]) -> None:
    shown = view()
    button = shown.page.locator('button[data-kind="idle"][data-name="launch"]').first
    whole = shown.stretch_ns()
    button.click()
    shown.page.wait_for_selector("#selection tr")
    assert shown.facts()["GPU idle"] == "launching, short pauses"
    assert shown.stretch_ns() < whole / 2
    assert shown.page.evaluate("document.activeElement.id") == "canvas"
    assert 0 <= shown.page.locator("#canvas").bounding_box()["y"] < 900


def test_a_gap_shows_the_stack_at_that_moment(view: Callable[..., View]) -> None:
    shown = view("lines")
    shown.page.locator("#canvas").press("]")
    assert shown.facts()["on the critical path"] == "yes"  # the program waits for it
    assert "on the critical path" in shown.page.locator("#legend").inner_text()
    shown.page.locator("#canvas").press("]")
    while "line of the program" not in (gap := shown.facts()):  # the gap is cut where its cause changes
        shown.page.locator("#canvas").press(".")
    assert gap["GPU idle"] == "other CPU work"
    assert (gap["line of the program"], gap["called from"]) == ("data.py:5 in load", "train.py:9 in <module>")


def test_a_kernel_shows_its_operator(view: Callable[..., View]) -> None:
    shown = view("operators")
    shown.page.locator("#canvas").press("]")
    while "operator" not in (facts := shown.facts()):  # the idle time between kernels
        shown.page.locator("#canvas").press(".")
    assert facts["operator"] == "aten::add 4096×4096 · 4096×4096 bf16"
    assert facts["line"] == "train.py:20 in step"
    # Three matrices of 4096² numbers of 2 bytes take at least 21 µs at the peak of an H200, 4.8 TB/s.
    assert 21 < float(facts["attainable time of the operator"].removesuffix(" µs")) < 100


def test_a_color_of_the_legend_is_seen_alone(view: Callable[..., View]) -> None:
    shown = view()
    canvas, entry = shown.page.locator("#canvas"), shown.page.locator("#legend button").first
    assert entry.inner_text() == "matmul"
    drawn = "document.getElementById('canvas').toDataURL()"
    shown.frames()
    before = shown.page.evaluate(drawn)
    states, same = [], []
    for press in (entry.click, entry.click, entry.click, lambda: canvas.press("Escape")):
        press()
        shown.frames()
        states.append(entry.get_attribute("aria-pressed"))
        same.append(shown.page.evaluate(drawn) == before)
    assert states == ["true", "false", "true", "false"]
    assert same == [False, True, False, True]


def test_the_wheel_zooms_where_the_pointer_is(view: Callable[..., View]) -> None:
    shown = view()

    def point_at_the_middle() -> None:
        box = shown.canvas_box()
        shown.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)

    point_at_the_middle()
    whole, scrolled = shown.stretch_ns(), shown.page.evaluate("scrollY")
    shown.page.mouse.wheel(0, 200)
    shown.page.wait_for_function("(before) => scrollY !== before", arg=scrolled)  # the page scrolls
    assert shown.stretch_ns() == whole
    shown.page.locator("#canvas").focus()
    point_at_the_middle()
    shown.page.mouse.wheel(0, -200)
    shown.page.wait_for_timeout(50)
    assert shown.stretch_ns() == pytest.approx(whole * 0.513, rel=0.02)  # e^(−200 ÷ 300)


#: The columns of a row of the canvas, right of the titles, that are not as its last pixel; -2: the last row but one.
COLUMNS = """
(y) => {
  const canvas = document.getElementById("canvas"), left = canvas.clientWidth < 700 ? 110 : 186;
  const copy = new OffscreenCanvas(canvas.width - left, 1).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, -left, y < 0 ? -canvas.height - y : -y);
  const row = copy.getImageData(0, 0, canvas.width - left, 1).data;
  const color = (i) => row.slice(4 * i, 4 * i + 3).join();
  const columns = [...Array(row.length / 4).keys()];
  return columns.filter((i) => color(i) !== color(columns.length - 1));
}
"""


def test_the_axis_shows_which_part_of_the_whole_is_seen(view: Callable[..., View]) -> None:
    shown = view()
    shown.page.locator("#all").click()
    shown.frames()
    ticks = shown.page.evaluate(COLUMNS, 20)
    assert 1 < len(ticks) < 20
    shown.page.locator("#canvas").focus()
    shown.press("w", "w")
    width = shown.page.locator("#canvas").bounding_box()["width"] - 186
    seen = shown.page.evaluate(COLUMNS, 20)
    middle = [one for one in seen if width / 4 - 2 <= one <= 3 * width / 4 + 2]
    # All is 1.02 times the whole; twice 0.7 of that is half of it, around the middle.
    assert (middle[0], middle[-1]) == pytest.approx((0.25 * width, 0.75 * width), abs=3)
    assert len(middle) == middle[-1] - middle[0] + 1


def test_lines_lead_down_from_the_ticks_of_the_axis(view: Callable[..., View]) -> None:
    shown = view()
    shown.frames()
    ticks = shown.page.evaluate(COLUMNS, 17)
    assert len(ticks) >= 5
    assert shown.page.evaluate(COLUMNS, -2) == ticks


def test_drag_moves_and_shift_sums_up(view: Callable[..., View]) -> None:
    shown = view()
    shown.page.locator("#in").click()
    before = shown.visible_range()
    shown.drag(800, 500)
    assert shown.visible_range() != before
    sums = marked_sums(shown)
    assert sums["matmul"] == pytest.approx(62.8, rel=0.02)  # three steps: 3 × 20.94 ms of matmuls
    assert any(name.startswith("idle: launching") for name in sums)


def pixel(shown: View, x: int = 0, y: int = 0) -> list[int]:
    """Red, green and blue of a pixel of the timeline."""
    color: list[int] = shown.page.evaluate(
        "([x, y]) => { const copy = document.createElement('canvas').getContext('2d');"
        " copy.drawImage(document.getElementById('canvas'), -x, -y);"
        " return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3); }",
        [x, y],
    )
    return color


def marked_sums(shown: View) -> dict[str, float]:
    """What is marked by Shift and drag over all of the view: class or cause, and ms."""
    page = shown.page
    page.locator("#all").click()
    page.keyboard.down("Shift")
    shown.drag(187, shown.canvas_box()["width"] - 1)
    page.keyboard.up("Shift")
    table = page.locator("#selection tbody tr")
    rows = [[cell.inner_text() for cell in row.locator("td").all()] for row in table.all()]
    units = {"ns": 1e-6, "µs": 1e-3, "ms": 1}
    return {name: float(time.split()[0].replace(",", "")) * units[time.split()[1]] for name, time, *_ in rows}


@pytest.mark.parametrize("name", ["jax_mlp", "graphcapture_fp32"])
def test_kernels_that_overlap_are_summed_whole(view: Callable[..., View], real_capture: Any, name: str) -> None:
    """A replayed CUDA graph begins a kernel of a stream before the one before it has ended."""
    ((_, tracks),) = tracks_of(real_capture(name))
    expected: dict[str, float] = {}
    for track in tracks.tracks:
        if track.kind == "stream":
            assert track.depth.any()
            ms = np.bincount(track.group, track.duration, len(tracks.groups)) / 1e6
            expected |= {tracks.groups[code]: ms[code] for code in np.flatnonzero(ms)}
    shown = view(name)
    sums = {group: ms for group, ms in marked_sums(shown).items() if not group.startswith("idle: ")}
    assert sums == pytest.approx(expected, rel=1e-3)  # four digits are shown
    total = shown.page.locator(".flame button").first.get_attribute("aria-label").split()
    assert float(total[3]) == pytest.approx(sum(expected.values()), rel=1e-3)  # "all GPU work: 2.61 ms, …"


def test_the_time_before_a_moment(view: Callable[..., View]) -> None:
    """Whatever overlaps: the sum of what lies before it of each box."""
    seed = np.random.default_rng(1)
    start, duration = np.sort(seed.integers(0, 1000, 200)), seed.integers(0, 90, 200)
    moments = np.arange(-5, 1100, 7)
    found = view().page.evaluate(
        "([start, duration, moments]) => { const row = new Row({ start, duration }, start.map((_, i) => i));"
        " return moments.map((moment) => row.coveredBefore(moment)); }",
        [start.tolist(), duration.tolist(), moments.tolist()],
    )
    assert found == [int(np.clip(moment - start, 0, duration).sum()) for moment in moments]


def test_memory_is_told_by_mouse_and_by_keyboard(view: Callable[..., View]) -> None:
    shown = view("memory")
    page = shown.page
    page.evaluate("document.getElementById('timeline').scrollIntoView()")
    box = page.locator("#canvas").bounding_box()
    wide = box["width"] - 186
    # All is shown with 1 % to either side: 500 of 1,000 ns are in the middle, and 700 ns at 710 ÷ 1,020.
    for share, expected in ((0.5, "3.0 MiB"), (710 / 1020, "1.0 MiB"), (40 / 1020, "0 B")):
        page.mouse.move(box["x"] + 186 + share * wide, box["y"] + box["height"] - 20)
        assert page.locator("#tip b").inner_text() == expected
    marked_sums(shown)
    said = "Device memory: 0 B at the start, 3.0 MiB at the peak, 1.0 MiB at the end."
    assert page.locator("#selection p").last.inner_text() == said


def test_traffic_is_told_by_mouse_and_by_keyboard(view: Callable[..., View]) -> None:
    """A card sends 250 bytes/ms in the first half of a step, and 500 bytes/ms in the second half: 244 and 488 KiB/s."""
    shown = view("network")
    page = shown.page
    page.evaluate("document.getElementById('timeline').scrollIntoView()")
    box = page.locator("#canvas").bounding_box()
    wide = box["width"] - 186
    for share, expected in ((0.25, "244.1 KiB/s"), (0.75, "488.3 KiB/s")):
        page.mouse.move(box["x"] + 186 + share * wide, box["y"] + box["height"] - 20)
        assert page.locator("#tip b").inner_text() == expected
    marked_sums(shown)
    said = page.locator("#selection p").last.inner_text()
    assert said.startswith("mlx5_0 IB sent: 244.1 KiB/s at the start, 488.3 KiB/s at the peak")


def test_the_axis_tells_moments_apart(view: Callable[..., View]) -> None:
    """A long way into a capture, as near as can be: labels that are told whole, each another one."""
    shown = view("hours")
    shown.page.evaluate(
        "() => { window.written = []; const { fillText } = CanvasRenderingContext2D.prototype;"
        " CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {"
        " if (y < 10) written.push(text);"
        " fillText.call(this, text, x, y); }; }"
    )
    shown.page.locator("#canvas").press("0")
    shown.frames()
    # Of 10,000 s, every 1,000,000 ms or more.
    assert shown.page.evaluate("written")[:2] in (["0", "1,000,000"], ["0", "2,000,000"])
    shown.press("End", *"w" * 110)
    assert shown.stretch_ns() == 20
    shown.page.evaluate("written.length = 0")
    shown.press("w")
    *labels, title = shown.page.evaluate("written")
    assert title == "ms since the first step"
    assert len(labels) > 2
    assert not any("…" in text for text in labels)
    assert len(set(labels)) == len(labels)


def test_keys_do_what_the_mouse_does(view: Callable[..., View]) -> None:
    shown = view()
    page = shown.page
    page.locator("#canvas").focus()
    whole = shown.stretch_ns()
    shown.press("w")
    assert shown.stretch_ns() == pytest.approx(0.7 * whole, rel=0.01)
    shown.press("ArrowDown")
    assert shown.stretch_ns() == pytest.approx(whole, rel=0.01)
    shown.press("ArrowUp")
    before = shown.visible_range()
    shown.press("d")
    assert shown.visible_range() != before
    shown.press("ArrowLeft")
    assert shown.visible_range() == before
    shown.press("]")
    kernel = shown.facts()
    assert kernel["track"] == "GPU stream 7"
    assert {"name", "class", "phase", "ranges", "duration", "start", "launch latency"} <= set(kernel)
    shown.press(".")
    assert float(shown.facts()["start"].split()[0]) > float(kernel["start"].split()[0])
    shown.press(",")
    assert shown.facts() == kernel
    shown.press("f")
    number, unit = kernel["duration"].split()
    ns = float(number) * {"ns": 1, "µs": 1e3, "ms": 1e6}[unit]
    assert shown.stretch_ns() == pytest.approx(1.2 * ns, rel=0.01)
    shown.press("Escape")
    assert shown.facts() == {}
    shown.press("0", "Space", "d", "Space")
    assert "The marked range lasts" in page.locator("#selection").inner_text()
    shown.press("0")
    everything = shown.stretch_ns()
    shown.press("Home")
    assert shown.stretch_ns() < everything / 2
    shown.press("/")
    assert page.evaluate("document.activeElement.id") == "find"


@pytest.mark.parametrize("name", ["train_small256", "ranks"])
def test_the_keyboard_alone_reaches_everything(view: Callable[..., View], name: str) -> None:
    shown = view(name)
    reached = tabbed(shown)
    count = shown.page.evaluate(
        "() => [...document.querySelectorAll('a[href], button, select, input, summary, [tabindex]')]"
        ".filter((one) => one.tabIndex >= 0 && one.checkVisibility()).length"
    )
    assert len(reached) == count
    assert count > 40


def test_several_captures_fit_the_page(view: Callable[..., View]) -> None:
    """Every column of their table, on a screen that is as wide as a laptop's."""
    table = view("several", width=1280).page.locator("#overview .table").first
    assert table.evaluate("one => one.scrollWidth - one.clientWidth") == 0


def test_a_notebook_in_the_dark(opened: Any, real_capture: Callable[[str], Path]) -> None:
    """A notebook may stay white where all else is dark: what is shown in it brings its own ground and ink."""
    page = opened.new_page(color_scheme="dark")
    page.set_content(f"<body>{render_fragment(built(real_capture('train_small256')))}</body>")
    colors = "one => [getComputedStyle(one).color, getComputedStyle(one).backgroundColor]"
    assert page.locator(".nsys-analyze").evaluate(colors) == ["rgb(230, 231, 238)", "rgb(22, 23, 31)"]
    page.close()


def test_the_flame_view_opens_what_is_pressed(view: Callable[..., View]) -> None:
    shown = view()
    page = shown.page
    page.locator("#flame summary").click()
    bars = page.locator(".flame button")
    top = bars.first
    assert top.inner_text() == "all GPU work"
    top.focus()
    shown.press("ArrowDown", "ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "backward"
    page.keyboard.press("Enter")
    first = page.locator(".flame button").first
    assert first.inner_text() == "backward"
    # The matmuls of backward are 73.2 % of its kernels; backward is that of three steps: 3 × 19.06 ms of kernels.
    assert "57." in first.get_attribute("aria-label")
    first.click()
    assert page.locator(".flame button").first.inner_text() == "all GPU work"


def test_a_bar_of_the_flame_is_as_wide_as_its_time(view: Callable[..., View]) -> None:
    page = view().page
    page.locator("#flame summary").click()
    widths = page.evaluate(
        "() => { const bars = [...document.querySelectorAll('.flame button')];"
        " return bars.map((one) => [one.offsetWidth, one.node.ns / bars[0].node.ns * bars[0].offsetWidth]); }"
    )
    assert min(expected for _, expected in widths) < 8
    assert all(abs(wide - expected) <= 1 for wide, expected in widths)


def test_a_program_without_a_gpu(view: Callable[..., View]) -> None:
    shown = view("cpu")
    shown.page.locator("#flame summary").click()
    assert shown.page.locator(".flame button").first.inner_text() == "all CPU work"
    assert "GPU" not in shown.page.locator("#flame").inner_text()
    shown.page.locator("#canvas").press("]")
    assert shown.facts()["track"] == "CPU: operators"
    assert "launch latency" not in shown.facts()


def test_more_lanes_than_a_canvas_can_be_high(view: Callable[..., View]) -> None:
    """Lanes of 60,000 pixels: no browser has a canvas so high; what is seen of them is drawn."""
    shown = view("deep")
    page = shown.page
    assert page.evaluate("document.getElementById('lanes').clientHeight") > 60_000
    assert page.locator("#canvas").bounding_box()["height"] < 900
    page.evaluate("() => { const it = document.getElementById('scroll'); it.scrollTop = 50_000; it.scrollIntoView(); }")
    shown.frames()
    box = page.locator("#canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 300)
    depth = round((50_000 + 300 - 28) / 20)  # a lane is 20 pixels high, the first one 28 below the top
    assert abs(int(shown.facts()["name"].split()[1]) - depth) <= 1
    assert len({color for y in range(100, 400, 3) for color in pixel(shown, 400, y)}) > 3


def test_ranks_stand_above_each_other(view: Callable[..., View]) -> None:
    shown = view("ranks")
    assert shown.page.locator("#view option").all_inner_texts()[0] == "late_rank (2 captures): 2 ranks"
    shown.page.locator('button[data-name="communication"]').first.click()
    shown.page.wait_for_selector("#selection tr")
    assert shown.facts()["track"].startswith("rank 0, GPU stream")  # the collective that waits longest
    assert "nccl" in shown.facts()["name"].lower()


def test_ranks_are_summed_up_apart(view: Callable[..., View], tmp_path: Path) -> None:
    """The late rank waits for nobody: of each rank the time of its own collectives."""
    shown = view("ranks")
    marked_sums(shown)
    head, *rows = shown.page.locator("#selection tr").all()
    assert head.locator("th").all_inner_texts() == ["class, or idle time by cause", "rank 0", "rank 1"]
    found = {cells[0]: cells[1:] for cells in (row.locator("td").all_inner_texts() for row in rows)}
    expected = []
    for path in sorted(unpack_ranks(tmp_path).glob("*.sqlite")):
        ((_, tracks),) = tracks_of(path)
        ms = sum(
            track.duration[track.group == tracks.groups.index("communication")].sum() / 1e6
            for track in tracks.tracks
            if track.kind == "stream"
        )
        expected.append(ms)
    assert [time.split()[1] for time in found["communication"]] == ["ms", "ms"]
    assert [float(time.split()[0]) for time in found["communication"]] == pytest.approx(expected, rel=1e-3)
    assert expected[0] > 10 * expected[1]


def test_hostile_names_stay_text(view: Callable[..., View]) -> None:
    shown = view("hostile")
    page = shown.page
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert shown.find("onerror") == "2 found"  # the range and the kernel
    shown.press("Enter")
    assert "<img src=x onerror=alert(1)>" in shown.facts()["name"]
    box = page.locator("#canvas").bounding_box()
    for y in range(30, int(box["height"]), 12):
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + y)
    assert page.locator("img").count() == 0


def test_paper_has_what_was_folded_and_no_controls(view: Callable[..., View]) -> None:
    page = view().page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator("details:not(.name):not([open])").count() == 0
    assert not any(one.is_visible() for one in page.locator(".controls, nav, .copy, .timeline-link").all())
    assert page.locator("section h2").first.is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not(.name)[open]").count() == 0


def test_paper_is_white(view: Callable[..., View]) -> None:
    shown = view("ranks", scheme="dark")
    page = shown.page
    assert max(pixel(shown)) < 64
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme="dark")
    assert pixel(shown) == [255, 255, 255]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    box, shape = page.locator("#canvas").bounding_box(), page.evaluate("canvas.width / canvas.height")
    assert box["width"] / box["height"] == pytest.approx(shape, rel=0.01)  # whole, and of the same shape
    page.emulate_media(media="screen", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    shown.frames()
    assert max(pixel(shown)) < 64

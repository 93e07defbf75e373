"""The section on the steps, from figures that are made up."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from nsys_analyzer.report.sections.anatomy import CAUSES

from nsys_analyzer import Trace
from nsys_analyzer.analysis.findings.diagnosis import why_missing
from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
from nsys_analyzer.analysis.steps.step import (
    ClassTime,
    DeviceSteps,
    IdleTime,
    LaunchLatency,
    PhaseParts,
    Queue,
    StepSummary,
    narrowed,
)
from nsys_analyzer.analysis.steps.windows import StepGroup
from nsys_analyzer.analysis.summary.complete import complete
from nsys_analyzer.analysis.summary.statistics import MemoryRow, Stats
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Unprofiled
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Answer, Block, Details, Interval, Listing, Paragraph, Table, unfolded
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.report.renderers.terminal import print_answers
from nsys_analyzer.report.sections import build_report, steps
from nsys_analyzer.report.units import about_milliseconds, format_cell, milliseconds_between
from nsys_analyzer.text import plain
from tests.test_report_command import section, two_steps

RealCapture = Callable[[str], Path]


def device_of(number: int, compute: float, communication: float, idle: float) -> DeviceSteps:
    """Steps that are all forward: two thirds of the compute are matmuls, two thirds of the idle time a loaded batch."""
    parts = compute, 0.0, communication, idle
    return DeviceSteps(
        *parts,
        device=number,
        classes=(ClassTime("matmul", compute * 2 / 3), ClassTime("elementwise", compute / 3)),
        phases=(PhaseParts(*parts, phase="forward"),),
        idle_by_cause=(
            IdleTime("data", "next batch", None, idle * 2 / 3, 1),
            IdleTime("sync", None, "cudaStreamSynchronize", idle / 3, 2),
        ),
    )


def step_of(*devices: DeviceSteps, on_gpu: bool = False) -> StepSummary:
    """Two steps of 90 ms."""
    main = max(devices, key=lambda one: one.compute_ms)
    return StepSummary(
        **vars(narrowed(main, DeviceSteps)), instances=2, source="range", unit="a range step", on_gpu_timeline=on_gpu,
        length_ms=90.0, wall_ms=Stats(2, 90.0, 0.0, 90.0, 90.0, 90.0), wall_values_ms=(90.0, 90.0),
        busy_values_ms=(30.0, 30.0), groups=(StepGroup("usual", 2, 90.0, True),), devices=devices,
        launch_latency_us=LaunchLatency(8.0, 90.0), queue=Queue(1.0, 30),
    )  # fmt: skip


STEP = step_of(device_of(0, 30.0, 0.0, 60.0))


def finding_of(title: str, low: float, high: float, left: float) -> Finding:
    return Finding(
        title.lower().replace(" ", "_"), title, low, high, 88.0, left, (f"Seen: {title}.",), "By replay.",
        (f"fix({title!r})",), "Leave it out.",
    )  # fmt: skip


FINDINGS = (
    finding_of("The GPU waits for the input pipeline", 40.6, 44.8, 46.0),
    finding_of("Attention is not fused", 6.0, 9.0, 38.0),
    finding_of("The optimizer is not fused", 3.1, 7.2, 34.0),
    finding_of("Copies follow copies", 2.9, 3.1, 31.0),
)
DIAGNOSIS = Diagnosis(88.0, 88.0, 90.0, 30.0, 0.0, True, None, FINDINGS)


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> CaptureSummary:
    """A capture with a made up step of 88 ms, 58 of which its GPU idles."""
    trace = Trace.load(two_steps().write(tmp_path_factory.mktemp("t") / "t.sqlite"))
    (summary,) = summarize(trace, "train")
    return replace(summary, step=STEP, diagnosis=DIAGNOSIS)


def evidence_of(*captures: CaptureSummary) -> Evidence:
    return Evidence(tuple(replace(one, findings_missing=why_missing(one)) for one in captures))


def blocks_of(*captures: CaptureSummary) -> tuple[Block, ...]:
    return steps.answer(evidence_of(*captures)).blocks


def answer_of(capture: CaptureSummary) -> Answer:
    (answer,) = (block for block in blocks_of(capture) if isinstance(block, Answer))
    return answer


def table_of(capture: CaptureSummary, caption: str) -> list[list[str]]:
    """The rows of a table as they are read."""
    tables = (block for block in blocks_of(capture) if isinstance(block, Table))
    (found,) = (one for one in tables if plain(one.caption).startswith(caption))
    return [
        [plain(format_cell(cell, column.unit)) for cell, column in zip(row, found.columns, strict=True)]
        for row in found.rows
    ]


def clear(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_the_answer_says_how_long_why_and_what_first(capture: CaptureSummary) -> None:
    estimated = replace(capture, diagnosis=replace(DIAGNOSIS, step_ms_low=80.0, step_ms_high=88.4, timed=False))
    # 80 − 30 and 88.4 − 30 ms are idle; a third of 60 ms is 20
    assert clear(plain(answer_of(estimated).text)) == (
        "A step takes an estimated 80–88 ms without the profiler, and 90.00 ms under it. The GPU computes for 30.00 "
        "ms, and idles for 50–58 ms. Under the profiler it idles for 60.00 ms: 40.00 ms because the program loads a "
        'batch and 20.00 ms because the program waits for the GPU. What to fix first: "The GPU waits for the input '
        'pipeline", which saves 41–45 ms of 80–88 ms (49 % of the step).'
    )


def test_three_findings_in_a_line_each(capture: CaptureSummary) -> None:
    """(40.6 + 44.8) ÷ 2 of 88 ms is 48.5 %, 7.5 is 8.5 %, 5.15 is 5.9 %."""
    assert [clear(plain(line)) for line in answer_of(capture).more] == [
        "1. The GPU waits for the input pipeline: saves 41–45 ms of 88.0 ms (49 % of the step)",
        "2. Attention is not fused: saves 6.0–9.0 ms of 88.0 ms (9 % of the step)",
        "3. The optimizer is not fused: saves 3.1–7.2 ms of 88.0 ms (6 % of the step)",
    ]


def test_they_come_first_in_the_summary_and_on_the_terminal(
    capture: CaptureSummary, capsys: pytest.CaptureFixture[str]
) -> None:
    report = build_report(evidence_of(capture))
    name, heading, findings, phases, answers, *_ = report.sections[0].blocks
    assert isinstance(findings, Listing)
    assert isinstance(phases, Table)
    assert isinstance(answers, Listing)
    assert [plain(getattr(block, "text", "")) for block in (name, heading)] == ["train", "What to do first:"]
    assert plain(findings.lines[0]).startswith("1. The GPU waits for the input pipeline: saves")
    assert plain(answers.lines[0]).startswith("step: ")
    print_answers(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train"
    assert next(line for line in lines[1:] if line.startswith("  ")).split()[0] == "step"  # below the bar
    assert report.sections[1].key == "steps"


def test_the_parts_add_up(capture: CaptureSummary) -> None:
    assert table_of(capture, "What fills a step") == [
        ["compute: matmul", "20.00", "22.2\N{NO-BREAK SPACE}%"],
        ["compute: elementwise", "10.00", "11.1\N{NO-BREAK SPACE}%"],
        ["idle", "60.00", "66.7\N{NO-BREAK SPACE}%"],
        ["the step", "90.00", "100.0\N{NO-BREAK SPACE}%"],
    ]
    assert table_of(capture, "The same by phase") == [["forward", "30.00", "60.00", "90.00"]]
    assert table_of(capture, "Why the GPU idles") == [
        ["the program loads a batch", "next batch", "–", "40.00", "44.4\N{NO-BREAK SPACE}%", "1"],
        [
            "the program waits for the GPU", "–", "cudaStreamSynchronize", "20.00", "22.2\N{NO-BREAK SPACE}%", "2",
        ],
    ]  # fmt: skip


def test_a_row_for_each_device(capture: CaptureSummary) -> None:
    both = replace(capture, step=step_of(device_of(0, 30.0, 0.0, 60.0), device_of(1, 60.0, 12.0, 18.0)))
    rows = table_of(both, "What fills a step")
    assert [row[0] for row in rows] == ["0", "0", "0", "0", "1", "1", "1", "1", "1"]
    assert rows[-3][:3] == ["1", "exposed communication", "12.00"]
    # the one that computes most; 60 + 12 ms of work leave 16 of 88 ms
    said = "GPU 1 computes for 60.00 ms, only communicates for 12.00 ms, and idles for 16.0 ms."
    assert said in clear(plain(answer_of(both).text))


def test_small_rows_are_one(capture: CaptureSummary) -> None:
    """Of 90 ms less than half a percent is less than 0.45 ms."""
    device = device_of(0, 30.0, 0.0, 60.0)
    few = tuple(IdleTime("host", f"part {i}", None, 0.1, 1) for i in range(5))
    rows = table_of(
        replace(capture, step=step_of(replace(device, idle_by_cause=(*device.idle_by_cause, *few)))),
        "Why the GPU idles",
    )
    assert len(rows) == 3
    assert [rows[-1][0], *rows[-1][3:]] == ["other reasons (5)", "0.500", "0.6\N{NO-BREAK SPACE}%", "5"]


def test_a_finding_is_explained(capture: CaptureSummary) -> None:
    blocks = blocks_of(capture)
    code = [block.lines for block in blocks if isinstance(block, Listing) and block.kind == "python"]
    assert code == [one.remedy for one in FINDINGS[:3]]
    (folded,) = (block for block in blocks if isinstance(block, Details))
    assert folded.title.startswith("4. Copies follow copies: saves ")
    text = clear(render(build_report(evidence_of(capture)), {}))
    said = section(text, "Why is a step as long")
    assert "How to check: Leave it out." in said
    assert "**1. The GPU waits for the input pipeline: saves 41–45 ms of 88.0 ms (49 % of the step)**" in said
    assert "| 2   | Attention is not fused" in said


def test_the_profiler_is_nothing_to_fix(capture: CaptureSummary) -> None:
    slowed = replace(capture, diagnosis=replace(DIAGNOSIS, overhead_ms=(50.0, 60.0)))
    said = [clear(plain(block.text)) for block in blocks_of(slowed) if isinstance(block, Paragraph)]
    assert any(text.startswith("The profiler takes 50–60 ms of a profiled step, an estimate") for text in said)
    assert [row[0] for row in table_of(slowed, "What to fix")] == ["1", "2", "3", "4"]


def test_nothing_stands_out(capture: CaptureSummary) -> None:
    """86.24 of 88 ms are 98 %; a third of the compute is elementwise."""
    calm = replace(capture, diagnosis=replace(DIAGNOSIS, busy_ms=86.24, findings=()))
    answer = answer_of(calm)
    (line,) = answer.more
    assert clear(plain(line)) == (
        "Nothing stands out: no change that is looked for saves 3 % of the step or more. The GPU's work fills 98 % of "
        "the step without the profiler. 33 % of it is in kernels that read and write more than they compute: a larger "
        "batch makes them longer, not faster."
    )
    assert plain(line) in plain(answer.text)
    assert not [block for block in blocks_of(calm) if isinstance(block, Details)]


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (8.0, "21 % of it is in kernels that read and write more than they compute: a larger batch makes them longer"),
        (40.0, "makes them longer, not faster. Smaller data types would shorten them."),
    ],
)
def test_what_bounds_a_step_that_the_gpu_fills(capture: CaptureSummary, ms: float, said: str) -> None:
    """8 of 8 + 30 are 21 %, 40 of 40 + 30 are 57 %."""
    classes = (ClassTime("matmul", 30.0), ClassTime("elementwise", ms))
    device = replace(STEP, classes=classes)
    full = replace(capture, step=step_of(device), diagnosis=replace(DIAGNOSIS, busy_ms=86.24, findings=()))
    assert said in clear(plain(answer_of(full).text))
    for few in (
        replace(full, diagnosis=replace(DIAGNOSIS, busy_ms=70.0, findings=())),  # 80 % of the step
        replace(full, step=step_of(replace(device, classes=(*classes, ClassTime("other", 20.0))))),
    ):
        assert "larger batch" not in clear(plain(answer_of(few).text))


def test_kernels_inside_graphs_hide_findings(capture: CaptureSummary) -> None:
    """20 of 30 ms of compute are 67 %."""
    assert capture.whole
    graph = MemoryRow("graph", 1, 20.0)
    device = replace(STEP, classes=(ClassTime("unknown", 20.0), ClassTime("matmul", 10.0)))
    hidden = replace(
        capture, step=step_of(device), whole=structs.replace(capture.whole, memory=(graph,)),
        diagnosis=replace(DIAGNOSIS, findings=()),
    )  # fmt: skip
    (line,) = answer_of(hidden).more
    assert clear(plain(line)).startswith("67 % of the GPU's compute time is inside CUDA graphs whose kernels were not")
    assert "Nothing stands out" not in plain(answer_of(hidden).text)
    # with findings beside it, both are said
    assert len(answer_of(replace(hidden, diagnosis=DIAGNOSIS)).more) == 4


def test_gpu_events_alone(capture: CaptureSummary) -> None:
    assert capture.metadata
    alone = replace(capture, diagnosis=None, metadata=replace(capture.metadata, profiler="torch", ranges_on_gpu=True))
    (line,) = answer_of(alone).more
    assert plain(line).startswith("This trace has no CPU events: without them no waits and launches are known")
    assert plain(line).endswith("Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].")


def test_a_replay_that_is_not_trusted(capture: CaptureSummary) -> None:
    """Neither its findings nor its estimate of the step are shown."""
    doubted = replace(DIAGNOSIS, timed=False, findings=(), doubt="a replay is 40 % longer")
    answer = answer_of(replace(capture, diagnosis=doubted))
    assert plain(answer.text).endswith("No saving can be told here: a replay is 40 % longer.")
    assert plain(answer.short).replace("\N{NO-BREAK SPACE}", " ").startswith("90.00 ms under the profiler: ")


def test_what_bounds_the_steps(capture: CaptureSummary) -> None:
    def said(step: StepSummary) -> str:
        return clear(" ".join(plain(b.text) for b in blocks_of(replace(capture, step=step)) if hasattr(b, "text")))

    assert "The program runs ahead of the GPU here" not in said(STEP)
    assert "The program runs ahead of the GPU here" in said(replace(STEP, on_gpu_timeline=True))
    assert "What counts as a step: each NVTX range named step. There are 2, of 90.0 ms under the profiler." in said(
        STEP
    )
    assert "An operation starts 8 µs after its launch (median; for the slowest tenth 90 µs or more). When a" in said(
        STEP
    )
    assert "When a kernel is launched, 1 is still queued (median; at most 30): the GPU has no work in reserve" in said(
        STEP
    )
    assert "345 are still queued (median; at most 700)" in said(replace(STEP, queue=Queue(345.0, 700)))
    assert "after its launch" not in said(replace(STEP, queue=None, launch_latency_us=None))


def test_a_replay_that_misses_is_said(capture: CaptureSummary) -> None:
    text = clear(render(build_report(evidence_of(replace(capture, diagnosis=replace(DIAGNOSIS, error=0.27)))), {}))
    assert "The replayed steps are 27 % longer than the recorded ones" in text
    assert "The replayed steps are" not in render(build_report(evidence_of(capture)), {})


def test_steps_without_gpu_work(capture: CaptureSummary) -> None:
    device = DeviceSteps(0.0, 0.0, 0.0, 90.0, 0, (), (), (IdleTime("unknown", None, None, 90.0, 1),))
    idle = replace(capture, step=replace(step_of(device), launch_latency_us=None), diagnosis=None)
    assert clear(plain(answer_of(idle).text)) == (
        "A step takes 90.00 ms under the profiler. Nothing runs on the GPU in it."
    )
    assert not [block for block in blocks_of(idle) if isinstance(block, Table)]


def test_many_captures_are_folded(capture: CaptureSummary) -> None:
    """A table over all, each remedy once, and all else by capture."""
    captures = tuple(replace(capture, name=f"train {i}") for i in range(7))
    found = build_report(evidence_of(*captures)).sections[1]
    # seven equal rows: what they share is said once, and no table is left
    assert "The same in every row: " in plain(getattr(found.blocks[0], "text", ""))
    folded = [block for block in found.blocks if isinstance(block, Details)]
    assert [block.title for block in folded[:4]] == [f"{one.title} (7 captures)" for one in FINDINGS]
    assert folded[-1].title == "Capture by capture: 7"
    inside = set(map(id, _inside(folded)))
    tables = [block for block in unfolded(found.blocks) if isinstance(block, Table) and block.capture]
    assert len(tables) == 7 * 4
    assert all(id(table) in inside for table in tables)
    code = [one for one in unfolded(found.blocks) if isinstance(one, Listing) and one.kind == "python"]
    assert len(code) == len(FINDINGS)


def test_many_captures_on_the_terminal(capture: CaptureSummary, capsys: pytest.CaptureFixture[str]) -> None:
    """The first finding of each, and a line on all that were timed alone."""
    unprofiled = Unprofiled("ok", phases={"step": Stats(1, 50.0, None, 50.0, 50.0, 50.0)})
    timed = [CaptureSummary(f"timed {i}", None, "timings.csv", "not_profiled", unprofiled=unprofiled) for i in range(5)]
    print_answers(build_report(evidence_of(capture, replace(capture, name="again"), *timed)))
    printed = capsys.readouterr().out
    assert printed.count("1. The GPU waits for the input pipeline") == 2
    assert "2. Attention" not in printed
    assert "timed 0" not in printed
    assert "5 configurations without a capture: see the report." in printed


def _inside(folded: list[Details]) -> Iterator[Block]:
    for block in folded:
        yield from unfolded(block.blocks)


def test_every_cause_has_its_words() -> None:
    from nsys_analyzer.analysis.steps import process

    assert set(CAUSES) == set(process.CAUSES)


def test_the_first_thing_to_fix_is_in_the_answer(real_capture: RealCapture) -> None:
    (summary,) = summarize(Trace.load(real_capture("train_small256")), "train_small256")
    report = build_report(Evidence(complete([summary])))
    (answer,) = report.sections[1].answers
    assert plain(answer.more[0]).startswith("1. ")
    assert 'What to fix first: "The GPU waits for launches", which saves ' in plain(answer.text)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (40.6, 44.8, "41–45 ms"),
        (12.05, 21.16, "12–21 ms"),
        (3.43, 7.87, "3.4–7.9 ms"),
        (44.91, 45.52, "44.9–45.5 ms"),
        (9.357, 9.362, "9.36 ms"),  # they agree in three digits
        (0.199, 0.207, "0.199–0.207 ms"),
        (88.0, 88.0, "88.0 ms"),
        (0.0, 0.0, "0.00 ms"),
        (0.0, 5.0, "0.0–5.0 ms"),
        (1041.2, 1302.9, "1,041–1,303 ms"),
    ],
)
def test_times_between_two_bounds(low: float, high: float, said: str) -> None:
    assert clear(milliseconds_between(low, high)) == said
    assert clear(plain(format_cell(Interval(low, high), "ms"))) == said.removesuffix(" ms").replace("–", " – ")


@pytest.mark.parametrize(("value", "said"), [(88.0, "88 ms"), (9.365, "9.37 ms"), (100.0, "100 ms"), (0.0, "0 ms")])
def test_estimated_times(value: float, said: str) -> None:
    assert clear(about_milliseconds(value)) == said

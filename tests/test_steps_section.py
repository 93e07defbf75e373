"""The section on the steps, from figures that are made up."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from nsys_analyzer import Trace
from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.groups import StepGroup
from nsys_analyzer.analysis.steps.process import CAUSES
from nsys_analyzer.analysis.steps.step import (
    PROGRAM_PART,
    ClassTime,
    DeviceSteps,
    IdleTime,
    LaunchLatency,
    OnPath,
    PhaseParts,
    Queue,
    StepSummary,
    UnprofiledStep,
    narrow_to_base,
)
from nsys_analyzer.analysis.summary.complete import find_busy_share_of_step, find_missing_reason
from nsys_analyzer.analysis.summary.kernel_tables import MemoryRow
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import CAUSE_WORDS, Evidence
from nsys_analyzer.report.model import Answer, Details, Interval
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.report.sections.bars import make_step_bars
from nsys_analyzer.report.units import format_cell, format_ms, format_ms_range
from nsys_analyzer.text import plain
from tests.support.rows import unpadded
from tests.test_report_command import two_steps


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
        **vars(narrow_to_base(main, DeviceSteps)), instances=2, source="range", unit="a range step",
        on_gpu_timeline=on_gpu,
        length_ms=90.0, wall_ms=Stats(2, 90.0, 0.0, 90.0, 90.0, 90.0), wall_values_ms=(90.0, 90.0),
        busy_values_ms=(30.0, 30.0), groups=(StepGroup("usual", 2, 90.0, True),), devices=devices,
        launch_latency_us=LaunchLatency(8.0, 90.0), queue=Queue(1.0, 30),
    )  # fmt: skip


STEP = step_of(device_of(0, 30.0, 0.0, 60.0))


def finding_of(title: str, low: float, high: float, left: float) -> Finding:
    return Finding(
        id=title.lower().replace(" ", "_"),
        title=title,
        saves_ms_low=low,
        saves_ms_high=high,
        step_ms=88.0,
        left_after_all_ms=left,
        evidence=(f"Seen: {title}.",),
        derivation="By replay.",
        remedy=(f"fix({title!r})",),
        disproof="Leave it out.",
    )


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
    """The captures with what follows from their made-up steps."""

    def completed(capture: CaptureSummary) -> CaptureSummary:
        step, reason = capture.step, find_missing_reason(capture)
        if step:
            step = replace(step, busy_share=find_busy_share_of_step(step, on_cpu=capture.on_cpu))
        return replace(capture, step=step, missing_reason=reason)

    return Evidence(tuple(map(completed, captures)))


def report_of(*captures: CaptureSummary) -> str:
    return clear(render(build_report(evidence_of(*captures)), {}))


def decision_of(capture: CaptureSummary) -> str:
    """What stands above the findings."""
    return report_of(capture).partition("\n## ")[0]


def folded(capture: CaptureSummary, title: str) -> tuple[str, list[str]]:
    """What is folded under a title, and the rows of the tables in it."""
    text = unpadded(report_of(capture).partition(f"<summary>{title}")[2].partition("</details>")[0])
    return text, [line for line in text.splitlines() if line.startswith("| ")]


def clear(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (None, "**90 ms a step under the profiler · GPU busy 33 % of the step**"),  # 30 of 90 ms
        (
            UnprofiledStep(80.0, 88.4, False),
            "**≈ 84.2 ms a step (80–88, estimated; profiled 90) · GPU busy 36 % of the step**",
        ),
        (
            UnprofiledStep(84.0, 85.0, False),
            "**≈ 84.5 ms a step (estimated; profiled 90) · GPU busy 36 % of the step**",
        ),
        (UnprofiledStep(60.0, 60.0, True), "**60 ms a step (measured; profiled 90) · GPU busy 50 % of the step**"),
    ],
)
def test_the_length_of_a_step(capture: CaptureSummary, known: UnprofiledStep | None, said: str) -> None:
    text = decision_of(replace(capture, step=replace(STEP, unprofiled_ms=known)))
    assert said in text
    assert ("(`--step-ms N`) narrows these estimates" in text) == (known is not None and not known.timed)


def test_communication_is_said_beside_the_work(capture: CaptureSummary) -> None:
    """Of the GPU that computes most: 72 of 90 ms are work, 12 of these communicate alone."""
    step = step_of(device_of(0, 30.0, 0.0, 60.0), device_of(1, 60.0, 12.0, 18.0))
    said = decision_of(replace(capture, step=step))
    assert "GPU 1 busy 80 % of the step · communicates without computing for 13 %" in said
    # In 65 ms without the profiler there is no room for the 72: a part of the 12 was waiting, 60 ÷ 65 are work.
    timed = replace(step, unprofiled_ms=UnprofiledStep(65.0, 65.0, True))
    said = decision_of(replace(capture, step=timed))
    assert "65 ms a step (measured; profiled 90) · GPU 1 busy 92 % of the step" in said
    assert "communicates without computing for 13 % of a profiled step" in said
    bars = make_step_bars(timed, "t")
    assert bars is not None
    assert sum(bars.rows[1].ms) == 65.0


def test_three_findings_come_first_and_each_is_explained(capture: CaptureSummary) -> None:
    """(40.6 + 44.8) ÷ 2 of 88 ms is 48.5 %, 7.5 are 8.5; of 12 letters 7.5 ÷ 42.7 are 2.1, 5.15 ÷ 42.7 are 1.4."""
    text = report_of(capture)
    rows = [row for row in unpadded(text.partition("\n## ")[0]).splitlines() if row[:3] in ("| 1", "| 2", "| 3", "| 4")]
    shade = "\N{DARK SHADE}"
    assert rows == [
        f"| 1 | The GPU waits for the input pipeline | 41 – 45 | 49 % | {shade * 12} |",
        f"| 2 | Attention is not fused | 6.0 – 9.0 | 9 % | {shade * 2} |",
        f"| 3 | The optimizer is not fused | 3.1 – 7.2 | 6 % | {shade} |",
    ]
    assert "**1. The GPU waits for the input pipeline: a fix saves 41–45 ms a step (49 %)**" in text
    assert "<summary>4. Copies follow copies: a fix saves 2.9–3.1 ms a step (3 %)</summary>" in text
    assert all(f"fix('{one.title}')" in text for one in FINDINGS)
    assert text.count("*How to check the finding.* Leave it out.") == len(FINDINGS)


def test_the_parts_add_up(capture: CaptureSummary) -> None:
    text, rows = folded(capture, "What fills a step")
    assert "The step by phase" in text
    assert rows[1:] == [
        "| compute: matmul | 20.00 | 22.2 % |",
        "| compute: elementwise | 10.00 | 11.1 % |",
        "| idle | 60.00 | 66.7 % |",
        "| the step | 90.00 | 100.0 % |",
        "| phase | compute ms | idle ms | all ms |",
        "| forward | 30.00 | 60.00 | 90.00 |",
    ]
    assert folded(capture, "Idle time of a step by cause")[1][1:] == [
        "| loads a batch | `next batch` | – | 40.00 | 44.4 % | 1 |",
        "| waits for the GPU | – | `cudaStreamSynchronize` | 20.00 | 22.2 % | 2 |",
    ]


def test_what_of_a_step_is_on_its_critical_path(capture: CaptureSummary) -> None:
    """Of 30 ms of work 20 are on the path, with all 60 ms in which the GPU is idle; 10 are left for the program."""
    path = (OnPath("GPU", "matmul", 20.0), OnPath("idle", "data", 60.0), OnPath("CPU", PROGRAM_PART, 10.0))
    text, rows = folded(replace(capture, step=replace(STEP, critical_path=path)), "What fills a step")
    assert "A step ends when everything on its critical path has ended" in text
    assert rows[:6] == [
        "| part | ms | share | on the critical path ms |",
        "| compute: matmul | 20.00 | 22.2 % | 20.00 |",
        "| compute: elementwise | 10.00 | 11.1 % | – |",
        "| idle | 60.00 | 66.7 % | 60.00 |",
        "| the program, while the GPU works | – | – | 10.00 |",
        "| the step | 90.00 | 100.0 % | 90.00 |",
    ]


def test_a_row_for_each_device(capture: CaptureSummary) -> None:
    both = replace(capture, step=step_of(device_of(0, 30.0, 0.0, 60.0), device_of(1, 60.0, 12.0, 18.0)))
    text, rows = folded(both, "What fills a step")
    assert "| 1 | exposed communication | 12.00 | 13.3 % |" in text
    assert [row[2] for row in rows[1:10]] == ["0", "0", "0", "0", "1", "1", "1", "1", "1"]
    assert "\nGPU 0  MM" in decision_of(both)
    assert "\nGPU 1  MM" in decision_of(both)


def test_small_rows_are_one(capture: CaptureSummary) -> None:
    """Of 90 ms 0.2 % are 0.18 ms."""
    device = device_of(0, 30.0, 0.0, 60.0)
    few = tuple(IdleTime("host", f"part {i}", None, 0.1, 1) for i in range(5))
    small = replace(capture, step=step_of(replace(device, idle_by_cause=(*device.idle_by_cause, *few))))
    assert folded(small, "Idle time of a step by cause")[1][3:] == ["| 5 smaller causes | – | – | 0.500 | 0.6 % | 5 |"]


MISSES = (
    ({"replay_error": 0.27}, "The replayed steps are 27 % longer than the recorded ones"),
    ({"replay_error": -0.27}, "The replayed steps are 27 % shorter than the recorded ones"),
)


@pytest.mark.parametrize(("changed", "said"), MISSES)
def test_what_the_savings_leave_out(capture: CaptureSummary, changed: dict[str, Any], said: str) -> None:
    assert said in report_of(replace(capture, diagnosis=replace(DIAGNOSIS, **changed)))
    assert said not in report_of(capture)


def test_nothing_stands_out(capture: CaptureSummary) -> None:
    calm = replace(capture, diagnosis=replace(DIAGNOSIS, findings=()))
    sentence = (
        "There are no findings: no change that nsys-analyze replays would save 3 % of the step or more. "
        "Unfused operators are a finding only if fusing them saves at least 10 %."
    )
    assert sentence in decision_of(calm)
    assert "torch.compile" not in decision_of(calm)
    assert "## Findings" not in report_of(calm)


def test_why_findings_are_missing(capture: CaptureSummary) -> None:
    """20 of 30 ms of compute are 67 %."""
    assert capture.whole
    assert capture.metadata
    hidden = replace(
        capture, step=step_of(replace(STEP, classes=(ClassTime("unknown", 20.0), ClassTime("matmul", 10.0)))),
        whole=structs.replace(capture.whole, memory=(MemoryRow("graph", 1, 20.0),)),
    )  # fmt: skip
    doubted = replace(DIAGNOSIS, findings=(), doubt=Fact("replay_differs", error=0.4))
    for one, said in (
        (
            replace(hidden, diagnosis=replace(DIAGNOSIS, findings=())),
            "67 % of the GPU's compute time is inside CUDA graphs",
        ),
        (hidden, "67 % of the GPU's compute time is inside CUDA graphs"),  # beside the findings that there are
        (
            replace(capture, diagnosis=None, step=replace(step_of(STEP), launch_latency_us=None)),
            "This trace has no API calls. Without API calls, launches and waits are unknown",
        ),
        (
            replace(capture, diagnosis=doubted),
            "No saving can be derived for this capture: the replayed steps are 40 % longer than the recorded steps.",
        ),
    ):
        text = decision_of(one)
        assert said in text
        assert "There are no findings" not in text


def test_what_counts_as_a_step(capture: CaptureSummary) -> None:
    def said(step: StepSummary) -> str:
        return folded(replace(capture, step=step), "What fills a step")[0]

    usual = said(STEP)
    assert "What counts as a step: a range step. There are 2 steps of 90.0 ms under the profiler." in usual
    assert "A GPU operation starts 0.008 ms after its launch, with 1 other operation in the queue (medians)." in usual
    assert "a step lasts from the end of the previous step's GPU work" in said(replace(STEP, on_gpu_timeline=True))
    assert "after its launch" not in said(replace(STEP, queue=None, launch_latency_us=None))


def test_steps_without_gpu_work(capture: CaptureSummary) -> None:
    device = DeviceSteps(0.0, 0.0, 0.0, 90.0, 0, (), (), (IdleTime("unknown", None, None, 90.0, 1),))
    text = decision_of(replace(capture, step=replace(step_of(device), launch_latency_us=None), diagnosis=None))
    assert "**90 ms a step under the profiler · GPU busy 0 % of the step**" in text
    assert "Nothing runs on the GPU during the steps." in text
    assert "```" not in text  # no bar


def test_many_captures_are_folded(capture: CaptureSummary) -> None:
    """Each finding once, with a table of the captures that have it; all else by capture."""
    captures = tuple(replace(capture, name=f"train {i}") for i in range(7))
    sections = {section.key: section for section in build_report(evidence_of(*captures)).sections}
    assert list(sections) == ["overview", "findings", "captures", "about"]
    text = report_of(*captures)
    assert "**The GPU waits for the input pipeline: a fix saves 49 % of the step (7 captures)**" in text
    assert "<summary>Copies follow copies: a fix saves 3 % of the step (7 captures)</summary>" in text
    assert all(text.count(f"fix('{one.title}')") == 1 for one in FINDINGS)
    shown = [block for block in sections["captures"].blocks if isinstance(block, Details)]
    assert [block.title for block in shown] == [one.title for one in captures]
    assert all(isinstance(block.blocks[1], Answer) for block in shown)


def test_every_cause_has_its_words() -> None:
    assert set(CAUSE_WORDS) == set(CAUSES)


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
    assert clear(format_ms_range(low, high)) == said
    assert clear(plain(format_cell(Interval(low, high), "ms"))) == said.removesuffix(" ms").replace("–", " – ")


@pytest.mark.parametrize(("value", "said"), [(88.0, "88 ms"), (9.365, "9.37 ms"), (100.0, "100 ms"), (0.0, "0 ms")])
def test_estimated_times(value: float, said: str) -> None:
    assert clear(format_ms(value)) == said

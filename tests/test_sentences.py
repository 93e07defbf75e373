"""Tests that every figure in the report's sentences is one of the JSON's, within the digits that are written.

A sentence is held against its own part of the JSON alone: that of the section in which it stands. What is no value
there, but follows from several, is computed in ``DERIVED``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nsys_analyzer.analysis.summary.modules import fold_modules
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.api import build_report, render, summarize
from nsys_analyzer.report.model import Answer, Details, Paragraph, Report, unfold_details
from nsys_analyzer.text import plain
from tests.conftest import DATA, ROOT
from tests.support.packed import unpack

Json = dict[str, Any]

#: A number, or two with a dash between, and its unit; the brackets of the first line, whose unit stands before them.
_FIGURE = re.compile(
    r"(?<![\w.])(?P<low>[\d,]*\d(?:\.\d+)?)(?:–(?P<high>[\d,]*\d(?:\.\d+)?))? ?"
    r"(?P<unit>ms|µs|%|×|launch(?:es)?|percentage points|[TGMk]?(?:FLOP|B)/s|others?|at most|(?:training )?steps?"
    r"|forward passes)(?!\w)"
)
_BRACKETS = re.compile(r"\((?:([\d.,–]+), )?(estimated|measured); profiled ([\d.,]+)\)")
_SCALES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
#: The parts of a capture's JSON that a section's sentences are of.
PARTS = {
    "decision": ("step", "limits"),
    "times": ("phases", "whole"),
    "top_kernel": ("top_kernels",),
    "kernels": ("phases", "whole"),
    "matmul": ("matmul",),
    "attention": ("attention",),
    "limits": ("limits",),
    "modules": ("modules",),
    "details": ("step",),
}
#: Units by the ending of a key; a value takes that of the nearest key above it that has one.
_UNITS = (
    (r"_ms$|^ms(_|$)", "ms"), (r"_us$", "µs"), (r"ratio$", "×"), (r"^launches", "launches"), (r"^queue$", "operations"),
    (r"flops_per_s$|^(best_)?peak_flops$|^flops_per_s$|bytes_per_s$", "per second"),
    (r"share|mfu|matmul|fused_attention|unnamed|coverage|tensor_core", "%"),
)  # fmt: skip


class Figure(NamedTuple):
    """A written number in the unit of the JSON, and half of its last digit."""

    value: float
    within: float
    unit: str


def figures_of(text: str) -> Iterator[Figure]:
    """The figures of a sentence."""
    text = _BRACKETS.sub(r"\1 ms, \2; profiled \3 ms", text.replace("\N{NO-BREAK SPACE}", " "))
    for found in _FIGURE.finditer(text):
        unit, scale = found["unit"], 1.0
        if unit in ("%", "percentage points"):
            unit, scale = "%", 0.01
        elif unit == "µs":
            unit, scale = "ms", 1e-3
        elif unit.endswith("/s"):
            unit, scale = "per second", _SCALES.get(unit[0], 1.0)
        elif unit in ("other", "others", "at most"):
            unit = "operations"
        elif unit.startswith("launch"):
            unit = "launches"
        elif unit.endswith(("step", "steps", "passes")):
            unit = "steps"
        for number in filter(None, (found["low"], found["high"])):
            decimals = len(number.partition(".")[2])
            yield Figure(float(number.replace(",", "")) * scale, 0.5 * 10**-decimals * scale, unit)


def values_of(data: Any, key: str = "", unit: str = "") -> Iterator[tuple[str, float]]:
    """Unit and value of each number of JSON."""
    unit = next((name for pattern, name in _UNITS if re.search(pattern, key)), unit)
    if isinstance(data, dict):
        for name, one in data.items():
            yield from values_of(one, name, unit)
    elif isinstance(data, list):
        for one in data:
            yield from values_of(one, key, unit)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield ("ms", data / 1e3) if unit == "µs" else (unit, data)


def unexplained(text: str, values: set[tuple[str, float]]) -> list[Figure]:
    """The figures of a sentence that no value explains."""
    return [
        one
        for one in figures_of(text)
        if not any(unit == one.unit and abs(value - one.value) <= one.within * 1.0001 for unit, value in values)
    ]


# --- what follows from several values


def of_step(data: Json, _: CaptureSummary) -> Iterator[tuple[str, float]]:
    """The length of a step, how many there are, and how much of it is work or exposed communication."""
    step = data["step"]
    if step is None:
        return
    length = sum(step[f"{part}_ms"] for part in ("compute", "exposed_copy", "exposed_communication", "idle"))
    known = step["unprofiled_ms"]
    middle = (known["low"] + known["high"]) / 2 if known else length
    yield "ms", middle
    yield "steps", step["instances"]
    on_cpu = data["gpu"] == "CPU"
    works = step["compute_ms"] / length if on_cpu else (length - step["idle_ms"]) / middle
    yield "%", min(works, 1.0)
    yield "%", step["exposed_communication_ms"] / length
    if data["share_in_phases"] is not None:
        yield "%", math.floor(data["share_in_phases"] * 1000) / 1000  # cut off, not rounded: 89.99 % is not 90


def of_details(data: Json, _: CaptureSummary) -> Iterator[tuple[str, float]]:
    """The number of the measured steps, and of the steps of each group."""
    yield "steps", data["step"]["instances"]
    yield from (("steps", group["steps"]) for group in data["step"]["groups"])


def shares_of_computing(shares: Json) -> dict[str, float]:
    """The shares of the classes without communication."""
    ms = {row["class"]: row["ms_per_instance"] for row in shares["classes"] if row["class"] != "communication"}
    return {name: value / sum(ms.values()) for name, value in ms.items()}


def of_matmul(data: Json, _: CaptureSummary) -> Iterator[tuple[str, float]]:
    """By how many points matmul's share of the step differs from that of inference, without communication."""
    share = data["matmul"]
    if share["step"] and share["inference"]:
        step, inference = (shares_of_computing(share[name]) for name in ("step", "inference"))
        yield "%", abs(inference.get("matmul", 0.0) - step.get("matmul", 0.0))
    for one in (*share["phases"], *filter(None, (share["step"], share["inference"]))):
        yield from (("%", value) for value in shares_of_computing(one).values())
    yield "%", 0.0  # a class that a phase does not have


def of_limits(data: Json, capture: CaptureSummary) -> Iterator[tuple[str, float]]:
    """How much of the time the matmuls take, what they reach of the peak, and what each of both costs."""
    limits = capture.limits
    if limits is None or limits.main_rate is None or not limits.peak_flops:
        return
    main_rate = limits.main_rate
    rows = [one for one in limits.classes if one.kernel_class in ("matmul", "fused attention") and one.flops]
    rows = [one for one in rows if main_rate.phase in ("step", one.phase)]
    flops, ms = sum(one.flops or 0 for one in rows), sum(one.ms for one in rows)
    if flops:
        covered, reached = (
            round(main_rate.model_flops / flops) * ms / main_rate.ms,
            flops / (ms / 1e3) / limits.peak_flops,
        )
        yield from (("%", one) for one in (covered, reached, covered * (1 - reached), 1 - covered))
    yield "ms", main_rate.ms
    yield "per second", main_rate.flops_per_s
    assert data["limits"] is not None


def of_modules(data: Json, capture: CaptureSummary) -> Iterator[tuple[str, float]]:
    """What a module takes itself, layers of one kind together, of forward and backward; what is not covered."""
    modules = capture.modules
    if modules is None:
        return
    total = data["modules"]["forward_ms"] + data["modules"]["backward_ms"]
    yield "ms", total
    for one in fold_modules(modules.modules)[0]:
        yield "%", (one.own_forward_ms + one.own_backward_ms) / total
    if modules.backward_coverage is not None:
        yield "%", 1 - modules.backward_coverage


DERIVED: dict[str, Callable[[Json, CaptureSummary], Iterator[tuple[str, float]]]] = {
    "decision": of_step,
    "matmul": of_matmul,
    "limits": of_limits,
    "modules": of_modules,
    "details": of_details,
}


# --- the captures


def unpacked(folder: Path, pattern: str) -> Callable[[Path], Path]:
    """Unpacks the captures of an example that match."""

    def into(place: Path) -> Path:
        for path in sorted(folder.glob(pattern)):
            unpack(path, place)
        return place

    return into


CAPTURES: dict[str, Callable[[Path], Path]] = {
    "train": unpacked(DATA, "train_small256*"),
    "accumulation": unpacked(DATA, "accumulate_tf32*"),
    "a CUDA graph": unpacked(DATA, "graphnode_small256*"),
    "inference and a sweep": lambda _: ROOT / "examples" / "sweep",
    "a program's modules": unpacked(ROOT / "examples/programs/captures", "gpt2.*"),
    "generation": unpacked(ROOT / "examples/programs/captures", "generate.*"),
    "a late rank": unpacked(ROOT / "examples/ranks/captures", "late_rank*"),
    "FSDP": unpacked(ROOT / "examples/ranks/captures", "fsdp*"),
    "a pipeline": unpacked(ROOT / "examples/ranks/captures", "pipeline*"),
    "a CPU, by PyTorch": unpacked(DATA, "cpu_train.pt.trace.json.gz"),
}


@pytest.fixture(params=CAPTURES, scope="module")
def captures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CaptureSummary, ...]:
    path = CAPTURES[request.param](tmp_path_factory.mktemp("captures"))
    return tuple(summarize(path))


def sentences(report: Report, key: str) -> Iterator[str]:
    """The sentences of a section, without the titles of findings and what was seen of them."""
    for section in report.sections:
        for block in unfold_details(section.blocks) if section.key == key else ():
            if isinstance(block, Answer | Paragraph):
                yield plain(block.text)


def data_of(report: Report) -> Json:
    data: Json = json.loads(render(report, "json"))
    return data


def test_the_sentences_of_a_capture(captures: tuple[CaptureSummary, ...]) -> None:
    said = 0
    for capture in captures:
        report = build_report((capture,))
        (data,) = data_of(report)["captures"]
        for key, parts in PARTS.items():
            values = {one for part in parts for one in values_of(data[part], part)}
            values |= {*DERIVED[key](data, capture)} if key in DERIVED and data[parts[0]] else set()
            for text in sentences(report, key):
                assert not unexplained(text, values), f"{capture.title}, {key}: {text}"
                said += sum(1 for _ in figures_of(text))
    assert said > 10 * len(captures)


def test_the_titles_of_findings(captures: tuple[CaptureSummary, ...]) -> None:
    """What each saves and its share; what was seen is a text of the JSON."""
    for capture in captures:
        report = build_report((capture,))
        (data,) = data_of(report)["captures"]
        (section,) = [one for one in report.sections if one.key == "findings"] or [None]
        blocks = section.blocks if section else ()
        titles = [plain(one.text) for one in blocks if isinstance(one, Paragraph)]
        titles += [one.title for one in blocks if isinstance(one, Details)]
        for place, finding in enumerate(data["findings"] or (), 1):
            (title,) = (one for one in titles if one.startswith(f"{place}. {finding['title']}: "))
            share = finding["share_of_step"]
            values = {("ms", finding["saves_ms_low"]), ("ms", finding["saves_ms_high"]), ("%", share)}
            values |= set() if finding["saves_ms_low"] else {("%", 2 * share)}
            assert not unexplained(title, values), title
            assert len([*figures_of(title)]) >= 2
            seen = " ".join(finding["evidence"][:2])
            assert any(seen == plain(one.text) for one in unfold_details(blocks) if isinstance(one, Paragraph))


def test_the_sentences_of_ranks(captures: tuple[CaptureSummary, ...]) -> None:
    report = build_report(captures)
    document = data_of(report)
    for run, data in zip(report.runs, [document, *document.get("other_runs", ())], strict=False):
        values = {*values_of({name: data[name] for name in ("ranks", "lost", "skew_ms", "slowed_ms")})}
        values |= {("steps", data["steps"]), *(("steps", one["slowest_steps"]) for one in data["ranks"])}
        for rank in data["ranks"]:
            values.add(("%", rank["exposed_communication_ms"] / rank["step_ms"]["median"]))
        if replayed := data["replayed_step"]:
            values |= {*values_of(replayed), *(("%", share) for share in replayed["limits"].values())}
        if pipeline := data["pipeline"]:
            values |= {*values_of(pipeline)}
        values |= {("ms", ms) for one in run.findings for ms in (one.saves_ms_low, one.saves_ms_high)}
        said = [
            block
            for section in report.sections
            for block in (section.blocks if section.key == "ranks" else ())
            if isinstance(block, Answer) and block.capture == run.name
        ]
        for block in said:
            assert not unexplained(plain(block.text), values), plain(block.text)
        assert said


def test_a_shared_finding_has_the_shares_of_its_captures(captures: tuple[CaptureSummary, ...]) -> None:
    report = build_report(captures)
    data = data_of(report)["captures"]
    for section in report.sections if len(captures) > 1 else ():
        for title in (plain(one.text) for one in section.blocks if isinstance(one, Paragraph)):
            if section.key != "findings":
                continue
            name = title.partition(": ")[0]
            shares = [one["share_of_step"] for row in data for one in row["findings"] or () if one["title"] == name]
            assert f"{len(shares)} capture" in title
            assert not unexplained(title, {("%", min(shares)), ("%", max(shares))}), title


def test_a_wrong_figure_fails() -> None:
    """A digit, a unit and an end of an interval."""
    values = {("ms", 52.86), ("ms", 46.3), ("ms", 59.51), ("%", 0.636), ("×", 0.801), ("per second", 21.7e12)}
    right = "≈ 52.9 ms a step (46–60, estimated; profiled 52.86) · the GPU works 64 % of it, 0.801× of it, 21.7 TFLOP/s"
    assert len([*figures_of(right)]) == 7
    assert not unexplained(right, values)
    for wrong in ("52.8 ms", "47–60 ms", "46–61 ms", "64 ms", "53 %", "0.802×", "21.8 TFLOP/s", "1,052.9 ms"):
        assert len(unexplained(wrong, values)) == 1, wrong

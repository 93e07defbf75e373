"""Tests reports of captures and experiments in which every name is hostile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from msgspec import Struct, structs

from nsys_analyzer import Trace
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary.complete import complete_captures
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Unprofiled
from nsys_analyzer.analysis.transformer.models import Configuration, find_model
from nsys_analyzer.configuration import Run
from nsys_analyzer.experiments.benches import BENCHES, read_rows
from nsys_analyzer.experiments.model import Bench, Results
from nsys_analyzer.experiments.section import make_section
from nsys_analyzer.inputs.rows import ROWS_FILE, from_json_values, to_json_values
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Report, Section
from nsys_analyzer.report.renderers import RENDERERS
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.text import Text
from tests.conftest import ROOT
from tests.support.export import AUTOGRAD, Export, training_step
from tests.support.hostile import TEXTS, WORST
from tests.test_text import checked

T = TypeVar("T")

#: What is one of our own words, whatever a capture holds: no name from outside gets there.
OURS = (
    "status", "kernel_class", "kind", "per", "profiler", "platform", "phase", "severity", "verdict", "cause",
    "time_of",
)  # fmt: skip


def poisoned(value: T, poison: str, ours: tuple[str, ...] = OURS) -> T:
    """The value with a text put before every text in it, but for the fields and keys that hold words of ours."""
    if isinstance(value, str):
        return poison + value  # type: ignore[return-value]
    if isinstance(value, Text):
        return Text(poisoned(value.spans, poison, ours))  # type: ignore[return-value]
    if isinstance(value, Struct):
        held = structs.asdict(value)
        return structs.replace(
            value, **{key: one if key in ours else poisoned(one, poison, ours) for key, one in held.items()}
        )
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        changed = {name: one if name in ours else poisoned(one, poison, ours) for name, one in held.items()}
        return replace(value, **changed)  # type: ignore[type-var]
    if isinstance(value, Mapping):
        return {  # type: ignore[return-value]
            key: one if key in ours else poisoned(one, poison, ours) for key, one in value.items()
        }
    if isinstance(value, tuple | list):
        return type(value)(poisoned(one, poison, ours) for one in value)  # type: ignore[call-arg]
    return value


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> CaptureSummary:
    """A capture of a training step with all that can be said of one: run, timings, messages, warnings."""
    export = training_step(Export().thread(AUTOGRAD, "pt_autograd_0").gpu())
    export.add("DIAGNOSTIC_EVENT", timestamp=0, severity=2, text="No Vulkan events collected. Does it?", globalPid=0)
    export.range("my work", 900, None)
    (summary,) = complete_captures(
        summarize(Trace.load(export.write(tmp_path_factory.mktemp("t") / "t.sqlite")), "capture")
    )
    run = Run(
        device="cuda", profiler="nsys", gpu="H200", torch="2.9", precision="fp32", attention="sdpa", compile=False,
        cuda_graph=False, seed=0, warmup_steps=1, steps=2, command="python a.py",
        profile_command="nsys profile python a.py", run="nsys-analyze run",
    )  # fmt: skip
    return replace(
        summary, status="failed", message="RuntimeError: it broke", process="rank 0", run=run,
        configuration=Configuration(find_model("small"), 256, 4, "fp32", "train", "sdpa", source="file name"),
        unprofiled=Unprofiled("failed", "why", {"step": Stats(3, 1.0, 0.1, 0.9, 1.0, 1.2)}, 1, "cuda", 1 << 30),
        warnings=(*summary.warnings, "timings.csv, line 2: step 1.000 ms is not trusted"),
    )  # fmt: skip


def evidence_of(capture: CaptureSummary, poison: str, count: int) -> Evidence:
    """As many captures as are wanted, each with a text in all of its names."""
    own = structs.replace(capture.phases[0], phase=f"{poison}mine")  # of a range that the command line calls so
    whole = replace(capture, phases=(*capture.phases, own))
    captures = tuple(poisoned(replace(whole, name=f"capture {i}"), poison) for i in range(count))
    return Evidence(captures, f"nsys-analyze report {poison}", f"{poison}timings.csv", (f"{poison}a note",))


@pytest.mark.parametrize("count", [1, 7])
@given(poison=TEXTS)
@example(poison=WORST)
@example(poison=f"it's {'long ' * 30}")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_name_of_a_capture_changes_the_report(capture: CaptureSummary, count: int, poison: str) -> None:
    evidence = evidence_of(capture, poison, count)
    checked(build_report(evidence))
    json.loads(RENDERERS["json"].render(build_report(evidence), {}))


def test_every_name_is_there(capture: CaptureSummary) -> None:
    """The test above poisons what the report shows: in clear letters each of these names would be in it."""
    page = checked(build_report(evidence_of(capture, "zz", 1)))
    for name in (
        "H200",
        "zzcapture 0",
        "zznsys profile python a.py",
        "zzmine",
        "it broke",
        "zztimings.csv",
        "zza note",
    ):
        assert name in page
    assert "zzampere_sgemm" in page.replace("`", "")


def test_names_are_shown_letter_by_letter(capture: CaptureSummary) -> None:
    name = "void f<float *, (anonymous namespace)::g<4>, _a__b_*|&>(T<int>&&)"
    assert capture.whole
    whole = structs.replace(
        capture.whole, kernels=tuple(structs.replace(row, name=name) for row in capture.whole.kernels[:1])
    )
    phases = tuple(structs.replace(phase, kernels=whole.kernels) for phase in capture.phases)
    page = checked(build_report(Evidence(complete_captures([replace(capture, whole=whole, phases=phases)]), "report")))
    assert f"`{name}`" in page


@pytest.mark.parametrize("name", [bench.name for bench in BENCHES])
@given(poison=TEXTS)
@example(poison=WORST)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_word_of_an_experiment_changes_its_section(name: str, poison: str) -> None:
    section = hostile_section(*committed(name), poison)
    checked(Report("Experiments", (section,)))


COMMITTED: dict[str, tuple[Bench, Results]] = {}


def committed(name: str) -> tuple[Bench, Results]:
    """A committed experiment, read once."""
    if name not in COMMITTED:
        bench, _, rows = read_rows(ROOT / "examples" / "benches" / name / ROWS_FILE)
        COMMITTED[name] = bench, Results(rows)
    return COMMITTED[name]


def hostile_section(bench: Bench, results: Results, poison: str) -> Section:
    """The section of rows whose machines, messages and texts among the figures are hostile; one of them failed."""
    rows = [
        replace(
            row,
            machine=poisoned(row.machine, poison),
            message=poison,
            figures=from_json_values(type(row.figures), figures(to_json_values(row.figures), poison)),
            case=from_json_values(type(row.case), figures(to_json_values(row.case), poison)),
        )
        for row in results.rows
    ]
    broken = replace(rows[-1], status="failed", message=f"{poison}Error: it broke", figures=type(rows[-1].figures)())
    return make_section(bench, Results((*rows[:-1], broken)))


def figures(row: Mapping[str, Any], poison: str) -> Mapping[str, Any]:
    """The figures with hostile lines of code, which a target reads from the program."""
    return {**row, **poisoned({key: row[key] for key in ("layer_saves",) if row.get(key)}, poison)}

"""Writes ``docs/accuracy.md``: the predicted and the measured saving when a planted fault is removed.

``python examples/accuracy.py`` reads the captures and the timings (``measured.json``) of ``faults``, which
``faults/faults.py`` made, and writes the page there, or to the file that is given; it prints the summary. A
second file is a ledger of ``nsys-analyze verify``, which the page then ends with. What-ifs are in ``what_ifs.py``.
"""

from __future__ import annotations

import lzma
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from what_ifs import QUESTIONS, Tried, asked_of, of_benches, of_ranks, tried_table

from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.what_if import WhatIf
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.renderers import markdown
from nsys_analyzer.verify.ledger import read_ledger
from nsys_analyzer.verify.section import history_report

sys.path.insert(0, str(Path(__file__).parent / "faults"))
from faults import CHANGES, FAULTS

FOLDER = Path(__file__).parent / "faults"
UNSEEN = Path(__file__).parent / "unseen_faults"
PAGE = Path(__file__).parent.parent / "docs" / "accuracy.md"
#: The findings that each planted fault may be, which differ by whether operators were recorded; the control is none.
CAUSES = {
    "loader": {"data_loading"}, "item": {"host_sync"}, "nan_filter": {"host_sync"}, "tiny_batch": {"launch_bound"},
    "pageable": {"pageable_copy"}, "fp32": {"fp32_matmul", "fp32_operators"}, "foreach": {"unfused_optimizer"},
    "empty_cache": {"allocator"}, "attention": {"unfused_attention"}, "collector": {"host_stall"},
    "checkpoint": {"device_to_host_copy"}, "casts": {"layout_copies", "copied_tensors", "undone_work"},
    "eager": {"unfused_elementwise", "unfused_chains"}, "recomputation": {"recomputed_work"}, "padding": {"padding"},
    "memory_format": {"memory_format"},
}  # fmt: skip
#: PyTorch has cuDNN convolve in TF32 whatever the precision of matmuls is.
NOT_PLANTED = ("convolution", "fp32")
#: The recordings and pairs with which constants or rules were chosen. All others are the second half of the page.
CALIBRATED = {"transformer", "encoder", ("convolution", "tiny_batch"), ("convolution", "pageable")}
#: A capture is of another program if its kernels take longer than the timed step by more than this share.
OTHER_PROGRAM = 0.05


class Measured(msgspec.Struct, frozen=True):
    """Unprofiled times of a fault and its remedy, ms of a step, one for each round, which took turns.

    ``network`` and ``description`` are those of the program; without them, the key of the recording and the description
    in ``faults.py`` hold.
    """

    model: str
    batch_size: int
    context_length: int
    gpu: str
    torch: str
    steps: int
    rounds: int
    fault_ms: list[float]
    remedy_ms: list[float]
    network: str = ""
    description: str = ""

    @property
    def saved_ms(self) -> list[float]:
        """What the remedy saved in each round."""
        return [fault - remedy for fault, remedy in zip(self.fault_ms, self.remedy_ms, strict=True)]


@dataclass(frozen=True)
class Pair:
    """A fault of a network, as it was measured, and as its capture was diagnosed.

    Attributes:
        recording: the key of the network in ``measured.json``, and the folder of its captures.
        fault: the name of the fault.
        measured: the unprofiled times.
        untimed, timed: the diagnosis of the capture as it was recorded, and with the timed step.
        compute_ms: the time of the kernels per profiled step.
        idle_ms: the idle time per profiled step by cause.
        asked: the answers to the what-if question of the fault.
    """

    recording: str
    fault: str
    measured: Measured
    untimed: Diagnosis
    timed: Diagnosis
    compute_ms: float
    idle_ms: Mapping[str, float]
    asked: tuple[WhatIf, ...] = ()

    @property
    def network(self) -> str:
        """The name of the network."""
        return self.measured.network or self.recording

    @property
    def is_planted(self) -> bool:
        """Whether something is wrong: it is neither the control, nor a change of what is no fault."""
        return self.fault in CAUSES and (self.network, self.fault) != NOT_PLANTED

    @property
    def is_calibrated(self) -> bool:
        """Whether a constant or a rule was chosen with this pair."""
        return not CALIBRATED.isdisjoint({self.recording, (self.recording, self.fault)})

    @property
    def host_cause(self) -> str | None:
        """The cause of the idle time that the fault makes; None if the fault makes work for the GPU."""
        found = self.finding(self.untimed)
        return found.place.name if found and found.place and found.place.kind == "idle" else None

    @property
    def is_of_other_program(self) -> bool:
        """Whether the capture contradicts the times: its kernels take longer than the step in which they ran."""
        step_ms = self.measured.remedy_ms if self.host_cause else self.measured.fault_ms
        return self.compute_ms > (1 + OTHER_PROGRAM) * statistics.median(step_ms)

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """With its step unknown, and timed unless the timed step was refused because it contradicts the capture."""
        return (self.untimed, self.timed) if self.timed.is_timed else (self.untimed,)

    @property
    def saved_ms(self) -> float:
        """What the remedy saved, the median of the rounds."""
        return statistics.median(self.measured.saved_ms)

    def rank(self, diagnosis: Diagnosis) -> int | None:
        """The place of the true cause among the findings, from 1 on; None where it is not found."""
        causes = CAUSES.get(self.fault, set())
        return next((rank for rank, finding in enumerate(diagnosis.findings, 1) if finding.id in causes), None)

    def finding(self, diagnosis: Diagnosis) -> Finding | None:
        """The finding of the true cause."""
        rank = self.rank(diagnosis)
        return diagnosis.findings[rank - 1] if rank else None

    def error_of_step(self, diagnosis: Diagnosis) -> float | None:
        """The predicted step after the change ÷ the measured one − 1."""
        finding = self.finding(diagnosis)
        return self.error_of(diagnosis.step_ms - finding.saves_ms) if finding else None

    def error_of(self, step_ms: float) -> float:
        """A predicted length of the step after the change ÷ the measured one − 1."""
        return step_ms / statistics.median(self.measured.remedy_ms) - 1

    def is_inside(self, diagnosis: Diagnosis) -> bool:
        """Tells whether the measured saving lies inside the predicted interval."""
        finding = self.finding(diagnosis)
        return bool(finding and finding.saves_ms_low <= self.saved_ms <= finding.saves_ms_high)

    def meets(self, diagnosis: Diagnosis) -> bool:
        """Tells whether the rounds' savings reach into the interval, or lie on both sides of it."""
        finding, saved = self.finding(diagnosis), self.measured.saved_ms
        return bool(finding and min(saved) <= finding.saves_ms_high and max(saved) >= finding.saves_ms_low)


def main() -> None:
    """Writes the page, and prints its summary."""
    if len(sys.argv) > 3:
        sys.exit("Give a file to write, and a ledger, or none: python examples/accuracy.py accuracy.md ledger.jsonl")
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    measured = msgspec.json.decode((FOLDER / "measured.json").read_bytes(), type=dict[str, dict[str, Measured]])
    pairs = [pair_of(name, fault, one) for name, faults in measured.items() for fault, one in faults.items()]
    lines = [*page(pairs), *unseen_faults(), *(verified(Path(sys.argv[2])) if len(sys.argv) == 3 else ())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(summary(pairs)))


def pair_of(recording: str, fault: str, measured: Measured) -> Pair:
    """Returns a fault with the findings of its capture, which may have a manifest and other files beside it."""
    with tempfile.TemporaryDirectory() as folder:
        for packed in (FOLDER / "captures" / recording).glob(f"{fault}.*"):
            content = packed.read_bytes()
            is_packed = packed.suffix == ".xz"
            path = Path(folder) / (packed.stem if is_packed else packed.name)
            path.write_bytes(lzma.decompress(content) if is_packed else content)
        found, asked, captures = list[Diagnosis](), list[WhatIf](), list[CaptureSummary]()
        for step_ms in (None, statistics.median(measured.fault_ms)):
            (capture,) = gather([Path(folder) / f"{fault}.sqlite"], step_ms=step_ms).captures
            if capture.diagnosis is None or capture.step is None:
                sys.exit(f"{recording}/{fault} holds no steps to explain")
            found.append(capture.diagnosis)
            captures.append(capture)
            is_refused = step_ms is not None and not capture.diagnosis.is_timed
            if fault in QUESTIONS and not is_refused and (answer := asked_of(fault, capture)):
                asked.append(answer)
    step = captures[0].step
    assert step is not None
    idle_ms = {row.cause: step.idle_of(row.cause) for row in step.idle_by_cause}
    return Pair(recording, fault, measured, *found, step.compute_ms, idle_ms, tuple(asked))


def page(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yields the lines of the page: how it was measured, the summary, and a table for each network."""
    yield "# How well savings are predicted"
    yield ""
    yield (
        "The programs in `examples/faults` train a network with one common fault. From a capture under nsys, "
        "`nsys-analyze explain` predicts what the fix saves. Then the loop with the fault and the loop without it were "
        "timed in turns, without a profiler. The measured saving is the median of the differences of the rounds. The "
        "captures and the times are in `examples/faults`; `make accuracy` makes this page from them."
    )
    yield ""
    yield from summary(pairs)
    yield ""
    yield (
        "*Pairs that set a constant* are those with which a rule, a constant or the width of an interval was chosen. "
        "Nothing was chosen with the *other pairs*. Each row has the predictions from the capture alone (*recorded*; "
        "if `run` made the capture, it has timed steps of the same process), or also from the timed step (*timed*). "
        "The faults of the host leave the kernels unchanged, so the table also has two simple predictions: the time in "
        "which kernels run in the capture, and the profiled step minus the idle time of the cause."
    )
    yield ""
    yield from coverage(pairs)
    yield ""
    yield (
        "The aims for the other pairs are an error of the step after the fix of 4 % in the median and of 13 % for nine "
        "of ten, 80 % of the savings inside intervals of ±20 % in the median (±12 % for timed steps), and an error of "
        "the step with the fault of 3.3 %. Steps that launching limits differ more from round to round than steps that "
        "the GPU fills, so savings of launches have the largest errors. The `fp32` of the convolution is not a fault, "
        "because cuDNN convolves in TF32 for any precision of matmuls. A saving is limited to the time of its cause, "
        "and to the step minus the GPU's work that stays, as they were recorded."
    )
    if others := [pair for pair in pairs if pair.is_of_other_program]:
        names = ", ".join(f"`{pair.fault}` of the {pair.recording}" for pair in others)
        yield ""
        yield (
            "The programs of these captures differ from the timed programs, because the recorded kernels take longer "
            f"than the timed step: {names}. They are not counted."
        )
    yield from ("", *first_predictions())
    for title, is_calibrated in HALVES:
        half = [pair for pair in pairs if pair.is_calibrated == is_calibrated and pair.fault not in CHANGES]
        yield from ("", f"## {title.capitalize()}")
        for recording in dict.fromkeys(pair.recording for pair in half):
            yield ""
            yield from table(recording, [pair for pair in half if pair.recording == recording])
    yield from ("", *tried_table([*_tried(pairs), *of_benches(), *of_ranks()]), "", *lines_table())


def first_predictions() -> Iterator[str]:
    """Yields what was predicted of the other pairs before a rule was changed with them in view, and why it missed."""
    yield "### The first predictions of the other pairs"
    yield ""
    yield (
        "The Llama-like model and the ResNet were recorded on H100s after the rules were complete. The table below has "
        "the predictions before any rule was changed with them in view. Then rules were changed: a thread that pins "
        "batches also fetches and frees them (`pageable`), the spread of the timed steps of the recorded process "
        "widens intervals, the first step after a recording does not count, and a replay begins with the work that the "
        "GPU still has from the steps before (`memory_format`). So the figures above are no longer figures of unseen "
        "programs. The three networks were not recorded on another kind of GPU, the captures of the encoder that are "
        "named above were not repeated, and `eager` of the Llama-like model and `empty_cache`, `tiny_batch` and `none` "
        "of the ResNet have no times or no capture."
    )
    yield ""
    yield from (FOLDER / "first_predictions.md").read_text(encoding="utf-8").splitlines()
    yield ""
    yield (
        "For steps that the GPU fills, the error is at most 6 % (the Llama-like model, except for unpinned batches). "
        "The steps of the ResNet are mostly limited by the CPU, and its rounds have standard deviations of up to 12 %. "
        "The steps that the recorded process timed differ from the rounds by similar amounts, which explains most of "
        "the errors of `checkpoint`, `foreach` and `item`. The model explains the other misses:"
    )
    yield ""
    yield (
        "- `attention` of the Llama-like model: the fused kernel also reads the shared keys and values in place, so "
        "that copies of 2 ms vanish, which the finding does not count."
    )
    yield (
        "- `recomputation`: the replay removes only the recomputed work and its launches. The fix probably also saves "
        "time in the forward pass, where checkpointing handles each saved tensor in Python."
    )
    yield (
        "- `item`: the remedy computes all norms in a few kernels. The finding removes the waits; another finding, "
        "`monitoring_work`, removes the kernels."
    )
    yield (
        "- `loader`: loading takes 150 to 310 ms a step in the rounds of the Llama-like model, and a saving is at most "
        "the time of its cause in the capture."
    )
    yield (
        "- `memory_format`, timed: the GPU fills the step, so that its length does not show how much the profiler "
        "slows the CPU, which limits the step after the fix."
    )


def _tried(pairs: Sequence[Pair]) -> Iterator[Tried]:
    """Yields what was asked of the captures before a change, and findings that say what no question can."""
    for fault, (title, words, _) in QUESTIONS.items():
        for pair in pairs:
            if pair.fault == fault and (pair.is_planted or fault in CHANGES) and not pair.is_of_other_program:
                found = [one for one in map(pair.finding, pair.diagnoses) if one]
                measured = pair.measured.fault_ms, pair.measured.remedy_ms
                yield Tried(f"{pair.recording}: {title}", words, *measured, pair.asked or found)


def lines_table() -> Iterator[str]:
    """Yields the table of the lines that are named for each planted fault."""
    known = msgspec.json.decode((FOLDER / "lines.json").read_bytes())
    rows, named, planted = [], 0, 0
    for fault, one in known["faults"].items():
        first = one["lines"][0]
        file, line = first["place"].split(":")
        where, is_named = "no line plants it", ""
        if one["planted"]:
            name, low, high = one["planted"]
            where = f"`{name.rpartition('/')[2]}:{low}{f'–{high}' if high > low else ''}`"
            is_right = file == name and low <= int(line) <= high
            planted, named, is_named = planted + 1, named + is_right, "yes" if is_right else "no"
        shown = f"`{file.rpartition('/')[2]}:{line}` in `{first['function']}` ({first['share']:.0%})"
        rows.append(f"| `{fault}` | `{one['finding']}` | {where} | {shown} | {is_named} |")
    yield "## The line of code"
    yield ""
    yield (
        f"The {known['network']} was recorded with each fault by `nsys-analyze run`, on an {known['gpu']}. The table "
        "shows the line that the capture's first finding names first, with its share of the finding's time or "
        "samples. This "
        f"line is where the fault was planted for {named} of the {planted} faults that have such a line. In the other "
        "programs a setting or the batch size is wrong, and the line is where the program is at that time."
    )
    yield ""
    yield "| fault | first finding | planted at | line that is named first | named |"
    yield "|---|---|---|---|---|"
    yield from rows


def verified(ledger: Path) -> Iterator[str]:
    """Yields the lines of a ledger: what was predicted and measured by ``nsys-analyze verify``."""
    section = replace(history_report(read_ledger(ledger)).sections[0], title="Verified")
    yield from ("", markdown.render(Report("", (section,)), {}).removeprefix("# ").strip())


#: The halves of the page: the title, and whether its pairs set a constant.
HALVES = (("pairs that set a constant", True), ("other pairs", False))
#: The columns of the summary.
COLUMNS = (
    "pairs", "faults", "true cause found; first", "error of the step with the fault: median; inside its interval",
    "error of the step after the fix: median; nine of ten", "of faults of the host", "GPU's kernels alone",
    "profiled step − idle time", "savings inside the interval; or no further off than rounds differ",
    "half the interval ÷ its middle, median",
)  # fmt: skip
#: The columns of the faults of unknown kinds.
UNSEEN_COLUMNS = (
    "program: fault", "GPU", "step with, without, ms", "saving", "first finding; line", "predicted saving",
    "right; inside", "later: finding; line", "predicted saving", "right; inside",
)  # fmt: skip


def summary(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yields a table with two rows for each half and each recording: as it was recorded, and with the timed step."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for title, is_calibrated in HALVES:
        half = [pair for pair in pairs if pair.is_calibrated == is_calibrated and pair.is_planted]
        half = [pair for pair in half if not pair.is_of_other_program]
        groups = {recording: [pair for pair in half if pair.recording == recording] for recording in _recordings(half)}
        for name, members in {f"**{title}**": half, **groups}.items():
            timed = [pair for pair in members if pair.timed.is_timed]  # a step that contradicts its capture is refused
            for mode, kept in (("recorded", members), ("timed", timed)):
                if kept:
                    found = [pair.timed if mode == "timed" else pair.untimed for pair in kept]
                    yield f"| {name}, {mode} | {' | '.join(_cells(kept, found, is_given=mode == 'timed'))} |"


def _recordings(pairs: Sequence[Pair]) -> list[str]:
    """Returns the recordings of the pairs, in order."""
    return list(dict.fromkeys(pair.recording for pair in pairs))


def _cells(pairs: Sequence[Pair], found: Sequence[Diagnosis], *, is_given: bool) -> Iterator[str]:
    """Yields the cells of the summary after the first. If ``is_given``, the step with the fault was timed."""
    ranks = list(map(Pair.rank, pairs, found))
    yield str(len(pairs))
    yield f"{sum(map(bool, ranks))}; {ranks.count(1)}"
    steps_ms = [statistics.median(pair.measured.fault_ms) for pair in pairs]
    error = statistics.median(abs(one.step_ms / ms - 1) for one, ms in zip(found, steps_ms, strict=True))
    inside = sum(one.step_ms_low <= ms <= one.step_ms_high for one, ms in zip(found, steps_ms, strict=True))
    yield "given" if is_given else f"{error:.1%}; {inside / len(found):.0%}"
    yield errors(map(Pair.error_of_step, pairs, found))
    of_host = [(pair, one, pair.host_cause) for pair, one in zip(pairs, found, strict=True) if pair.host_cause]
    yield errors(pair.error_of_step(one) for pair, one, _ in of_host)
    yield errors(pair.error_of(pair.compute_ms) for pair, _, _ in of_host)
    yield errors(pair.error_of(one.profiled_ms - pair.idle_ms.get(cause or "", 0.0)) for pair, one, cause in of_host)
    yield "; ".join(f"{sum(map(test, pairs, found)) / len(pairs):.0%}" for test in (Pair.is_inside, Pair.meets))
    yield f"±{statistics.median([half_width(one) for one in map(Pair.finding, pairs, found) if one] or [0.0]):.0%}"


def errors(given: Iterable[float | None]) -> str:
    """Returns the median of the absolute errors, and the error that nine of ten do not exceed."""
    sizes = sorted(abs(error) for error in given if error is not None)
    return f"{statistics.median(sizes):.1%}; {sizes[-(-9 * len(sizes) // 10) - 1]:.0%}" if sizes else "–"


def coverage(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yields a table of how many measured savings are inside their intervals, by where the freed time lies."""
    yield "| savings inside the interval | " + " | ".join(f"{title}; timed" for title, _ in HALVES) + " |"
    yield "|---|---|---|"
    for name, is_kind in (
        ("work of the GPU", lambda cause: cause is None),
        ("waits, pauses and copies of the CPU", lambda cause: cause not in (None, "launch")),
        ("launches", lambda cause: cause == "launch"),
    ):
        cells = []
        for _, is_calibrated in HALVES:
            half = [pair for pair in pairs if pair.is_planted and pair.is_calibrated == is_calibrated]
            kept = [pair for pair in half if is_kind(pair.host_cause) and not pair.is_of_other_program]
            counts = (
                [pair.is_inside(pair.untimed) for pair in kept],
                [pair.is_inside(pair.timed) for pair in kept if pair.timed.is_timed],
            )
            cells.append("; ".join(f"{sum(inside)} of {len(inside)}" for inside in counts))
        yield f"| {name} | {' | '.join(cells)} |"


def table(recording: str, pairs: list[Pair]) -> Iterator[str]:
    """Yields the table of a recording."""
    first = pairs[0].measured
    rounds = sorted({pair.measured.rounds for pair in pairs})
    yield f"### {recording.capitalize()}"
    yield ""
    yield (
        f"{first.model}, on an {first.gpu}, PyTorch {first.torch}; {rounds[-1]} rounds. Times are in ms per step; "
        "the least and the most of the rounds are in parentheses. *Timed*: the length of the step with the fault was "
        "given (`--step-ms`)."
    )
    yield ""
    yield (
        "| fault; its remedy | batch × context | measured with, without | predicted without; timed | measured saving | "
        "predicted saving; timed | inside | place of the true cause; first finding |"
    )
    yield "|---|---:|---:|---:|---:|---:|---|---|"
    for pair in pairs:
        yield f"| {' | '.join(cells_of(pair))} |"


def cells_of(pair: Pair) -> Iterator[str]:
    """Yields the cells of a fault's row."""
    measured = pair.measured
    yield f"`{pair.fault}`: {measured.description or FAULTS[pair.fault].description}"
    yield f"{measured.batch_size} × {measured.context_length}"
    yield f"{spread(measured.fault_ms)}, {spread(measured.remedy_ms)}"
    if not pair.is_planted:
        found = [finding.id for finding in pair.untimed.findings]
        yield from ("", spread(measured.saved_ms), "", "", ", ".join(f"`{one}`" for one in found) or "no finding")
        return
    diagnoses = pair.diagnoses
    found = [pair.finding(diagnosis) for diagnosis in diagnoses]
    yield "; ".join(
        f"{diagnosis.step_ms - one.saves_ms:.1f}" if one else "–"
        for diagnosis, one in zip(diagnoses, found, strict=True)
    )
    yield spread(measured.saved_ms)
    yield "; ".join(f"{one.saves_ms_low:.1f} to {one.saves_ms_high:.1f}" if one else "–" for one in found)
    yield "; ".join("yes" if pair.is_inside(diagnosis) else "no" for diagnosis in diagnoses)
    first = next((finding.id for finding in pair.untimed.findings), "none")
    yield f"{pair.rank(pair.untimed) or '–'}; `{first}`{'; another program' * pair.is_of_other_program}"


class Predicted(msgspec.Struct, frozen=True):
    """The first finding of a capture with a planted fault; without a name if the capture has no finding.

    ``is_cause_first`` tells whether the finding names the cause, or first names a line of the fault, by judgement.
    """

    finding: str | None
    line: str | None
    saves_ms_low: float
    saves_ms_high: float
    is_cause_first: bool


class UnseenFault(msgspec.Struct, frozen=True):
    """A fault that was planted by somebody who did not know the rules, and the first finding of its capture.

    Times are ms per step in a run without the profiler. ``first`` is the prediction before, ``later`` the one after the
    rules were changed with the fault in view. A fault that costs no more than two runs differ is not measurable.
    """

    program: str
    fault: str
    kind: str
    cause: str
    remedy: str
    gpu: str
    step_ms: float
    step_without_fault_ms: float
    first: Predicted
    later: Predicted | None = None
    is_measurable: bool = True

    @property
    def saved_ms(self) -> float:
        """What the remedy saved."""
        return self.step_ms - self.step_without_fault_ms

    def is_inside(self, predicted: Predicted) -> bool:
        """Tells whether the measured saving lies inside the predicted interval."""
        return predicted.saves_ms_low <= self.saved_ms <= predicted.saves_ms_high

    def cells(self) -> Iterator[str]:
        """Yields the cells of the row."""
        yield f"`{self.program}`: {self.kind}"
        yield self.gpu
        yield f"{self.step_ms:.1f}, {self.step_without_fault_ms:.1f}"
        yield f"{self.saved_ms:.1f}"
        for predicted in (self.first, self.later):
            if predicted is None:
                yield from ("–", "–", "–")
            elif predicted.finding is None:
                yield from ("none", "–", "no; no")
            else:
                yield f"`{predicted.finding}`{f'; {predicted.line}' if predicted.line else ''}"
                yield f"{predicted.saves_ms_low:.1f} to {predicted.saves_ms_high:.1f}"
                answers = (predicted.is_cause_first, self.is_inside(predicted))
                yield "; ".join("yes" if is_right else "no" for is_right in answers) if self.is_measurable else "–"


def unseen_faults() -> Iterator[str]:
    """Yields the section on the faults that were planted by somebody who did not know the rules."""
    faults = msgspec.json.decode((UNSEEN / "results.json").read_bytes(), type=list[UnseenFault])
    yield from ("", "## Faults of unknown kinds", "")
    yield (
        "The faults above were planted while the rules were written. The faults below were planted by somebody who did "
        "not know the rules, in six programs that the rules had never seen (`examples/unseen_faults`). Each program "
        "was recorded once with each fault and once without it, by `nsys-analyze run -- python program.py`, with "
        "PyTorch 2.11. The steps on the H200 were timed in the recorded processes. The steps on the H100 were timed in "
        "two other processes, one after the other on the same GPU, so they also differ as two processes of one program "
        "do. *First* is the first finding before a rule was changed, and *later* the first finding after the rules "
        "were changed with these faults in view, so that they are no longer unseen. The captures of `serve_kv` contain "
        "no whole step, because its model is called by two methods other than `forward`, so that `run` took the calls "
        "of the model's parts for steps. Savings that are missed are mostly those of CPU time, which differs between "
        "the timed and the recorded process by up to two thirds."
    )
    yield ""
    yield "| the first finding | faults | names the cause, or first a line of the fault | measured saving inside |"
    yield "|---|---:|---:|---:|"
    measurable = [fault for fault in faults if fault.is_measurable]
    for name, found in (
        ("first", [(fault, fault.first) for fault in measurable]),
        ("later", [(fault, fault.later) for fault in measurable if fault.later]),
    ):
        right = sum(predicted.is_cause_first for _, predicted in found)
        inside = sum(fault.is_inside(predicted) for fault, predicted in found)
        yield f"| {name} | {len(found)} | {right} | {inside} |"
    yield ""
    for fault in faults:
        if not fault.is_measurable:
            yield (
                f"`{fault.fault}` of `{fault.program}` is not counted, because two runs without a fault differ by more "
                "than its saving."
            )
            yield ""
    controls = msgspec.json.decode((UNSEEN / "controls.json").read_bytes(), type=dict[str, list[Predicted]])
    said = [
        f"`{program}`: "
        + (
            ", ".join(f"`{one.finding}` ({one.saves_ms_low:.1f} to {one.saves_ms_high:.1f} ms)" for one in found)
            or "none"
        )
        for program, found in controls.items()
    ]
    yield f"The findings of the programs without a fault: {'; '.join(said)}."
    yield ""
    yield "| " + " | ".join(UNSEEN_COLUMNS) + " |"
    yield "|---|---|---:|---:|---|---:|---|---|---:|---|"
    for fault in faults:
        yield f"| {' | '.join(fault.cells())} |"
    yield ""


def spread(ms: Sequence[float]) -> str:
    """Returns the median, with the least and the most."""
    return f"{statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})".replace("-", "−")


def half_width(finding: Finding) -> float:
    """Returns half the interval ÷ its middle."""
    return (finding.saves_ms_high - finding.saves_ms_low) / (finding.saves_ms_high + finding.saves_ms_low)


if __name__ == "__main__":
    main()

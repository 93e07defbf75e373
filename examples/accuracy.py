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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from what_ifs import QUESTIONS, Tried, asked_of, of_benches, of_ranks, tried_table

from nsys_analyzer import summarize
from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
from nsys_analyzer.analysis.what_if import WhatIf
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.renderers import markdown
from nsys_analyzer.verify.ledger import read_ledger
from nsys_analyzer.verify.section import history_report

sys.path.insert(0, str(Path(__file__).parent / "faults"))
from faults import CHANGES, FAULTS

FOLDER = Path(__file__).parent / "faults"
UNSEEN = Path(__file__).parent / "unseen_faults"
PAGE = Path(__file__).parent.parent / "docs" / "accuracy.md"
#: The finding that each planted fault is; the control is none.
CAUSES = {
    "loader": "data_loading", "item": "host_sync", "tiny_batch": "launch_bound", "pageable": "pageable_copy",
    "fp32": "fp32_matmul", "foreach": "unfused_optimizer", "empty_cache": "allocator",
    "attention": "unfused_attention", "collector": "host_stall", "checkpoint": "device_to_host_copy",
    "casts": "layout_copies", "eager": "unfused_elementwise",
}  # fmt: skip
#: PyTorch has cuDNN convolve in TF32 whatever the precision of matmuls is.
NOT_PLANTED = ("convolution", "fp32")
#: The network with which the rules' constants and the widths of the intervals were chosen.
CALIBRATED = "transformer"


class Measured(msgspec.Struct, frozen=True):
    """Unprofiled times of a fault and its remedy, ms of a step, one for each round, which took turns."""

    model: str
    batch_size: int
    context_length: int
    gpu: str
    torch: str
    steps: int
    rounds: int
    fault_ms: list[float]
    remedy_ms: list[float]

    @property
    def saved_ms(self) -> list[float]:
        """What the remedy saved in each round."""
        return [fault - remedy for fault, remedy in zip(self.fault_ms, self.remedy_ms, strict=True)]


@dataclass(frozen=True)
class Pair:
    """A fault of a network, as it was measured, and as its capture was diagnosed: with its step unknown, and timed."""

    network: str
    fault: str
    measured: Measured
    untimed: Diagnosis
    timed: Diagnosis
    asked: tuple[WhatIf, ...] = ()

    @property
    def is_planted(self) -> bool:
        """Whether something is wrong: it is neither the control, nor a change of what is no fault."""
        return self.fault in CAUSES and (self.network, self.fault) != NOT_PLANTED

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
        ids, cause = [finding.id for finding in diagnosis.findings], CAUSES.get(self.fault)
        return ids.index(cause) + 1 if cause in ids else None

    def finding(self, diagnosis: Diagnosis) -> Finding | None:
        """The finding of the true cause."""
        rank = self.rank(diagnosis)
        return diagnosis.findings[rank - 1] if rank else None

    def error_of_step(self, diagnosis: Diagnosis) -> float | None:
        """The predicted step after the change ÷ the measured one − 1."""
        finding = self.finding(diagnosis)
        after = statistics.median(self.measured.remedy_ms)
        return (diagnosis.step_ms - finding.saves_ms) / after - 1 if finding else None

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
    pairs = [pair_of(network, fault, one) for network, faults in measured.items() for fault, one in faults.items()]
    lines = [*page(pairs), *unseen_faults(), *(verified(Path(sys.argv[2])) if len(sys.argv) == 3 else ())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(summary(pairs)))


def pair_of(network: str, fault: str, measured: Measured) -> Pair:
    """Returns a fault with the findings of its capture."""
    packed = FOLDER / "captures" / network / f"{fault}.sqlite.xz"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / packed.stem
        path.write_bytes(lzma.decompress(packed.read_bytes()))
        found, asked = list[Diagnosis](), list[WhatIf]()
        for step_ms in (None, statistics.median(measured.fault_ms)):
            (capture,) = summarize(path, step_ms=step_ms)
            if capture.diagnosis is None:
                sys.exit(f"{packed} holds no steps to explain")
            found.append(capture.diagnosis)
            is_refused = step_ms is not None and not capture.diagnosis.is_timed
            if fault in QUESTIONS and not is_refused and (answer := asked_of(fault, capture)):
                asked.append(answer)
    return Pair(network, fault, measured, *found, tuple(asked))


def page(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yields the lines of the page: how it was measured, the summary, and a table for each network."""
    yield "# How well savings are predicted"
    yield ""
    yield (
        "`examples/faults/faults.py` trains a network with one common fault. From a capture of it under nsys, "
        "`nsys-analyze explain` predicts what the fix saves. Then the loop with the fault and the loop without it "
        "were timed in turns, without a profiler. The measured saving is the median of the differences of the rounds."
        " The captures and the times are in `examples/faults`; `make accuracy` makes this page from them."
    )
    yield ""
    yield from summary(pairs)
    yield ""
    yield (
        f"The constants of the rules and the widths of the intervals were chosen with the {CALIBRATED} and were not "
        "changed afterwards. The explanation of a timed step was later changed with the transformer and six faults of"
        " the encoder: if the GPU fills the step, all launch costs that its length allows are counted. The other five"
        " faults of the encoder and those of the convolution were measured after that, and nothing was changed for "
        "them. The steps of the convolution are launch-bound: their times differ by a fifth from round to round, and "
        "from process to process. The `fp32` of the convolution is not a fault, because cuDNN convolves in TF32 for "
        "any precision of matmuls. In its `pageable`, the loader needs more time to pin 151 MB of features per step "
        "than the step needs to compute; the capture with the fault does not show what limits the step without it."
    )
    yield ""
    yield (
        "The goals were an error of 8% in the median and of at most 13% for nine of ten steps after a change, nine of"
        " ten true causes as the first finding, and 80% of the savings inside their intervals. The predictions miss "
        "them for these reasons. Without launches, the replay keeps the gaps between kernels and the program's "
        "pauses, but a CUDA graph has neither, so its step is predicted 2 to 5 ms too long. With SDPA and bf16 the "
        "steps become launch-bound, and their rounds differ by half. The interval of a timed step holds for one "
        "process: if the step is launch-bound, another process takes more or less time. The saving is limited to the "
        "time of its cause, and to the step minus the GPU's work that stays, as it was recorded: the encoder's GPU "
        "works 67 ms per step in the capture with the slow loader, but the step without the slow loader takes 50 ms."
    )
    for network in dict.fromkeys(pair.network for pair in pairs):
        yield ""
        yield from table(network, [pair for pair in pairs if pair.network == network and pair.fault not in CHANGES])
    yield from ("", *tried_table([*_tried(pairs), *of_benches(), *of_ranks()]), "", *lines_table())


def _tried(pairs: Sequence[Pair]) -> Iterator[Tried]:
    """Yields what was asked of the captures before a change, and findings that say what no question can."""
    for fault, (title, words, _) in QUESTIONS.items():
        for pair in pairs:
            if pair.fault == fault and (pair.is_planted or fault in CHANGES):
                found = [one for one in map(pair.finding, pair.diagnoses) if one]
                measured = pair.measured.fault_ms, pair.measured.remedy_ms
                yield Tried(f"{pair.network}: {title}", words, *measured, pair.asked or found)


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


def summary(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yields a table with a column for each network, where the step is not known and where it was timed."""
    networks = dict.fromkeys(pair.network for pair in pairs)
    columns: list[tuple[str, list[Pair], Callable[[Pair], Diagnosis]]] = []
    for network in networks:
        planted = [pair for pair in pairs if pair.network == network and pair.is_planted]
        timed = [pair for pair in planted if pair.timed.is_timed]  # a step that contradicts its capture is refused
        columns += [(network, planted, lambda pair: pair.untimed), ("step timed", timed, lambda pair: pair.timed)]
    yield "| | " + " | ".join(name for name, _, _ in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    rows: list[tuple[str, Callable[[list[Pair], list[Diagnosis]], str]]] = [
        ("planted faults", lambda planted, _: str(len(planted))),
        (
            "the true cause is found; is the first finding",
            lambda planted, found: "; ".join(
                str(sum(map(told, map(Pair.rank, planted, found)))) for told in (bool, lambda rank: rank == 1)
            ),
        ),
        ("error of the step with the fault, unprofiled: median", _errors_before),
        ("… inside its estimated interval; half the interval ÷ its middle, median", _coverage_before),
        ("error of the step after the fix: median; nine of ten within", _errors),
        (
            "measured savings inside the interval",
            lambda planted, found: f"{sum(map(Pair.is_inside, planted, found)) / len(planted):.0%}",
        ),
        (
            "… or no further off than the rounds differ",
            lambda planted, found: f"{sum(map(Pair.meets, planted, found)) / len(planted):.0%}",
        ),
        ("half the interval ÷ its middle, median", _widths),
    ]
    for title, value in rows:
        cells = (value(planted, [of(pair) for pair in planted]) for _, planted, of in columns)
        yield f"| {title} | {' | '.join(cells)} |"


def _errors_before(planted: list[Pair], found: list[Diagnosis]) -> str:
    pairs = [(one.step_ms, statistics.median(pair.measured.fault_ms)) for pair, one in zip(planted, found, strict=True)]
    return "given" if found[0].is_timed else f"{statistics.median(abs(ms / true - 1) for ms, true in pairs):.1%}"


def _coverage_before(planted: list[Pair], found: list[Diagnosis]) -> str:
    if found[0].is_timed:
        return "given"
    steps_ms = [statistics.median(pair.measured.fault_ms) for pair in planted]
    inside = sum(one.step_ms_low <= ms <= one.step_ms_high for one, ms in zip(found, steps_ms, strict=True))
    widths = [(one.step_ms_high - one.step_ms_low) / 2 / one.step_ms for one in found]
    return f"{inside / len(found):.0%}; ±{statistics.median(widths):.0%}"


def _errors(planted: list[Pair], found: list[Diagnosis]) -> str:
    errors = sorted(abs(error) for error in map(Pair.error_of_step, planted, found) if error is not None)
    return f"{statistics.median(errors):.0%}; {errors[-(-9 * len(errors) // 10) - 1]:.0%}"


def _widths(planted: list[Pair], found: list[Diagnosis]) -> str:
    return f"±{statistics.median(half_width(one) for one in map(Pair.finding, planted, found) if one):.0%}"


def table(network: str, pairs: list[Pair]) -> Iterator[str]:
    """Yields the table of a network."""
    first = pairs[0].measured
    rounds = sorted({pair.measured.rounds for pair in pairs})
    yield f"## {network.capitalize()}"
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
    yield f"`{pair.fault}`: {FAULTS[pair.fault].description}"
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
    yield f"{pair.rank(pair.untimed) or '–'}; `{first}`"


class UnseenFault(msgspec.Struct, frozen=True):
    """A fault that was planted by somebody who did not know the rules, and the first finding of its capture.

    Times are ms per step in a run without the profiler. ``later`` has the first finding after the rules were changed
    with the fault in view; it is None if the first finding stayed.
    """

    program: str
    fault: str
    kind: str
    cause: str
    remedy: str
    step_ms: float
    step_without_fault_ms: float
    first_finding: str
    first_line: str
    saves_ms_low: float
    saves_ms_high: float
    is_cause_first: bool
    later: str | None = None


def unseen_faults() -> Iterator[str]:
    """Yields the section on the faults that were planted by somebody who did not know the rules."""
    faults = msgspec.json.decode((UNSEEN / "results.json").read_bytes(), type=list[UnseenFault])
    first = sum(fault.is_cause_first for fault in faults)
    inside = sum(
        fault.saves_ms_low <= fault.step_ms - fault.step_without_fault_ms <= fault.saves_ms_high for fault in faults
    )
    yield from ("", "## Faults of unknown kinds", "")
    yield (
        "The faults above were planted while the rules were written. The faults below were planted by somebody who did "
        "not know the rules, in five programs that the rules had never seen (`examples/unseen_faults`). Each program "
        "was recorded once with each fault and once without it, by `nsys-analyze run -- python program.py`, on an "
        "NVIDIA H200 with PyTorch 2.11. The table has the first finding before a rule was changed."
    )
    yield ""
    yield (
        f"The true cause, or its line, was the first finding for {first} of {len(faults)} faults. The measured saving "
        f"was inside the interval of the first finding for {inside}. The programs without a fault got no finding about "
        "redundant work. They got findings on chains that a compiler could fuse, of 3 to 14 % of a step, and one of "
        "them on a size that does not suit tensor cores."
    )
    yield ""
    yield (
        "| program: fault | step with, without, ms | saving | first finding; line | predicted saving "
        "| cause or line first | later |"
    )
    yield "|---|---:|---:|---|---:|---|---|"
    for fault in faults:
        saved_ms = fault.step_ms - fault.step_without_fault_ms
        yield (
            f"| `{fault.program}`: {fault.kind} | {fault.step_ms:.1f}, {fault.step_without_fault_ms:.1f} "
            f"| {saved_ms:.1f} | `{fault.first_finding}`; {fault.first_line} "
            f"| {fault.saves_ms_low:.1f} to {fault.saves_ms_high:.1f} "
            f"| {'yes' if fault.is_cause_first else 'no'} | {fault.later or '–'} |"
        )
    yield ""
    yield (
        "*Later*: the first finding and its predicted saving after the rules were changed with these faults in view. "
        "Those results are not unseen any more. Time on the CPU differs between the timed and the recorded process by "
        "up to two thirds here, which no replay of one capture can know: this is why savings of CPU time miss most."
    )
    yield ""


def spread(ms: Sequence[float]) -> str:
    """Returns the median, with the least and the most."""
    return f"{statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})".replace("-", "−")


def half_width(finding: Finding) -> float:
    """Returns half the interval ÷ its middle."""
    return (finding.saves_ms_high - finding.saves_ms_low) / (finding.saves_ms_high + finding.saves_ms_low)


if __name__ == "__main__":
    main()

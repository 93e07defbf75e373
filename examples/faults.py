"""Writes ``faults/table.md``: what removing a planted fault saves, predicted by ``nsys-analyze explain`` and measured.

``python examples/faults.py`` reads the captures and the timings (``measured.json``) of ``faults``, which
``profiling_targets.faults`` made. It writes the table there, or to the file that is given, and prints a short one.
"""

import lzma
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from nsys_analyzer import summarize
from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
from profiling_targets.faults import FAULTS

FOLDER = Path(__file__).parent / "faults"
#: A further finding is listed from this share of the step on, and an interval is narrow up to this half-width.
OTHERS, NARROW = 0.1, 0.3
#: The row of the control, which has no fault to find.
CONTROL = "none"


class Measured(msgspec.Struct, frozen=True):
    """Unprofiled times of a fault and its remedy, ms of a step, one for each round."""

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

    @property
    def median_saved_ms(self) -> float:
        """What the remedy saved."""
        return statistics.median(self.saved_ms)


def main() -> None:
    """Writes the page, and prints its table in short."""
    if len(sys.argv) > 2:
        sys.exit("Give one file to write, or none: python examples/faults.py table.md")
    path = Path(sys.argv[1]) if len(sys.argv) == 2 else FOLDER / "table.md"
    measured = msgspec.json.decode((FOLDER / "measured.json").read_bytes(), type=dict[str, Measured])
    diagnoses = {name: diagnosis_of(FOLDER / "captures" / f"{name}.sqlite.xz") for name in measured}
    path.write_text("\n".join(page(measured, diagnoses)) + "\n", encoding="utf-8")
    print("\n".join(short_table(measured, diagnoses)))


def diagnosis_of(path: Path) -> Diagnosis:
    """The findings of a compressed capture."""
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / path.stem
        unpacked.write_bytes(lzma.decompress(path.read_bytes()))
        (capture,) = summarize(unpacked)
    if capture.diagnosis is None:
        sys.exit(f"{path} holds no steps to explain")
    return capture.diagnosis


def page(measured: Mapping[str, Measured], diagnoses: Mapping[str, Diagnosis]) -> Iterator[str]:
    """The lines of the page: how it was measured, the table, and what it shows."""
    steps = sorted({one.steps for one in measured.values()})
    (rounds,), (gpu,), (torch,), (model,) = (
        {getattr(one, name) for one in measured.values()} for name in ("rounds", "gpu", "torch", "model")
    )
    yield "# Planted faults: predicted and measured savings"
    yield ""
    yield (
        f"`profiling_targets.faults` trains the transformer {model} with one fault planted. From a capture of it under "
        "nsys, `nsys-analyze explain` predicts what each fix would save. Then the loop with the fault and the loop "
        f"without it were timed without a profiler, in turns: {rounds} rounds of {steps[0]} to {steps[-1]} steps each, "
        f"on an {gpu} with PyTorch {torch}. The measured saving is the median of the rounds' differences, with the "
        "least and the most."
    )
    yield ""
    yield (
        "| fault; its remedy | batch × context | first finding | predicted saving, ms | ± | measured saving, ms | "
        f"inside | other findings above {OTHERS:.0%} of the step |"
    )
    yield "|---|---:|---|---:|---:|---:|---|---|"
    for name, one in measured.items():
        yield row(name, one, diagnoses[name])
    yield ""
    yield " ".join(verdict(measured, diagnoses))
    yield ""
    yield (
        "The constants of the rules, such as the share of the optimizer's work that a fused kernel saves, were chosen "
        "with these captures at hand. The table shows how well they fit here, not how well they will fit elsewhere."
    )


def row(name: str, measured: Measured, diagnosis: Diagnosis) -> str:
    """The line of a fault."""
    first = next(iter(diagnosis.findings), None)
    predicted = (
        (f"{first.title} (`{first.id}`)", between(first), f"{half_width(first):.0%}") if first else ("none", "", "")
    )
    cells = [
        f"`{name}`: {FAULTS[name].description}",
        f"{measured.batch_size} × {measured.context_length}",
        *predicted,
        f"{signed(measured.median_saved_ms)} ({signed(min(measured.saved_ms))} to {signed(max(measured.saved_ms))})",
        ("yes" if is_inside(measured, first) else "no") if first else "",
        "; ".join(
            f"`{one.id}` {one.share_of_step:.0%}" for one in diagnosis.findings[1:] if one.share_of_step > OTHERS
        ),
    ]
    return f"| {' | '.join(cells)} |"


def short_table(measured: Mapping[str, Measured], diagnoses: Mapping[str, Diagnosis]) -> Iterator[str]:
    """The faults with their first findings, for docs/predictions.md."""
    yield "| planted fault | first finding | predicted saving, ms | measured, ms |"
    yield "|---|---|---:|---:|"
    for name, one in measured.items():
        finding = next(iter(diagnoses[name].findings), None)
        found = (finding.title, between(finding)) if finding else ("none", "")
        cells = (FAULTS[name].description.partition(";")[0], *found, signed(one.median_saved_ms))
        yield f"| {' | '.join(cells)} |"


def verdict(measured: Mapping[str, Measured], diagnoses: Mapping[str, Diagnosis]) -> Iterator[str]:
    """What lies inside its interval and what does not, and how wide the intervals are."""
    firsts = {name: one.findings[0] for name, one in diagnoses.items() if name != CONTROL and one.findings}
    outside = {name: one for name, one in firsts.items() if not is_inside(measured[name], one)}
    wide = {name: one for name, one in firsts.items() if half_width(one) > NARROW}
    faults = len(measured) - 1
    yield (
        f"The measured saving lies inside the predicted interval for {faults - len(outside)} of {faults} faults, and "
        f"the interval is no wider than ±{NARROW:.0%} of its middle for {faults - len(wide)}; both hold for "
        f"{faults - len(outside.keys() | wide.keys())}."
    )
    for name, one in outside.items():
        saved = measured[name].median_saved_ms
        limit, side = (one.saves_ms_low, "below") if saved < one.saves_ms_low else (one.saves_ms_high, "above")
        yield f"`{name}` saved {saved:.1f} ms, {abs(saved / limit - 1):.0%} {side} the interval."
    for name, one in wide.items():
        yield f"The interval of `{name}` is ±{half_width(one):.0%}: it says little more than which fix to try."
    found = [one for one in diagnoses[CONTROL].findings if one.id != "profiler_overhead"]
    most = max((one.share_of_step for one in found), default=0.0)
    yield f"The control has {f'no finding above {most:.0%} of the step' if found else 'no finding'}."


def half_width(finding: Finding) -> float:
    """Half the interval ÷ its middle."""
    return (finding.saves_ms_high - finding.saves_ms) / finding.saves_ms


def between(finding: Finding) -> str:
    """The interval of a saving."""
    return f"{finding.saves_ms_low:.1f} to {finding.saves_ms_high:.1f}"


def signed(ms: float) -> str:
    """A time that may be below zero."""
    return f"{ms:.1f}".replace("-", "−")


def is_inside(measured: Measured, finding: Finding) -> bool:
    """True where the measured saving lies inside the predicted interval."""
    return finding.saves_ms_low <= measured.median_saved_ms <= finding.saves_ms_high


if __name__ == "__main__":
    main()

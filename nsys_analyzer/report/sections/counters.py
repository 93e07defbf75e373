"""Reports what the hardware counters of the GPU show: what limits the work, its traffic, and its clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from nsys_analyzer.analysis.counters.figures import LOW_CLOCK, MIN_SAMPLES, CounterRow, Counters
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, MATMUL
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Summary
from nsys_analyzer.report.model import Answer, Block, Details, Field, Paragraph, Table, make_table
from nsys_analyzer.report.units import format_ms, rounded
from nsys_analyzer.text import format_bytes, join_names, phrase, plural, rounded_percent

#: nsys stores shares as whole percents, so a share below this one is not known exactly.
_SMALLEST_SHARE = 0.01
#: An operator is named if it moves at least this multiple of the bytes that it must read and write.
_EXCESS_FACTOR = 1.2
#: A class without figures is named if it takes at least this share of the kernel time.
_LARGE_SHARE = 0.05
_CLOCK_CAUSES = "A limit of power, of temperature or of an administrator lowers the clock."
_LIMIT_WORDS = {"memory": "memory-bound", "compute": "compute-bound", "neither": "neither"}


def answer_counters(capture: CaptureSummary, labels: Mapping[str, str]) -> Iterator[Block]:
    """Yields what the hardware counters show; nothing if no counters were requested.

    ``labels`` are the short labels of kernels, by their names.
    """
    counters, title = capture.counters, capture.title
    if counters is None:
        if capture.run and "--gpu-metrics-device" in (capture.run.profile_command or ""):
            missing = phrase(
                "nsys was told to sample the GPU's counters, but the capture has no samples of the process's GPU. `{}` "
                "prints nsys's messages about that.",
                "nsys-analyze info CAPTURE",
            )
            yield Answer(missing, title)
        return
    sentences = [*_describe_limits(counters), *_describe_traffic(counters), *_describe_clocks(counters)]
    if not sentences:
        yield Answer(
            f"The capture has {counters.samples:,} samples of the GPU's counters. No phase or kernel class runs alone "
            f"in {MIN_SAMPLES} of them, so no figure is known.",
            title,
        )
        return
    yield Answer(" ".join(sentences), title)
    yield _tabulate(counters.classes, "class", "The counters while the kernels of one class run alone:", title)
    kernels = tuple(replace(row, name=labels.get(row.name, row.name)) for row in counters.kernels)
    folded: list[Block] = [
        _tabulate(rows, name, caption, title)
        for rows, name, caption in (
            (counters.phases, "phase", "By phase, while the GPU works:"),
            (counters.modules, "module", "By module:"),
            (kernels, "kernel", "By kernel:"),
        )
        if rows
    ]
    measured_classes = {row.name for row in counters.classes}
    unmeasured_classes = [
        row.kernel_class
        for row in (capture.whole.classes if capture.whole else ())
        if row.share >= _LARGE_SHARE and row.kernel_class not in measured_classes
    ]
    if unmeasured_classes:
        folded.append(
            Paragraph(
                phrase(
                    "There are no figures of {}, because too few samples contain only one of these classes. `{}` "
                    "samples more often.",
                    join_names(unmeasured_classes),
                    "nsys-analyze run --counters --nsys-option=--gpu-metrics-frequency=100000",
                ),
                title,
            )
        )
    folded.append(
        Paragraph(
            f"nsys sampled the counters every {counters.period_us:,.0f} µs. A figure is a mean over the samples in "
            f"which nothing else runs on the GPU, and is left out if there are fewer than {MIN_SAMPLES} of them. Work "
            "is memory-bound if it uses at least 60 % of the memory's peak bandwidth, and compute-bound if the SMs "
            "issue instructions, or the tensor cores are active, in at least 60 % of the cycles.",
            title,
        )
    )
    yield Details("Counters by phase, module and kernel", tuple(folded), title)


def _describe_limits(counters: Counters) -> Iterator[str]:
    """Yields sentences on what limits each class, and on the tensor cores."""
    groups = {limit: [row.name for row in counters.classes if row.limited_by == limit] for limit in _LIMIT_WORDS}
    clauses = [
        f"{join_names(names)} {'is' if len(names) == 1 else 'are'} {_LIMIT_WORDS[limit]}"
        for limit, names in groups.items()
        if names and limit != "neither"
    ]
    if clauses:
        yield f"By the GPU's counters, {' and '.join(clauses)}."
    if groups["neither"]:
        verb = "uses" if len(groups["neither"]) == 1 else "use"
        yield f"{join_names(groups['neither'])} {verb} less than 60 % of memory and SMs."
    matmul = counters.of_class(MATMUL)
    if matmul and matmul.tensor_active is not None:
        amount = "at most 1 %" if matmul.tensor_active <= _SMALLEST_SHARE else rounded_percent(matmul.tensor_active)
        yield f"The tensor cores are active for {amount} of the matmuls' time ({_count(matmul.samples)})."


def _describe_traffic(counters: Counters) -> Iterator[str]:
    """Yields the operator with the most excess traffic, and how many SMs collectives take from other kernels."""
    excess_bytes = {row: row.dram_bytes - row.least_bytes for row in counters.operators if row.least_bytes}
    row = max(excess_bytes, key=lambda row: excess_bytes[row], default=None)
    if row and row.least_bytes and row.dram_bytes >= _EXCESS_FACTOR * row.least_bytes:
        factor, size = rounded(row.dram_bytes / row.least_bytes), format_bytes(row.dram_bytes)
        yield f"A call of {row.operator} ({row.shapes}) moves {size} from and to DRAM, {factor} times what it needs."
    collective = counters.of_class(COMMUNICATION)
    if collective and collective.sms_active and counters.sm_count:
        yield (
            f"A collective occupies {collective.sms_active * counters.sm_count:.0f} of {counters.sm_count} SMs, which "
            f"kernels that run beside it cannot use ({_count(collective.samples)})."
        )


def _describe_clocks(counters: Counters) -> Iterator[str]:
    """Yields sentences on clocks below the GPU's highest clock, and on steps with a low clock."""
    whole, peak_mhz = counters.whole, counters.peak_clock_mhz
    if whole and whole.sm_clock_mhz and peak_mhz and whole.sm_clock_mhz < LOW_CLOCK * peak_mhz:
        yield (
            f"While the GPU works, the clock of its SMs is {whole.sm_clock_mhz:,.0f} MHz, which is "
            f"{rounded_percent(whole.sm_clock_mhz / peak_mhz)} of its highest clock ({_count(whole.samples)}). "
            f"{_CLOCK_CAUSES}"
        )
    for step in counters.slow_steps[:3]:
        yield (
            f"Step {step.number} takes {format_ms(step.ms)}, longer than the median step, and the clock of the SMs "
            f"falls to {step.sm_clock_mhz:,.0f} MHz in it ({_count(step.samples)})."
        )


def describe_clock_change(before: Sequence[Summary], after: Sequence[Summary]) -> Iterator[str]:
    """Yields a sentence if the SMs of one side have a lower clock than the SMs of the other side."""
    clocks_mhz = [[clock for run in side if (clock := _find_clock_mhz(run))] for side in (before, after)]
    if not all(clocks_mhz):
        return
    before_mhz, after_mhz = map(median, clocks_mhz)
    if min(before_mhz, after_mhz) < LOW_CLOCK * max(before_mhz, after_mhz):
        yield (
            f"While the GPU works, the clock of its SMs is {before_mhz:,.0f} → {after_mhz:,.0f} MHz. A lower clock "
            "makes kernels slower, whatever the program does."
        )


def describe_clocks_of_ranks(captures: Sequence[Summary]) -> Iterator[str]:
    """Yields a sentence on each rank whose SMs have a lower clock than the SMs of the other ranks."""
    clocks_mhz = {capture.title: clock for capture in captures if (clock := _find_clock_mhz(capture))}
    for title, clock_mhz in clocks_mhz.items():
        others = [other for name, other in clocks_mhz.items() if name != title]
        if others and clock_mhz < LOW_CLOCK * median(others):
            yield (
                f"While the GPU works, the clock of the SMs of {title} is {clock_mhz:,.0f} MHz, and that of the other "
                f"ranks {median(others):,.0f} MHz (median). So the kernels of {title} take longer. {_CLOCK_CAUSES}"
            )


def _find_clock_mhz(capture: Summary) -> float | None:
    """Returns the mean clock of the SMs while the GPU works; None if it was not sampled."""
    return capture.counters.whole.sm_clock_mhz if capture.counters and capture.counters.whole else None


def _count(samples: int) -> str:
    return f"{samples:,} {plural(samples, 'sample')}"


def _hide_noise(share: float | None) -> float | None:
    """Returns the share of a link's bandwidth; None if it is too small to be known."""
    return share if share is not None and share > 2 * _SMALLEST_SHARE else None


def _tabulate(rows: tuple[CounterRow, ...], name: str, caption: str, title: str) -> Table:
    fields: tuple[Field[CounterRow], ...] = (
        Field(name, "code" if name == "module" else "text", lambda row: row.name),
        Field("SMs active", "percent", lambda row: row.sms_active),
        Field("SM issue", "percent", lambda row: row.sm_issue),
        Field("tensor cores", "percent", lambda row: row.tensor_active),
        Field("DRAM read", "percent", lambda row: row.dram_read),
        Field("DRAM write", "percent", lambda row: row.dram_write),
        Field("DRAM B/s", "bytes/s", lambda row: row.dram_bytes_per_s),
        Field("NVLink in", "percent", lambda row: _hide_noise(row.nvlink_received)),
        Field("NVLink out", "percent", lambda row: _hide_noise(row.nvlink_sent)),
        Field("PCIe in", "percent", lambda row: _hide_noise(row.pcie_received)),
        Field("PCIe out", "percent", lambda row: _hide_noise(row.pcie_sent)),
        Field("MHz", "count", lambda row: row.sm_clock_mhz and round(row.sm_clock_mhz)),
        Field("limit", "text", lambda row: _LIMIT_WORDS.get(row.limited_by or "")),
        Field("samples", "count", lambda row: row.samples),
    )
    return make_table(fields, rows, caption, capture=title)

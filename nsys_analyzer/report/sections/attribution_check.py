"""Whether every kernel is accounted for, once."""

from __future__ import annotations

from nsys_analyzer.analysis.summary.summary import Coverage
from nsys_analyzer.report.model import Block, Details, Paragraph, Section
from nsys_analyzer.report.sections.evidence import FEW, Evidence
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import phrase

_KEY, _TITLE = "attribution_check", "Kernel attribution check"
#: A capture's title and its coverage.
_Covered = tuple[str, Coverage]
_CAPTURE: Field[_Covered] = Field("capture", "text", lambda row: row[0])
_PHASES: tuple[Field[_Covered], ...] = (
    _CAPTURE,
    Field("in phases", "count", lambda row: row[1].in_phases),
    Field("warm-up", "count", lambda row: row[1].in_warmup),
    Field("dropped", "count", lambda row: row[1].lost_launches),
)
_TEXT = (
    "Same thread + other thread + graph + no range = kernels, each kernel once, and so in time. *Same thread*: a range "
    "was open on the thread that launched it; *other thread*: it inherited the ranges of the thread that waits for it; "
    "*graph*: launched by the replay of a CUDA graph inside a range; *no range*: unattributed, launched outside every "
    "range. Where there is any, a second table says how many kernels lie in phases, how many of these are left out as "
    "*warm-up*, and how many launches were *dropped*: their kernel is not in the capture."
)


def answer(evidence: Evidence) -> Section:
    """Attributed + unattributed = all, in count and in time."""
    covered = [(capture.title, capture.coverage) for capture in evidence.captures if capture.coverage]
    if not covered:
        return Section(_KEY, _TITLE, ())
    many = len(covered) > FEW
    blocks: list[Block] = [table(_counts(evidence.kernel, many=many), covered)]
    if any(coverage.in_warmup or coverage.lost_launches for _, coverage in covered):
        blocks.append(table(_PHASES, covered))
    if many:
        whole = sum(not coverage.unattributed for _, coverage in covered)
        sentence = (
            f"In {whole} of {len(covered)} captures every {evidence.kernel} belongs to a range, and is counted once."
        )
        blocks = [Paragraph(sentence), Details(f"Capture by capture: {len(covered)} rows", tuple(blocks))]
    return Section(_KEY, _TITLE, (*blocks, Paragraph(phrase(_TEXT.replace("kernel", evidence.kernel)))))


def _counts(kernel: str, *, many: bool) -> tuple[Field[_Covered], ...]:
    """The parts of all kernels, in count and in time; of many captures a sentence says that none lies outside all."""
    return (
        _CAPTURE,
        Field(f"{kernel}s", "count", lambda row: row[1].kernels),
        Field("same thread", "count", lambda row: row[1].how["same thread"]),
        Field("other thread", "count", lambda row: row[1].how["other thread"]),
        Field("graph", "count", lambda row: row[1].how["graph"], fills=bool),
        Field("no range", "count", lambda row: row[1].unattributed, fills=lambda cell: bool(cell) or not many),
        Field("attributed ms", "ms", lambda row: row[1].attributed_ms, fills=bool),
        Field("no range ms", "ms", lambda row: row[1].unattributed_ms, fills=bool),
    )

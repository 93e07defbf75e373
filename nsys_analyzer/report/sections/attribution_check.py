"""Whether every kernel is accounted for, once."""

from __future__ import annotations

from nsys_analyzer.analysis.summary.summary import Coverage
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Paragraph, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import phrase

#: A capture's title and its coverage.
_Covered = tuple[str, Coverage]
_COUNTS: tuple[Field[_Covered], ...] = (
    Field("capture", "text", lambda row: row[0]),
    Field("all", "count", lambda row: row[1].kernels),
    Field("same thread", "count", lambda row: row[1].how["same thread"]),
    Field("other thread", "count", lambda row: row[1].how["other thread"]),
    Field("graph", "count", lambda row: row[1].how["graph"], fills=bool),
    Field("no range", "count", lambda row: row[1].unattributed),
    Field("no range ms", "ms", lambda row: row[1].unattributed_ms, fills=bool),
    Field("warm-up", "count", lambda row: row[1].in_warmup, fills=bool),
    Field("dropped", "count", lambda row: row[1].lost_launches, fills=bool),
)
_TEXT = (
    "Same thread + other thread + graph + no range = all kernels: each is counted once. *Same thread*: launched inside "
    "a range of its own thread; *other thread*: launched by a thread that takes over the ranges of the thread that "
    "waits for it, as PyTorch's autograd threads do; *graph*: launched by the replay of a CUDA graph inside a range; "
    "*no range*: launched outside every range. *Warm-up*: kernels of warm-up instances, which are left out of all "
    "figures. *Dropped*: launches whose kernel is not in the capture."
)


def answer(evidence: Evidence) -> Section:
    """Attributed + unattributed = all, in count and in time."""
    covered = [(capture.title, capture.coverage) for capture in evidence.captures if capture.coverage]
    text = Paragraph(phrase(_TEXT.replace("kernel", evidence.kernel)))
    blocks = (table(_COUNTS, covered), text) if covered else ()
    return Section("attribution_check", "Kernel attribution check", blocks)

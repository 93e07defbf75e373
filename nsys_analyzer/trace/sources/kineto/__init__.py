"""Traces of PyTorch's profiler (Kineto), and of the autograd profiler before it."""

from __future__ import annotations

from pathlib import Path

from nsys_analyzer.trace.sources.source import Source, WriteExport


def _open(path: Path, _timeout_s: float | None) -> WriteExport:
    from nsys_analyzer.trace.sources.kineto.tables import read_tables  # not before there is a trace: it needs numpy

    return read_tables(path, KINETO.suffix_of(path))


KINETO = Source(
    (".pt.trace.json.gz", ".pt.trace.json", ".json.gz"),
    _open,
    ambiguous_suffixes=(".json",),
    marks=(b'"schemaVersion"', b'"traceEvents"'),
)
"""A trace of PyTorch's profiler, plain or compressed with gzip."""

"""Captures as one trace for ui.perfetto.dev: a file of Perfetto's track events (``.pftrace``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from nsys_analyzer.export.captures import Capture
from nsys_analyzer.export.perfetto.content import Ids, packets_of
from nsys_analyzer.export.perfetto.packets import MARK, Strings, compressed, first_packet

_NEAR = 256
#: Threads that compress while numpy makes what comes next: zlib lets go of Python's lock.
_THREADS = 2
_PACKED_BYTES = 1 << 20


def write(captures: Sequence[Capture], path: Path) -> None:
    """Writes the captures, those of all ranks of a run on one clock."""
    strings, ids = Strings(), Ids()
    packets = (packet for capture in captures for packet in packets_of(capture, strings, ids))
    with path.open("wb") as file:
        file.write(first_packet())
        file.writelines(_packed(packets))


def is_ours(path: Path) -> bool:
    """Whether a file is a trace that was written here."""
    with path.open("rb") as file:
        return MARK in file.read(_NEAR)


def _packed(packets: Iterable[bytes]) -> Iterator[bytes]:
    """The packets in compressed ones, in their order."""
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(_THREADS) as threads:
        for content in _joined(packets):
            waiting.append(threads.submit(compressed, content))
            if len(waiting) > _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _joined(packets: Iterable[bytes]) -> Iterator[bytes]:
    """The packets, several small ones together."""
    some = bytearray()
    for packet in packets:
        some += packet
        if len(some) >= _PACKED_BYTES:
            yield bytes(some)
            some.clear()
    if some:
        yield bytes(some)

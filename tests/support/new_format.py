"""All of a new input format: a text file with the start, the end (ns) and the name of a range on each line."""

from pathlib import Path

import pyarrow as pa

from nsys_analyzer.trace.reader import ArrowReader
from nsys_analyzer.trace.sources import Source
from tests.support.export import MAIN, VM


def open_lines(path: Path) -> ArrowReader:
    lines = [line.split(maxsplit=2) for line in path.read_text().splitlines()]
    starts, ends, names = zip(*lines, strict=True)
    number = list(range(len(lines)))
    ranges = {"start": [*map(int, starts)], "end": [*map(int, ends)], "globalTid": [VM | MAIN] * len(lines)}
    tables = {"NVTX_EVENTS": {**ranges, "textId": number}, "StringIds": {"id": number, "value": list(names)}}
    return ArrowReader(path, {name: pa.table(columns) for name, columns in tables.items()})


LINES = Source({".lines": 3}, "tests.support.new_format:open_lines")

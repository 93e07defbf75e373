"""Breaks what people and targets write: Kineto traces, timings, manifests and the rows of benches."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.texts import json_value, text

_ODD_BYTES = (
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\r",
    b'"',
    b",",
    b"{",
    b"[" * 5_000,
    b"\\ud800",
    b"1e999",
    b" " * 9_999,
)


def corrupt(content: bytes, random: Random) -> bytes:
    """A text with bytes changed, put in or cut off."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 3, 20))):
        at = random.randrange(len(changed) + 1)
        kind = random.randrange(4)
        if kind == 0:
            changed[at:at] = random.choice(_ODD_BYTES)
        elif kind == 1:
            del changed[at : at + random.choice((1, 10, 1_000))]
        elif kind == 2:
            changed[at : at + 1] = random.randbytes(1)
        else:
            changed[at:at] = changed[at : at + random.randrange(200)]
    return bytes(changed) if random.random() < 0.9 else bytes(changed[: random.randrange(len(changed) + 1)])


def any_json(document: Any, random: Random) -> Any:
    """A JSON document in which some values, wherever they stand, are others, are gone, or are there twice."""
    for _ in range(random.choice((1, 1, 2, 10))):
        holder = document
        while True:
            key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder))) if holder else None
            if key is None or not isinstance(holder[key], dict | list) or not holder[key] or random.random() < 0.15:
                break
            holder = holder[key]
        if key is None:
            continue
        kind = random.randrange(5)
        if kind == 0:
            del holder[key]
        elif isinstance(holder, list) and kind == 1:
            holder.append(holder[key])
        elif isinstance(holder, dict) and kind == 2:
            holder[text(random)] = holder.pop(key)
        else:
            holder[key] = json_value(random)
    return document


def kineto(path: Path, random: Random) -> str:
    """A trace of PyTorch's profiler, compressed."""
    content = gzip.decompress(path.read_bytes())
    if random.random() < 0.6:
        content, how = json.dumps(any_json(json.loads(content), random)).encode("utf-8", "surrogatepass"), "values"
    else:
        content, how = corrupt(content, random), "bytes"
    packed = gzip.compress(content, 1)
    path.write_bytes(packed if random.random() < 0.9 else corrupt(packed, random))
    return f"Kineto: {how}"


def json_file(path: Path, random: Random) -> str:
    """A manifest, or any file of one JSON document."""
    content = path.read_bytes()
    if random.random() < 0.7:
        content = json.dumps(any_json(json.loads(content), random)).encode("utf-8", "surrogatepass")
    else:
        content = corrupt(content, random)
    path.write_bytes(content)
    return path.name


def json_lines(path: Path, random: Random) -> str:
    """The rows of a bench."""
    lines = path.read_bytes().splitlines()
    for _ in range(random.choice((1, 1, 5))):
        at = random.randrange(len(lines))
        try:
            whole = json.loads(lines[at])
        except (ValueError, RecursionError):
            continue  # changed before
        changed = json.dumps(any_json(whole, random)).encode("utf-8", "surrogatepass")
        lines[at] = changed if random.random() < 0.8 else corrupt(lines[at], random)
    path.write_bytes(b"\n".join(lines) + random.choice((b"\n", b"")))
    return path.parent.name


def csv(path: Path, random: Random) -> str:
    """A table of timings."""
    rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
    for _ in range(random.choice((1, 1, 5))):
        row = random.choice(rows)
        if row and random.random() < 0.8:
            row[random.randrange(len(row))] = random.choice(
                (
                    text(random),
                    "1e-320",
                    "-5",
                    "nan",
                    "inf",
                    "1e308",
                    "0",
                    "OOM",
                    "5 ± 1",
                    '"',
                    "1,5",
                    "12345678901234567890",
                )
            )
        elif random.random() < 0.5:
            rows.append(list(row))
        else:
            row.append(text(random))
    content = "\n".join(",".join(row) for row in rows).encode("utf-8", "surrogatepass")
    path.write_bytes(content if random.random() < 0.8 else corrupt(content, random))
    return "timings"

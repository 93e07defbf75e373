"""Draws values that often break programs: texts, numbers and JSON, from a seeded generator."""

from __future__ import annotations

from random import Random
from typing import Any

NUMBERS = (
    0, 1, -1, 7, 2**15, 2**24, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**53 + 1, 2**61, 2**62, -(2**62), 2**63 - 1,
    -(2**63), 10**9, -(10**9), 10**18,
)  # fmt: skip
TEXTS = (
    "", " ", "\n", "\r\n# heading", "a\nb", "\x00", "\x1b[31mred\x1b[0m", "\x9b31m", "\u202eright", "\ufeff",
    "`", "```", "``` \n# out", "<script>alert(1)</script>", "</details>", "<!-- ", "| a | b |", "|", "**bold**", "_it_",
    "\\", "[x](javascript:alert(1))", "![x](http://example.com/x.png)", "$\\frac{1}{0}$", "%s%n", "{0}", "{}", "-rf",
    "../../etc/passwd", "/etc/passwd", "--output=evil", "forward", "backward", "step", "warmup", "optimizer", "NaN",
    "inf", "1e400", "é" * 300, "x" * 70_000, "日本語", "🚀", "a / b", "void f<int>(T1)", "ampere_sgemm_128x64_tn",
    "ncclDevKernel_AllReduce",
)  # fmt: skip


def number(random: Random) -> int:
    """A number at an edge, or near one."""
    return random.choice(NUMBERS) + random.choice((0, 0, 1, -1)) if random.random() < 0.9 else random.getrandbits(40)


def sqlite_number(random: Random) -> int:
    """A number that SQLite can hold."""
    return max(-(2**63), min(2**63 - 1, number(random)))


def text(random: Random) -> str:
    """A text from the list, or two of them."""
    return random.choice(TEXTS) + (random.choice(TEXTS) if random.random() < 0.2 else "")


def value(random: Random) -> Any:
    """Any value that a column of SQLite takes."""
    kind = random.randrange(6)
    if kind < 3:
        return sqlite_number(random)
    if kind == 3:
        return None
    return (
        text(random).replace("\ud800", "")
        if kind == 4
        else random.choice((1.5, -0.0, 1e300, b"", b"\xff\xfe", b"\0" * 40))
    )


def json_value(random: Random, depth: int = 0) -> Any:
    """Any value of JSON, lone surrogates and huge numbers among them."""
    kind = random.randrange(9 if depth < 3 else 7)
    if kind == 0:
        return None
    if kind == 1:
        return random.choice((True, False))
    if kind in (2, 3):
        return number(random) * random.choice((1, 1, 10**30))
    if kind == 4:
        return random.choice((0.5, -1.5, 1e18, 1e308, 1e-320, float("inf"), float("nan")))
    if kind in (5, 6):
        return text(random) + random.choice(("", "", "\ud800"))
    if kind == 7:
        return [json_value(random, depth + 1) for _ in range(random.randrange(4))]
    return {text(random): json_value(random, depth + 1) for _ in range(random.randrange(4))}

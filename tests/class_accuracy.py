"""Measures how often the rules find the right class, on kernels whose class is known from elsewhere.

``tests/data/kernel_pairs.tsv.xz`` holds distinct pairs of a kernel and the PyTorch operator that launched it, with the
class they are of, how that is known (``operator``: the operator does this kind of work; ``hand``: somebody read the
name), launches and summed duration. They come from public traces of PyTorch's profiler on NVIDIA and AMD GPUs, from
this project's captures, and from runs of many kinds of programs on an H200: vision, convolutions of every kind,
normalization, embeddings, losses, recurrent networks, quantised matmul, attention, mixtures of experts, sparse
matrices, linear algebra, torch.compile, CuPy. What cuDNN tried before it chose a convolution is in.

The pairs whose kernel is an example of a rule, template arguments and all, are left out: a rule knows its own example.

    python -m tests.class_accuracy            # the tables, what is wrong and what stays in ``other``
"""

from __future__ import annotations

import csv
import io
import lzma
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from nsys_analyzer.analysis.kernels.class_rules import OTHER, RULES
from nsys_analyzer.analysis.kernels.classes import classify

PAIRS = Path(__file__).parent / "data" / "kernel_pairs.tsv.xz"
_SHOWN = 90  # characters of a name


@dataclass(frozen=True)
class Pair:
    """A kernel and the operator that launched it (empty where unknown), and the class that they are of."""

    name: str
    operator: str
    kernel_class: str
    evidence: str
    launches: int
    ns: int
    source: str


@dataclass(frozen=True)
class Accuracy:
    """How many of some pairs are classified right: names (right in every pair), launches and ns."""

    names: int
    right_names: int
    launches: int
    right_launches: int
    ns: int
    right_ns: int

    @property
    def shares(self) -> tuple[float, float, float]:
        """Right names, launches and time as fractions; there is one of each at least."""
        return self.right_names / self.names, self.right_launches / self.launches, self.right_ns / max(self.ns, 1)


def read_pairs(path: Path = PAIRS) -> list[Pair]:
    """Reads the table of pairs."""
    text = io.StringIO(lzma.decompress(path.read_bytes()).decode())
    rows = csv.DictReader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
    return [
        Pair(
            row["name"], row["operator"], row["class"], row["evidence"], int(row["launches"]), int(row["ns"]),
            row["source"],
        )
        for row in rows
    ]  # fmt: skip


def signature(name: str) -> str:
    """A kernel's name without the list of its parameters, which differs between profilers.

    >>> signature("void f<g(int)>(float*)")
    'void f<g(int)>'
    """
    depth = 0
    for position, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0 and not name.startswith("(anonymous namespace)", position):
            return name[:position]
    return name


def hold_out(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs whose kernel is no example of a rule."""
    examples = {signature(rule.example) for rule in RULES}
    return [pair for pair in pairs if signature(pair.name) not in examples]


def is_right(pair: Pair) -> bool:
    """Whether the rules give the pair its class."""
    return classify(pair.name, pair.operator) == pair.kernel_class


def accuracy(pairs: Sequence[Pair], right: Callable[[Pair], bool] = is_right) -> Accuracy:
    """How many of the pairs are classified right."""
    wrong = [pair for pair in pairs if not right(pair)]
    names, launches, ns = len({p.name for p in pairs}), sum(p.launches for p in pairs), sum(p.ns for p in pairs)
    return Accuracy(
        names, names - len({p.name for p in wrong}),
        launches, launches - sum(p.launches for p in wrong),
        ns, ns - sum(p.ns for p in wrong),
    )  # fmt: skip


def table(title: str, pairs: Sequence[Pair], group: Callable[[Pair], str]) -> str:
    """Accuracy by a group of the pairs, and of all of them."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[group(pair)].append(pair)
    rows = []
    for name, members in [*sorted(groups.items()), ("all", list(pairs))]:
        found = accuracy(members)
        rows.append((name, found.names, found.launches, found.ns / 1e6, *(100 * share for share in found.shares)))
    columns = (title, "names", "launches", "ms", "% of names", "% of launches", "% of time")
    return tabulate(rows, columns, tablefmt="github", floatfmt=("", "", ",.0f", ",.1f", ".2f", ".2f", ".2f"))


def listing(title: str, pairs: Iterable[Pair]) -> str:
    """Pairs by name, those with the most launches first."""
    rows = [
        f"  {pair.launches:>6,}  {pair.kernel_class}, not {classify(pair.name, pair.operator)}: "
        f"{pair.name[:_SHOWN]} [{pair.operator}]"
        if not is_right(pair)
        else f"  {pair.launches:>6,}  {pair.name[:_SHOWN]} [{pair.operator}]"
        for pair in sorted(pairs, key=lambda pair: -pair.launches)
    ]
    return "\n".join([f"{title}: {len(rows)}", *rows])


def main() -> None:
    """Prints accuracy by class, source and evidence, what is wrong, and what is in no class."""
    pairs = hold_out(read_pairs())
    print(table("class", pairs, lambda pair: pair.kernel_class), end="\n\n")
    print(table("source", pairs, lambda pair: pair.source), end="\n\n")
    print(table("evidence", pairs, lambda pair: pair.evidence), end="\n\n")
    print(listing("Wrong", [pair for pair in pairs if not is_right(pair)]), end="\n\n")
    unclassified = [pair for pair in pairs if classify(pair.name, pair.operator) == OTHER and is_right(pair)]
    print(listing("In no class, and rightly so", unclassified))


if __name__ == "__main__":
    main()

"""Aliases of names in a shared copy, with the facts that keep a kernel's figures the same.

``alias b`` stands for a name that no rule knows, ``alias b (matmul or convolution in bf16)`` for one whose class, the
classes that its operator may make of it, and precision were known. ``forward 3, alias b`` is a range of that phase, and
``alias b 17`` one of several names that differ in the number at their end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

from nsys_analyzer.trace.columns import UNNAMED
from nsys_analyzer.trace.phase_names import DEFAULT_NAMES

#: Stands behind the alias of a range around the input pipeline.
LOADING = "loading"
_SPELLINGS = "|".join((*chain(*DEFAULT_NAMES.values()), UNNAMED))
_WORD = "alias "
_ALIAS = (
    rf"(?:(?:{_SPELLINGS})(?: \d{{1,6}})?, |aten::)?{_WORD}[b-z]{{1,6}}"
    r"(?: \((?P<classes>[a-z/ ]+?)(?: in (?P<precision>(?:bf|tf|fp|int)\d{1,2}))?\))?"
    rf"(?: {LOADING})?(?: #?\d{{1,6}}(?:(?:/| of )\d{{1,6}})?)?(?: \(\d{{1,6}}\))*"
)


@dataclass(frozen=True)
class Alias:
    """The class of a kernel as in its ``Rule``, empty where no rule knew the name, and the precision of its matmuls."""

    kernel_class: str = ""
    part_of: tuple[str, ...] = ()
    precision: str | None = None

    def text(self, code: str) -> str:
        """Returns the alias as it is written, without what stands before it; ``code`` is a few small letters."""
        classes = " or ".join((self.kernel_class, *self.part_of))
        facts = f"{classes} in {self.precision}" if self.precision else classes
        return f"{_WORD}{code} ({facts})" if facts else f"{_WORD}{code}"


def read_alias(name: str) -> Alias | None:
    """Returns the facts in a name that is an alias, None for any other name."""
    found = re.fullmatch(_ALIAS, name) if _WORD in name else None  # compiled when first needed
    if found is None:
        return None
    kernel_class, *part_of = (found["classes"] or "").split(" or ")
    return Alias(kernel_class, tuple(part_of), found["precision"])

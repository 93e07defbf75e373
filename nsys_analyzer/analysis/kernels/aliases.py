"""Aliases of names in a shared copy, with the facts that keep a kernel's figures the same.

``alias 3`` stands for a name that no rule knows, ``alias 3 (matmul or convolution in bf16)`` for one whose class, the
classes that its operator may make of it, and precision were known. ``forward, alias 3`` is a range of that phase.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nsys_analyzer.trace.columns import UNNAMED
from nsys_analyzer.trace.phase_names import DEFAULT_NAMES

_BEFORE = "|".join((*(f"{spellings[0]}, " for spellings in DEFAULT_NAMES.values()), f"{UNNAMED}, ", "aten::"))
_WORD = "alias "
_ALIAS = (
    rf"(?:{_BEFORE})?{_WORD}\d{{1,6}}"
    r"(?: \((?P<classes>[a-z/ ]+?)(?: in (?P<precision>(?:bf|tf|fp|int)\d{1,2}))?\))?(?: \(\d{1,6}\))*"
)


@dataclass(frozen=True)
class Alias:
    """The class of a kernel as in its ``Rule``, empty where no rule knew the name, and the precision of its matmuls."""

    kernel_class: str = ""
    part_of: tuple[str, ...] = ()
    precision: str | None = None

    def text(self, number: int) -> str:
        """The alias as it is written, without what stands before it."""
        classes = " or ".join((self.kernel_class, *self.part_of))
        facts = f"{classes} in {self.precision}" if self.precision else classes
        return f"alias {number} ({facts})" if facts else f"alias {number}"


def read_alias(name: str) -> Alias | None:
    """The facts in a name that is an alias, None for any other name."""
    found = re.fullmatch(_ALIAS, name) if _WORD in name else None  # compiled when first needed
    if found is None:
        return None
    kernel_class, *part_of = (found["classes"] or "").split(" or ")
    return Alias(kernel_class, tuple(part_of), found["precision"])

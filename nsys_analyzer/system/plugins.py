"""What installed packages add, by their entry points; one that fails is named in a line, and left out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from multiprocessing import parent_process
from typing import Any

#: Functions that look for findings, classes of kernels, and formats of exports: see docs/plugins.md.
FINDINGS, KERNEL_CLASSES, EXPORT_FORMATS = (
    f"nsys_analyzer.{group}" for group in ("findings", "kernel_classes", "export_formats")
)


@cache
def load_plugins(group: str) -> tuple[tuple[EntryPoint, Any], ...]:
    """Returns the entry points of a group, each with what it names."""
    loaded: list[tuple[EntryPoint, Any]] = []
    for point in entry_points(group=group):
        with skip_if_it_fails(point):
            loaded.append((point, point.load()))
    return tuple(loaded)


@contextmanager
def skip_if_it_fails(point: EntryPoint) -> Iterator[None]:
    """Ends the block where a plugin fails, and tells the user of it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever another package does
        package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
        why = " ".join(f"{type(error).__name__}: {error}".split())
        _tell(f"Left out: the plugin {point.name} ({point.group}){package}: {why}")


@cache
def _tell(line: str) -> None:
    """Says a line once; of several processes that read captures, the first one says it."""
    if parent_process() is None:
        logging.getLogger(__name__).warning(line)

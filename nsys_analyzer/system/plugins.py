"""Loads the plugins that installed packages register as entry points. A plugin that fails is reported and skipped."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from multiprocessing import parent_process
from typing import Any

#: The groups of entry points for plugins: findings, kernel classes, and export formats. See docs/plugins.md.
FINDINGS, KERNEL_CLASSES, EXPORT_FORMATS = (
    f"nsys_analyzer.{group}" for group in ("findings", "kernel_classes", "export_formats")
)


@cache
def load_plugins(group: str) -> tuple[tuple[EntryPoint, Any], ...]:
    """Loads the plugins of a group, and returns their entry points, each with the loaded object."""
    loaded: list[tuple[EntryPoint, Any]] = []
    for point in entry_points(group=group):
        with skip_failing_plugin(point):
            loaded.append((point, point.load()))
    return tuple(loaded)


@contextmanager
def skip_failing_plugin(point: EntryPoint) -> Iterator[None]:
    """Suppresses an error of a plugin in the block, and warns the user that the plugin is left out."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - code of another package may raise anything
        package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        _warn_once(f"Left out: the plugin {point.name} ({point.group}){package}: {reason}")


@cache
def _warn_once(line: str) -> None:
    """Logs a warning only once. Worker processes do not log it, because their parent does."""
    if parent_process() is None:
        logging.getLogger(__name__).warning(line)

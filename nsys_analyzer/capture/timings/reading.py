"""Unprofiled timings from a CSV: what ``time.perf_counter()`` saw where no profiler slowed the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from nsys_analyzer.analysis.models import Configuration
from nsys_analyzer.capture.timings.rows import read_rows
from nsys_analyzer.capture.timings.timing import UNKNOWN_PHASE, Timing, model_notes, timings_of
from nsys_analyzer.errors import TimingsError

_TRAINING_PHASES = ("forward", "loss", "backward", "forward+backward")


@dataclass(frozen=True)
class Timings:
    """A timings CSV, one ``Timing`` per configuration and phase; ``notes`` say what was assumed or chosen."""

    path: Path
    rows: tuple[Timing, ...]
    notes: tuple[str, ...]

    def configurations(self) -> tuple[Configuration, ...]:
        """The distinct configurations, in the order of the file."""
        return tuple(
            dict.fromkeys(
                Configuration(
                    model=row.model,
                    context_length=row.context_length,
                    batch_size=row.batch_size,
                    precision=row.precision,
                    mode=row.mode,
                    source="timings",
                )
                for row in self.rows
            )
        )

    def of_capture(self, name: str, others: Collection[str], configuration: Configuration) -> dict[str, Timing]:
        """The timings of a capture by phase: those that name it, else those that fit its configuration.

        A row that names one of ``others``, the captures beside this one, is never used for this one.
        """
        own = tuple(row for row in self.rows if row.capture == name)
        near = replace(self, rows=own or tuple(row for row in self.rows if row.capture not in others))
        if own and len(near.configurations()) == 1:
            return {row.phase: row for row in own}
        phases = dict.fromkeys(row.phase for row in near.rows)
        return {phase: found for phase in phases if (found := near.find(configuration, phase))}

    def find(self, configuration: Configuration, phase: str) -> Timing | None:
        """The timing of this phase under this configuration; ``None`` where none, or more than one, fits.

        Model (by its dimensions), context length, batch size, precision and mode must agree wherever both sides
        know them; rows that know more of the configuration go first. Where nothing of the configuration is known,
        only a file of a single configuration fits. A training step's forward, loss and backward are those of a
        ``forward+backward`` run and the other way round, where no row has the mode itself.
        """
        agreeing = {index: _agreement(row, configuration) for index, row in enumerate(self.rows)}
        best = max((score for score in agreeing.values() if score is not None), default=None)
        if best is None or (best == 0 and not configuration.mode and len(self.configurations()) != 1):
            return None
        near = [row for index, row in enumerate(self.rows) if agreeing[index] == best]
        if len({row.setup for row in near}) != 1:
            return None
        fitting = [row for row in near if row.phase == phase and _mode_fits(row.mode, configuration.mode, phase)]
        exact = [row for row in fitting if row.mode == configuration.mode] or fitting
        return exact[0] if len(exact) == 1 else None


def _agreement(row: Timing, configuration: Configuration) -> int | None:
    """How many of model, context, batch and precision both sides know and agree on; ``None`` if they disagree."""
    pairs = (
        (row.model and row.model.dimensions, configuration.model and configuration.model.dimensions),
        (row.context_length, configuration.context_length),
        (row.batch_size, configuration.batch_size),
        (row.precision, configuration.precision),
    )
    known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    return len(known) if all(ours == theirs for ours, theirs in known) else None


def _mode_fits(mode: str | None, wanted: str | None, phase: str) -> bool:
    if mode is None or wanted is None or mode == wanted:
        return True
    return {mode, wanted} == {"train", "forward+backward"} and phase in _TRAINING_PHASES


def read_timings(path: Path) -> Timings:
    """The timings in this CSV, in our own columns or in those of the usual benchmark scripts.

    Columns: the model by name or by its four dimensions; times as ``mean_ms`` beside a ``phase`` (or
    ``only_forward``, or ``mode``), or wide as ``forward_ms`` and ``backward_ms``; the synonyms are the tables of
    ``columns``. A column ``capture`` names the capture that a row belongs to. Of two rows for one
    configuration and phase the one with more warm-up steps is used, then the newer; ``notes`` records it.

    Raises:
        TimingsError: a file that is no such CSV, an unknown model, a value that is no number or impossible, or two
            rows for one configuration and phase that nothing tells apart.
    """
    columns, rows = read_rows(path)
    timings = [timing for row in rows for timing in timings_of(row)]
    notes = list(dict.fromkeys([*columns.notes, *(note for row in rows for note in model_notes(row))]))
    if any(timing.phase == UNKNOWN_PHASE for timing in timings):
        notes.append("no column says which phase was timed: add a column phase, such as forward or forward+backward")
    used, choices = _without_repeats(path, timings)
    return Timings(path, used, (*notes, *choices))


def _without_repeats(path: Path, timings: list[Timing]) -> tuple[tuple[Timing, ...], list[str]]:
    """One timing per capture, configuration and phase, and the notes of what was chosen."""
    groups: dict[tuple[object, ...], list[Timing]] = defaultdict(list)
    for timing in timings:
        key = (timing.capture, *timing.setup, timing.mode, timing.phase)
        groups[key].append(timing)
    chosen: list[Timing] = []
    choices: dict[str, list[str]] = defaultdict(list)
    for group in groups.values():
        timing, reason = _choose(path, group)
        chosen.append(timing)
        if reason:
            others = ", ".join(str(other.line) for other in group if other is not timing)
            choices[reason].append(f"line {timing.line} ({timing.phase}), not {others}")
    notes = [f"rows for the same run, the one with {reason} used: {'; '.join(c)}" for reason, c in choices.items()]
    return tuple(chosen), notes


def _choose(path: Path, group: list[Timing]) -> tuple[Timing, str]:
    """The row to use of those for one configuration and phase, and what it was chosen for."""
    if len(group) == 1:
        return group[0], ""
    rules: tuple[tuple[str, Callable[[Timing], float | None]], ...] = (
        ("the most warm-up steps", lambda timing: timing.warmup_steps),
        ("the newest time stamp", lambda timing: timing.time_stamp_s),
    )
    for reason, measure in rules:
        values = [value for timing in group if (value := measure(timing)) is not None]
        if len(values) == len(group):
            group = [timing for timing in group if measure(timing) == max(values)]
        if len(group) == 1:
            return group[0], reason
    first, second = group[0], group[1]
    problem = f"{path}, lines {first.line} and {second.line}: both time the {first.phase} of {_label(first)}"
    raise TimingsError(problem, "Remove one, or tell them apart by a column warmup_steps or timestamp")


def _label(timing: Timing) -> str:
    known = (
        timing.model_name,
        timing.context_length and f"context {timing.context_length}",
        timing.batch_size and f"batch {timing.batch_size}",
        timing.precision,
        timing.mode,
    )
    return ", ".join(str(part) for part in known if part)

"""Which timing belongs to which capture."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.configuration import Run
from nsys_analyzer.runs.timings.timing import Timing
from nsys_analyzer.runs.timings.words import word

_TRAINING_PHASES = ("forward", "loss", "backward", "forward+backward")
_NO_CONDITIONS = Run()


@dataclass(frozen=True)
class Timings:
    """Timings of one or several files (``source``), one per setup and phase; ``notes`` say what was assumed."""

    source: str
    rows: tuple[Timing, ...]
    notes: tuple[str, ...]

    def configurations(self) -> tuple[Configuration, ...]:
        """The distinct configurations, whatever their attention, in the order of the file."""
        return tuple(dict.fromkeys(replace(row.configuration, attention=None) for row in self.rows))

    def of_capture(
        self, name: str, others: Collection[str], configuration: Configuration, run: Run = _NO_CONDITIONS
    ) -> dict[str, Timing]:
        """The timings of a capture by phase: those that name it, else those that fit its configuration.

        A row that names one of ``others``, the captures beside this one, is never used. To fit, all conditions must
        agree that both sides know, the model by its dimensions; rows that know more of them go first, and rows of
        several setups are not used. Where nothing is known, only a file of one configuration fits. A training step and
        a ``forward+backward`` run stand for each other, but for the whole step, where no row has the mode itself.
        """
        near = self._near(name, others)
        if near.rows and near.rows[0].capture == name and len({(row.setup, row.mode) for row in near.rows}) == 1:
            return {row.phase: row for row in near.rows}
        best = near._best(configuration, run)
        phases: dict[str, list[Timing]] = {}
        for row in best if len({row.setup for row in best}) == 1 else ():
            phases.setdefault(row.phase, []).append(row)
        found = {phase: _of_mode(rows, configuration.mode, phase) for phase, rows in phases.items()}
        return {phase: timing for phase, timing in found.items() if timing}

    def undecided(
        self, name: str, others: Collection[str], configuration: Configuration, run: Run = _NO_CONDITIONS
    ) -> dict[str, tuple[str, ...]]:
        """The columns, with their values, in which rows differ that fit this capture alike; empty where none do."""
        near = self._near(name, others)
        fitting = near._best(configuration, run)
        if len({row.setup for row in fitting}) < 2:
            return {}
        values: dict[str, dict[str, None]] = {}
        for header, value in (pair for row in fitting for pair in row.condition_cells):
            values.setdefault(header, {})[value] = None
        return {header: tuple(own) for header, own in values.items() if len(own) > 1}

    def _near(self, name: str, others: Collection[str]) -> Timings:
        """Those that name this capture, else those that name none of the others."""
        own = tuple(row for row in self.rows if row.capture == name)
        return replace(self, rows=own or tuple(row for row in self.rows if row.capture not in others))

    def _best(self, configuration: Configuration, run: Run) -> list[Timing]:
        """The rows that contradict nothing that is known and agree in most of it."""
        used = {text.lower() for row in self.rows for text in (row.attention, row.optimizer) if text}
        used |= {value.lower() for row in self.rows for _, value in row.conditions}
        agreeing = {index: _agreement(row, configuration, run, used) for index, row in enumerate(self.rows)}
        best = max((score for score in agreeing.values() if score is not None), default=None)
        if best is None or (best == 0 and not configuration.mode and len(self.configurations()) != 1):
            return []
        return [row for index, row in enumerate(self.rows) if agreeing[index] == best]


def _of_mode(rows: list[Timing], mode: str | None, phase: str) -> Timing | None:
    """The one of a phase's rows that fits a mode, the same one before others."""
    fitting = [row for row in rows if _mode_fits(row.mode, mode, phase)]
    exact = [row for row in fitting if row.mode == mode] or fitting
    return exact[0] if len(exact) == 1 else None


def _agreement(row: Timing, configuration: Configuration, run: Run, used: Collection[str]) -> int | None:
    """How many conditions both sides know and agree on; ``None`` if they disagree in one.

    Words of no fixed vocabulary, ``eager`` or ``unfused``, are known where they are among the words ``used``.
    """
    pairs: list[tuple[object, object]] = [
        (row.model and row.model.dimensions, configuration.model and configuration.model.dimensions),
        (row.context_length, configuration.context_length),
        (row.batch_size, configuration.batch_size),
        (row.precision, configuration.precision),
        (row.compile, run.compile),
        (row.cuda_graph, run.cuda_graph),
        (row.device, run.device),
    ]
    words = (
        (row.attention, configuration.attention or run.attention),
        (row.optimizer, run.optimizer),
        *((value, getattr(run, word(header), None)) for header, value in row.conditions),
    )
    pairs += [(ours.lower(), str(theirs).lower()) for ours, theirs in words if ours and str(theirs).lower() in used]
    known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    agree = all(ours == theirs for ours, theirs in known)
    return len(known) if agree and _gpu_fits(row.gpu, run.gpu) else None


def _gpu_fits(one: str | None, other: str | None) -> bool:
    """Whether ``H100`` and ``NVIDIA H100 80GB HBM3`` can be one GPU: a name without a number fits any."""
    ours, theirs = (set(re.findall(r"[a-z]*\d+[a-z]*", (name or "").lower())) for name in (one, other))
    plain = [{part for part in parts if not part.endswith("gb") and "hbm" not in part} for parts in (ours, theirs)]
    return not all(plain) or bool(plain[0] & plain[1])


def _mode_fits(mode: str | None, wanted: str | None, phase: str) -> bool:
    if mode is None or wanted is None or mode == wanted:
        return True
    return {mode, wanted} == {"train", "forward+backward"} and phase in _TRAINING_PHASES

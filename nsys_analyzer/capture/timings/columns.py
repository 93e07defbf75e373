"""What the columns of a timings CSV mean: a table of headers, one of the words of time columns, two of values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Field, then the headers people give it; the first that a file has is used. Headers are compared in lower case,
# runs of anything but letters and digits as one underscore: "Context Length" is context_length.
FIELDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("capture", ("capture",)),
    ("model", ("model", "model_size", "size", "model_name")),
    ("d_model", ("d_model", "hidden_size")),
    ("d_ff", ("d_ff", "dff", "intermediate_size")),
    ("num_layers", ("num_layers", "n_layers", "layers")),
    ("num_heads", ("num_heads", "n_heads", "heads")),
    ("vocab_size", ("vocab_size",)),
    ("context_length", ("context_length", "context", "ctx", "ctx_len", "seq_len", "seq_length", "sequence_length")),
    ("batch_size", ("batch_size", "batch", "bs")),
    ("precision", ("precision", "dtype")),
    ("mixed_precision", ("mixed_precision", "use_mixed_precision", "mixed")),
    ("mode", ("mode",)),
    ("attention", ("attention",)),
    ("device", ("device",)),
    ("phase", ("phase", "pass")),
    ("only_forward", ("only_forward", "forward_only")),
    ("warmup_steps", ("warmup_steps", "warmup", "num_warmup", "n_warmup", "warm_up", "warmup_iters", "warm_up_steps")),
    ("steps", ("steps", "num_steps", "n_steps", "measure_steps", "measurement_steps", "num_benchmark", "iters")),
    ("peak_memory_bytes", ("peak_memory_bytes", "peak_bytes", "max_memory_bytes")),
    ("oom", ("oom", "is_oom", "out_of_memory")),
    ("status", ("status", "outcome")),
    ("message", ("message",)),
    ("time_stamp", ("time_stamp", "timestamp", "date", "datetime")),
)

# A header made of these words alone is a time: "mean_ms", "forward_mean_ms", "Backward std (s)", "avg_ms_per_step".
TIME_WORDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("phase", "forward", ("forward", "fwd")),
    ("phase", "backward", ("backward", "bwd")),
    ("phase", "optimizer", ("optimizer", "optim", "opt")),
    ("phase", "loss", ("loss",)),
    ("phase", "step", ("step",)),
    ("statistic", "mean", ("mean", "avg", "average")),
    ("statistic", "std", ("std", "stdev", "stddev")),
    ("statistic", "min", ("min",)),
    ("statistic", "max", ("max",)),
    ("statistic", "median", ("median", "p50")),
    ("unit", "ms", ("ms", "msec", "millisecond", "milliseconds")),
    ("unit", "s", ("s", "sec", "secs", "second", "seconds")),
    ("unit", "us", ("us", "usec", "microseconds")),
    ("word", "time", ("time", "latency", "duration", "runtime", "elapsed")),
    ("word", "pass", ("pass",)),
)
_WORD_OF = {word: (kind, value) for kind, value, words in TIME_WORDS for word in words}
# The phases that a header names, in its order, and the one phase they are; other combinations are no time.
_PHASE_OF: dict[tuple[str, ...], str | None] = {
    (): None,
    **{(value,): value for kind, value, _ in TIME_WORDS if kind == "phase"},
    ("optimizer", "step"): "optimizer",
    ("forward", "backward"): "forward+backward",
    ("forward", "backward", "optimizer"): "step",
}
_MS_PER_UNIT = {"ms": 1.0, "s": 1_000.0, "us": 0.001}

PHASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("forward", ("forward", "fwd", "forward_pass", "forward_only", "inference")),
    ("backward", ("backward", "bwd", "backward_pass")),
    ("optimizer", ("optimizer", "optimizer_step", "optim", "opt")),
    ("loss", ("loss",)),
    ("step", ("step", "full", "train", "training", "train_step", "training_step", "full_step", "fwd_bwd_opt")),
    ("forward+backward", ("forward_backward", "fwd_bwd", "both", "forward_and_backward")),
)

STATUSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ok", ("ok", "success", "succeeded", "passed", "done", "completed")),
    ("failed", ("failed", "fail", "failure", "error", "crashed")),
    ("timeout", ("timeout", "timed_out")),
)

_OOM = re.compile(r"\boom\b|out[\s_-]*of[\s_-]*memory", re.IGNORECASE)


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _named(table: tuple[tuple[str, tuple[str, ...]], ...], text: str) -> str | None:
    return next((name for name, words in table if _word(text) in words), None)


def phase_from_text(text: str) -> str | None:
    """``forward``, ``backward``, ``optimizer``, ``loss``, ``step`` or ``forward+backward``; ``None`` for others."""
    return _named(PHASES, text)


def status_from_text(text: str) -> str | None:
    """``ok``, ``oom``, ``failed`` or ``timeout`` from a status's usual words; ``None`` for others."""
    return "oom" if _OOM.search(text) else _named(STATUSES, text)


@dataclass(frozen=True)
class TimeColumn:
    """A column of times: ``phase`` is ``None`` where the row says it, ``unit`` where the header does not."""

    index: int
    header: str
    phase: str | None
    statistic: str
    unit: str | None

    @property
    def ms_per_unit(self) -> float:
        """Milliseconds in one of the column's units; seconds where the header has none."""
        return _MS_PER_UNIT[self.unit or "s"]


@dataclass(frozen=True)
class Columns:
    """A file's header, understood: the cell index of each field, and the columns of times."""

    headers: tuple[str, ...]
    fields: dict[str, int]
    times: tuple[TimeColumn, ...]
    notes: tuple[str, ...]

    def phases(self) -> tuple[str | None, ...]:
        """The phases with a mean or median column, in order; ``None`` stands for "the row says it"."""
        return tuple(dict.fromkeys(time.phase for time in self.times if time.statistic in ("mean", "median")))

    def time(self, phase: str | None, statistic: str) -> TimeColumn | None:
        """The column of this phase and statistic."""
        return next((time for time in self.times if (time.phase, time.statistic) == (phase, statistic)), None)


def understand(headers: tuple[str, ...]) -> Columns:
    """What each header means; one that means nothing here is left out."""
    words = [_word(header) for header in headers]
    places = {field: [words.index(name) for name in names if name in words] for field, names in FIELDS}
    fields = {field: indices[0] for field, indices in places.items() if indices}
    found = [time for index, header in enumerate(headers) if (time := _time_column(index, header))]
    # Of two columns for one figure the one that states its unit is used, then the first.
    found.sort(key=lambda time: (time.unit is None, time.index))
    times: dict[tuple[str | None, str], TimeColumn] = {}
    for time in found:
        times.setdefault((time.phase, time.statistic), time)
    ordered = tuple(sorted(times.values(), key=lambda time: time.index))
    return Columns(headers, fields, ordered, tuple(_column_notes(found, ordered)))


def _column_notes(found: list[TimeColumn], used: tuple[TimeColumn, ...]) -> Iterator[str]:
    unitless = [time.header for time in used if time.unit is None]
    if unitless:
        yield f"{', '.join(unitless)}: no unit in the column's name, read as seconds"
    unused = [time.header for time in found if time not in used]
    if unused:
        yield f"{', '.join(unused)}: not used, another column gives the same figure"


def _time_column(index: int, header: str) -> TimeColumn | None:
    words = re.sub(r"_per_(step|iter|iteration)(?=_|$)", "", _word(header)).split("_")
    said: dict[str, list[str]] = {"phase": [], "statistic": [], "unit": [], "word": []}
    for word in words:
        kind, value = _WORD_OF.get(word, (None, word))
        if kind is None:
            return None
        said[kind].append(value)
    phases = tuple(said["phase"])
    if phases not in _PHASE_OF or len(said["statistic"]) > 1 or len(said["unit"]) > 1 or not _is_time(said, words):
        return None
    statistic = said["statistic"][0] if said["statistic"] else "mean"
    unit = said["unit"][0] if said["unit"] else None
    return TimeColumn(index, header.strip(), _PHASE_OF[phases], statistic, unit)


def _is_time(said: dict[str, list[str]], words: list[str]) -> bool:
    """Whether the words say "time": ``loss_mean`` and ``max_step`` do not, ``loss_ms`` and ``forward_mean`` do."""
    if words == ["s"]:
        return False
    ordinary = bool({"loss", "step"} & set(said["phase"]))
    return bool(said["unit"] or "time" in said["word"] or (said["statistic"] and not ordinary))

"""Times of runs without a profiler: from tables that benchmark scripts write, and from the manifests of a sweep.

Tables are CSV. A sweep writes one of its own for people, ``timings.csv``.
"""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import structs

from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.analysis.transformer.models import Configuration, mode_from_text, precision_from_text
from nsys_analyzer.configuration import DIMENSIONS, OPTIONS, Run
from nsys_analyzer.errors import ConfigurationError, TimingsError
from nsys_analyzer.runs.manifest import MANIFEST, TIMINGS, configuration_of, name_by_manifest, run_from
from nsys_analyzer.runs.rows import Times
from nsys_analyzer.runs.targets import PHASES
from nsys_analyzer.system.atomic_write import write_text
from nsys_analyzer.system.strict_json import LARGEST, decode_json

if TYPE_CHECKING:
    import pandas as pd

#: The table that a sweep writes, its file and its columns; times in milliseconds over the measured steps.
NAME = TIMINGS
_STEPS = ("warmup_steps", "steps")
_DESCRIBED = ("model", *DIMENSIONS, *(name for name, one in OPTIONS.items() if one.in_run and name not in _STEPS))
WRITTEN = (
    "capture", *_DESCRIBED, "rank", "phase", *_STEPS, "mean_ms", "std_ms", "min_ms", "median_ms", "max_ms",
    "peak_memory_bytes", "status", "message",
)  # fmt: skip
#: What scripts call each column, in any case and with any punctuation. Any other column is a condition of the run, but
#: for one of results: its name has a unit, or its cells are decimals.
COLUMNS = {
    "capture": "capture",
    "phase": "phase pass pass_type stage",
    "mode": "mode run_mode benchmark_mode",
    "rank": "rank",
    "model": "model model_size model_name size config model_config preset",
    "d_model": "d_model hidden_size hidden_dim n_embd",
    "d_ff": "d_ff dff intermediate_size",
    "num_layers": "num_layers n_layers n_layer layers",
    "num_heads": "num_heads n_heads n_head heads",
    "vocab_size": "vocab_size",
    "context_length": "context_length context context_len ctx ctx_len seq_len seq_length sequence_length seq sequence",
    "batch_size": "batch_size batch bs",
    "precision": "precision dtype torch_dtype data_type",
    "attention": "attention attn attention_impl attn_impl attention_type attn_implementation",
    "compile": "compile compiled torch_compile use_compile is_compiled",
    "cuda_graph": "cuda_graph cuda_graphs cudagraph cudagraphs use_cuda_graph",
    "optimizer": "optimizer optim optimizer_name",
    "device": "device device_type",
    "gpu": "gpu gpu_name gpu_type device_name",
    "warmup_steps": "warmup_steps warmup warm_up num_warmup num_warmup_steps n_warmup warmup_iters",
    "steps": "steps n num_steps n_steps measure_steps num_measure_steps timed_steps iters num_iters num_trials",
    "status": "status outcome",
    "message": "message error",
    "peak_memory_bytes": "peak_memory_bytes peak_bytes max_memory_bytes peak_allocated_bytes",
    # Rows that differ in these alone are repeats of one run.
    "repeat": "index unnamed_0 i iter iteration iteration_idx step step_idx trial run run_id repeat rep sample round "
    "seed timestamp time_stamp date datetime host hostname",
}
#: The words that the name of a column of times is made of: `forward_mean_ms`, `Backward (s)`, `avg_ms`, `p50_us`.
TIME_WORDS: dict[tuple[str, Any], str] = {
    ("phase", "forward"): "forward fwd fw inference",
    ("phase", "backward"): "backward bwd bw",
    ("phase", "optimizer"): "optimizer optim opt",
    ("phase", "loss"): "loss",
    ("phase", "step"): "step train training full",
    ("phase", "forward+backward"): "fwdbwd fwbw both",
    ("statistic", "mean"): "mean avg average",
    ("statistic", "std"): "std stdev stddev sd dev deviation",
    ("statistic", "min"): "min minimum",
    ("statistic", "median"): "median med p50",
    ("statistic", "max"): "max maximum",
    ("unit", 1e-6): "ns nanoseconds",
    ("unit", 1e-3): "us usec microseconds µs μs",
    ("unit", 1.0): "ms msec millisecond milliseconds",
    ("unit", 1e3): "s sec secs second seconds",
    ("time", ""): "time latency duration runtime elapsed",
    ("other", ""): "pass only and",
}
_FIELD_OF = {word: field for field, words in COLUMNS.items() for word in words.split()}
_MEANING_OF = {word: meaning for meaning, words in TIME_WORDS.items() for word in words.split()}
#: The phase that several words name: `optimizer step`, `fwd_bwd`, `forward_backward_optim`.
_TOGETHER = {"optimizer step": "optimizer", "backward forward": "forward+backward", "backward forward step": "step",
             "backward forward optimizer": "step", "backward forward optimizer step": "step"}  # fmt: skip
_STATUSES = {"ok": "ok success succeeded passed done completed", "timeout": "timeout timed_out",
             "failed": "failed fail failure error crashed"}  # fmt: skip
_TRUE, _FALSE = ("true", "yes", "1", "compiled", "compile"), ("false", "no", "0", "eager", "vanilla")
_STATISTICS = ("mean", "std", "min", "median", "max")
#: Columns that tell no two runs apart.
_OF_A_ROW = {"capture", "phase", "status", "message", "steps", "peak_memory_bytes", "repeat", "place"}
_MISSING = ("", "-", "--", "–", "—", "nan", "none", "null", "na", "n/a", "<na>")
_OOM = re.compile(r"\boom\b|out[\s_-]*of[\s_-]*memory", re.IGNORECASE)
_SHORTEST_MS, _LONGEST_MS = 1e-9, 365 * 86_400e3
_NEEDED = "It needs phase and mean_ms (a row for each phase), or forward_ms, step_ms (a column for each)"


@dataclass(frozen=True)
class Timing:
    """One phase of a run without a profiler.

    Attributes:
        times: None where it was not timed.
        place: the file and the line.
        status: ``ok``, ``oom``, ``failed``, ``timeout``, ``missing`` (neither time nor reason), or a word of the file.
        run, configuration: what the row says of the run, its ``capture`` among it.
        cells: all columns that tell one run from another, with the row's texts.
    """

    phase: str
    times: Stats | None
    place: str
    status: str = "ok"
    run: Run = field(default_factory=Run)
    configuration: Configuration = field(default_factory=Configuration)
    cells: tuple[tuple[str, str], ...] = ()

    @property
    def model(self) -> str | None:
        """Returns the name of its model, which may be no known one."""
        return self.configuration.model.name if self.configuration.model else self.run.model


@dataclass(frozen=True)
class Timings:
    """Timings of one or several files (``source``), one for each run and phase; ``notes`` say what was assumed.

    ``of_captures`` says that those which fit no capture are none that was asked for.
    """

    source: str
    rows: tuple[Timing, ...]
    notes: tuple[str, ...] = ()
    of_captures: bool = False


def read_timings(*paths: Path) -> Timings:
    """Reads tables with a row for each phase, or a column for each; ``COLUMNS`` and ``TIME_WORDS`` name the columns.

    Rows of one run and phase are repeats of it, and pooled.

    Raises:
        TimingsError: a file that is no such table, a value that is no number or impossible.
    """
    import pandas as pd

    files = {path: _read_file(path) for path in paths}
    notes = [note if len(files) == 1 else f"{path.name}: {note}" for path, (_, own) in files.items() for note in own]
    rows = pd.concat([rows for rows, _ in files.values()])
    conditions = [name for name in map(str, rows) if name not in _OF_A_ROW and rows[name].dtype != float]
    rows[conditions] = rows[conditions].fillna("")
    key = ["capture", "phase", *conditions]
    if rows.empty:
        raise TimingsError(f"{', '.join(map(str, paths))}: no row has a phase", _NEEDED)

    rows["mean_ms"] = mean = rows["mean_ms"].fillna(rows["median_ms"])
    runs = rows.groupby(key, sort=False).first()
    n = rows["steps"].mask(rows["std_ms"].isna(), 1).where(mean > 0)  # a row with a deviation is of several steps
    rows = rows.assign(min_ms=rows["min_ms"].fillna(mean), max_ms=rows["max_ms"].fillna(mean), steps=n)
    repeats = rows.groupby(key, sort=False)
    count = repeats["place"].count()
    for name, of, how in (
        ("std_ms", "mean_ms", "std"), ("median_ms", "mean_ms", "median"), ("min_ms", "min_ms", "min"),
        ("max_ms", "max_ms", "max"), ("steps", "steps", "sum"), ("mean_ms", "mean_ms", "mean"),
        ("peak_memory_bytes", "peak_memory_bytes", "max"),
    ):  # fmt: skip
        runs[name] = runs[name].where(count == 1, repeats[of].agg(how))
    runs.loc[runs["mean_ms"].notna(), "status"] = "ok"
    for size, number in count[count > 1].value_counts(sort=False).items():
        notes.append(f"{number} timings are each the mean of {size} rows")

    timings = []
    for row in runs.reset_index().to_dict("records"):
        known: dict[Any, Any] = {name: value for name, value in row.items() if value == value and value != ""}  # NaN
        cells = tuple((name, known[name]) for name in conditions if name in known)
        try:
            run, configuration = _described(cells)
        except msgspec.ValidationError as error:
            name = str(error).rpartition("$.")[2].rstrip("`")
            said = f"{row['place']}, column {name!r}: {known.get(name)!r} is not what it holds"
            raise TimingsError(said, "Correct the value or leave the cell empty") from error
        except ConfigurationError as error:
            raise TimingsError(f"{row['place']}: {error.message}", error.hint) from error
        steps, memory = (int(known[name]) if name in known else None for name in ("steps", "peak_memory_bytes"))
        times = Stats(steps, *(known.get(f"{name}_ms") for name in _STATISTICS)) if "mean_ms" in known else None
        run = replace(run, capture=known.get("capture"), message=known.get("message"), peak_memory_bytes=memory)
        timings.append(Timing(known["phase"], times, known["place"], known["status"], run, configuration, cells))
    return Timings(", ".join(path.name for path in paths), tuple(timings), tuple(notes))


@lru_cache(4_096)
def _described(cells: tuple[tuple[str, str], ...]) -> tuple[Run, Configuration]:
    """Returns what the cells of a row say of its run; a model of no known name is one without dimensions."""
    known: dict[str, Any] = {name: text for name, text in cells if name in COLUMNS}
    # A column such as bfloat16 is a switch: what is in none of these types is in fp32.
    switches = {precision_from_text(name): text.lower() for name, text in cells if text.lower() in (*_TRUE, *_FALSE)}
    switches = {name: word for name, word in switches.items() if name in ("tf32", "bf16", "fp16")}
    if switches:
        on = (name for name, word in switches.items() if word in _TRUE)
        known.setdefault("precision", next(on, "fp32"))
    for name in ("compile", "cuda_graph"):
        word = known.pop(name, "").lower()
        known |= {name: word in _TRUE} if word in (*_TRUE, *_FALSE) else {}
    device = known.pop("device", "")
    kind = device.lower().split(":")[0]  # cuda:0; some write the GPU's name there
    known |= {"device": kind} if kind in ("cuda", "cpu", "mps") else {"gpu": known.get("gpu", device)} if device else {}
    run = msgspec.convert(known, Run, strict=False)
    try:
        configuration = configuration_of(run)
    except ConfigurationError:
        if all((run.d_model, run.d_ff, run.num_layers, run.num_heads)):
            raise
        configuration = configuration_of(replace(run, model=None))
    return run, structs.replace(configuration, source="timings")


def _read_file(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Returns the rows of a file, one for each phase, its times in ms; and the notes on it."""
    import pandas as pd

    table = _table(path)
    names = {header: _FIELD_OF.get(_word(header) or "index", header) for header in map(str, table)}

    times: dict[tuple[str, str], tuple[str, float | None]] = {}
    for header in list(names):
        if column := _time_column(header):
            del names[header]
            phase, statistic, unit = column
            if (phase, statistic) not in times or (unit and not times[phase, statistic][1]):
                times[phase, statistic] = header, unit
    wide, measured = any(phase for phase, _ in times), table
    table = table[list(names)].rename(columns=names).loc[:, lambda frame: ~frame.columns.duplicated()]
    if "phase" not in table and not wide:  # what was run is what was timed
        table = table.rename(columns={"mode": "phase"})
    phases = dict.fromkeys(phase for phase, name in times if name in ("mean", "median") and (phase or "phase" in table))
    if not phases:
        known = [*(header for header, _ in times.values()), *(name for name in map(str, table) if name in COLUMNS)]
        rest = [name for name in map(str, table) if name not in COLUMNS]
        raise TimingsError(f"{path}: no times of a phase; understood: {_listed(known)}; not: {_listed(rest)}", _NEEDED)
    unitless = [header for header, unit in times.values() if unit is None]
    notes = [f"{', '.join(unitless)}: no unit in the column's name, read as seconds"] if unitless else []

    others = [name for name in map(str, table) if name not in COLUMNS]
    table = table.drop(columns=[name for name in others if _is_result(name, table[name].unique())])
    table = table.assign(place=[f"{path.name}, {table.index.name} {number}" for number in table.index])
    none = pd.Series("", table.index)
    table = table.assign(**{name: table.get(name, none) for name in ("capture", "status", "message")})
    for name in ("steps", "peak_memory_bytes"):
        count = pd.to_numeric(table.get(name, none), errors="coerce")
        table[name] = count.where(count.between(0, LARGEST)).astype(float)
    ended = _each(path, table["status"], lambda text: _status(text) or text.lower())
    ended = ended.mask(ended == "", _each(path, table["message"], lambda text: text and (_status(text) or "failed")))
    failed = ended.isin(["oom", "failed", "timeout"])
    rows = []
    for phase in phases:
        own = table.assign(phase=phase or _each(path, table["phase"], lambda text: _phase_of(text) or text.lower()))
        own["status"] = ended.mask(ended.isin(["", "ok"]), "missing")
        for name in _STATISTICS:
            header, unit = times.get((phase, name), ("", None))
            cells = measured[header].reindex(table.index) if header else none
            cells = cells if phase else cells.mask(failed, "")  # of several times, those before the failure stand there
            found = _each(path, cells, partial(_time, unit or 1e3, 0.0 if name == "std" else _SHORTEST_MS))
            is_status = found.map(lambda cell: isinstance(cell, str))
            own["status"] = own["status"].mask(is_status, found)
            own[f"{name}_ms"] = found.mask(is_status).astype(float)
        own["status"] = own["status"].mask(own["mean_ms"].notna() | own["median_ms"].notna(), "ok")
        rows.append(own[own["phase"] != ""])
    if without := len(table) - max(map(len, rows)):
        notes.append(f"{without} rows without a phase are left out")
    return pd.concat(rows).sort_index(kind="stable"), notes


def _table(path: Path) -> pd.DataFrame:
    """Returns the texts of a file by its headers, "" for what is missing; the index is the line.

    Raises:
        TimingsError: no such file, no table, or no row.
    """
    import pandas as pd

    if path.is_char_device() or (path.is_fifo() and not path.is_relative_to("/dev")):  # where <(...) has a writer
        raise TimingsError(f"{path}: is a pipe or a device", "Give the path of a CSV file")
    try:
        text = path.read_bytes().decode("utf-8-sig").lstrip("\r\n")
        frame = pd.read_csv(
            io.StringIO(text), sep=max(",;\t", key=text.partition("\n")[0].count), header=None, dtype=str,
            keep_default_na=False, skipinitialspace=True, skip_blank_lines=False,
        ).fillna("")  # fmt: skip
        frame = frame.set_axis(frame.iloc[0].str.strip(), axis=1).iloc[1:].rename_axis("line")
        frame.index += 1
        frame = frame.loc[:, ~frame.columns.duplicated()]
        frame = frame.apply(lambda column: column.str.strip().str.replace(r"^(\d+)\.0+$", r"\1", regex=True))
        frame = frame.mask(frame.apply(lambda column: column.str.lower().isin(_MISSING)), "")
        frame = pd.DataFrame(frame[(frame != "").any(axis=1)])
    except OSError as error:
        raise TimingsError(f"{path}: cannot be read ({error.strerror})", "Give the path of a CSV file") from error
    except ValueError as error:  # pandas' errors among them
        raise TimingsError(f"{path}: no CSV ({textwrap.shorten(str(error), 200)})", _NEEDED) from error
    if frame.empty:
        raise TimingsError(f"{path}: no rows", _NEEDED)
    return frame


def _time_column(header: str) -> tuple[Any, Any, Any] | None:
    """Returns the phase ("" where the row says it), statistic and unit in ms of a column of times; None for others."""
    meanings = _meanings(re.sub(r"(?:[\s_]per[\s_]|/)(?:step|iteration|iter)(?![a-z])", " ", header.lower()))
    if meanings is None or header.lower() == "s":
        return None
    (phase,), statistic, unit = meanings.get("phase", [""]), meanings.get("statistic", []), meanings.get("unit", [])
    # `loss_mean` is a loss, `max_step` a number.
    is_time = unit or "time" in meanings or (statistic and phase not in ("loss", "step"))
    is_one = len(statistic) < 2 and len(unit) < 2
    return (phase, (statistic or ["mean"])[0], (unit or [None])[0]) if is_time and is_one else None


def _phase_of(text: str) -> str:
    """Returns one of our phases, as other words spell it; empty for others."""
    meanings = _meanings(text) or {}
    return str(meanings["phase"][0]) if "phase" in meanings and meanings.keys() <= {"phase", "other"} else ""


def _meanings(text: str) -> dict[str, list[Any]] | None:
    """Returns what each word means, and the one phase that they name; None where one has no meaning here."""
    found: dict[str, list[Any]] = {}
    for kind, value in dict.fromkeys(_MEANING_OF.get(word, ("", "")) for word in _word(text).split("_")):
        found.setdefault(kind, []).append(value)
    phases = found.get("phase", [])
    if len(phases) > 1:
        found["phase"] = [_TOGETHER.get(" ".join(sorted(phases)))]
    return None if "" in found or found.get("phase") == [None] else found


def _is_result(name: str, texts: Iterable[str]) -> bool:
    """Returns whether a column without a meaning here tells no runs apart: one of results."""
    numbers = [text for text in texts if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text.lower())]
    has_unit = any(_MEANING_OF.get(word, ("",))[0] == "unit" for word in _word(name).split("_"))
    return has_unit or any("." in text for text in numbers)


def _status(text: str) -> str:
    """Returns ``ok``, ``oom``, ``failed`` or ``timeout``, as other words spell it; empty for others."""
    if _OOM.search(text):
        return "oom"
    return next((name for name, words in _STATUSES.items() if _word(text) in words.split()), "")


def _each(path: Path, column: pd.Series[Any], read: Callable[[str], Any]) -> pd.Series[Any]:
    """Returns the column with what ``read`` makes of its texts; a TimingsError where it makes nothing of one."""
    values = {}
    for text in column.unique():
        try:
            values[text] = read(text)
        except ValueError as error:
            place = f"{path}, {column.index.name} {column.index[column == text][0]}, column {column.name!r}"
            hint = "Write a plain number, or OOM, or leave the cell empty"
            raise TimingsError(f"{place}: {error}", hint) from error
    return column.map(values)


def _time(unit: float, least_ms: float, text: str) -> float | str:
    """Returns the time in a cell in ms, NaN for none; or the status in its place."""
    try:
        ms = float(text or "nan") * unit
    except ValueError:
        ms = math.inf
    if least_ms <= ms <= _LONGEST_MS or not text:
        return ms
    if status := _status(text):
        return status
    raise ValueError(f"{text[:30]!r} is not a number, or no possible time")


def _listed(names: Iterable[str]) -> str:
    return textwrap.shorten(", ".join(names), 300, placeholder=" …") or "none"


@lru_cache(4_096)
def _word(text: str) -> str:
    return re.sub(r"[\W_]+", "_", text.lower()).strip("_")


# --- of a sweep


class _Timed(msgspec.Struct):
    """What a manifest keeps of a run without a profiler: how it ended, and the times of each phase's steps in ms."""

    status: str
    times_ms: dict[str, Annotated[list[float], msgspec.Meta(min_length=1)]]
    message: str | None = None


def timings_of_sweep(folder: Path) -> Timings:
    """Returns the times in the manifests of a sweep's folder, to the nanosecond.

    A configuration that ran out of memory, failed or timed out has its phases with that status and no times. Of one
    capture of several ranks those of each are there.

    Raises:
        ConfigurationError: the times of a manifest are none of a sweep's.
    """
    return Timings(NAME, tuple(row for path in sorted(folder.glob(f"[!.]*/*{MANIFEST}")) for row in of_manifest(path)))


def of_manifest(path: Path) -> Iterator[Timing]:
    """Yields the times of a manifest; none where the file is somebody else's: others call theirs so, too."""
    try:
        values = decode_json(path.read_bytes())
    except ValueError:
        return
    if not isinstance(values, dict):
        return
    of_ranks = values.get("rank_timings") if values.get("capture") else None
    for rank, kept in enumerate(of_ranks) if of_ranks else ((None, values.get("timings")),):
        if not kept:  # a program may time nothing
            continue
        try:
            timed = msgspec.convert(kept, _Timed)
        except msgspec.ValidationError as error:
            problem = f"{path.parent.name}/{path.name}: its timings are none of a sweep's ({error})"
            raise ConfigurationError(problem, "Move the folder away, or run the configuration again") from error
        manifest = run_from(values, path)
        described = {name: getattr(manifest, name) for name in (*_DESCRIBED, *_STEPS)}
        message = " ".join((timed.message or "").split()) or None
        run = Run(**described, rank=rank, capture=name_by_manifest(path), message=message)
        # A number of steps tells no two runs apart.
        told = ((name, getattr(run, name)) for name in (*_DESCRIBED, "rank", "warmup_steps"))
        cells = tuple((name, str(value)) for name, value in told if value is not None)
        configuration = structs.replace(configuration_of(run), source="timings")
        for phase in timed.times_ms or PHASES.get(mode_from_text(manifest.mode or ""), ()):
            times = None
            if timed.status == "ok":
                spread = Times.of(timed.times_ms[phase])
                ms = (spread.ms, spread.std_ms, spread.min_ms, spread.median_ms, spread.max_ms)
                times = Stats(run.steps, *(None if value is None else round(value, 6) for value in ms))
                run = replace(run, peak_memory_bytes=manifest.peak_memory_bytes)
            yield Timing(phase, times, path.parent.name, timed.status, run, configuration, cells)


def write_timings(folder: Path) -> Path:
    """Writes the times of a sweep's folder as ``timings.csv``, whole or not at all, and returns its path."""
    text = io.StringIO()
    writer = csv.DictWriter(text, WRITTEN, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in timings_of_sweep(folder).rows:
        times = vars(row.times) if row.times else {}
        figures = {f"{name}_ms": f"{times[name]:.6f}" for name in _STATISTICS if times.get(name) is not None}
        writer.writerow({**vars(row.run), "phase": row.phase, **figures, "status": row.status})
    write_text(folder / NAME, text.getvalue())
    return folder / NAME


def is_from_a_sweep(path: Path) -> bool:
    """Tells whether a file of timings was written here, and may be written anew."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(",".join(WRITTEN[:2]))

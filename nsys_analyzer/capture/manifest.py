"""The manifest a capture leaves beside its trace: what was run, how, and how it ended."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from nsys_analyzer.analysis.models import Configuration, mode_from_text, precision_from_text, resolve_model
from nsys_analyzer.capture.placement import TRACE_SUFFIXES, trace_stem
from nsys_analyzer.errors import ConfigurationError, NsysAnalyzerError
from nsys_analyzer.strict_json import LARGEST, decoded

SCHEMA_VERSION = 1
STATUSES = ("ok", "oom", "failed", "timeout")

#: The least a number may be, where that is not 1; a seed may be any.
_LEAST = {"rank": 0, "warmup_steps": 0, "steps": 0, "peak_memory_bytes": 0, "seed": None}
_KINDS = {int: "a whole number", bool: "true or false", str: "text"}
_NAME = "manifest.json"
_SUFFIX = ".manifest.json"
_REMEDY = "Correct it, or remove it and give --model, --context-length and --batch-size"


class ManifestError(NsysAnalyzerError):
    """A manifest that cannot be read."""


@dataclass(frozen=True)
class Manifest:
    """One capture's manifest: flat JSON of these keys, each optional; ``None`` is unknown.

    ``context_length`` is in tokens, ``batch_size`` in sequences; ``status`` is one of ``STATUSES`` and
    ``message`` says why where it is not ``ok``; ``capture`` is the file name of the trace it belongs to.
    ``device`` is ``cuda`` or ``cpu``; ``profiler`` is ``nsys``, ``torch`` or ``none``, which leaves no trace;
    ``python``, ``torch``, ``cuda``, ``driver`` and ``nsys`` are versions, ``host_cpu`` is the CPU's model.
    ``command`` runs the target alone, ``profile_command`` the target under its profiler, and ``run`` is the
    ``nsys-analyze run`` that did both; ``rank`` is that of the capture's process among all of the run.
    """

    path: Path
    schema_version: int = SCHEMA_VERSION
    model: str | None = None
    d_model: int | None = None
    d_ff: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    vocab_size: int | None = None
    context_length: int | None = None
    batch_size: int | None = None
    precision: str | None = None
    mode: str | None = None
    attention: str | None = None
    status: str = "ok"
    message: str | None = None
    warmup_steps: int | None = None
    steps: int | None = None
    gpu: str | None = None
    command: str | None = None
    profile_command: str | None = None
    run: str | None = None
    capture: str | None = None
    device: str | None = None
    profiler: str | None = None
    optimizer: str | None = None
    compile: bool | None = None
    cuda_graph: bool | None = None
    seed: int | None = None
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    nsys: str | None = None
    host_cpu: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    peak_memory_bytes: int | None = None
    rank: int | None = None

    def configuration(self) -> Configuration:
        """The configuration it describes; dimensions, where all four are there, decide the model.

        Raises:
            ConfigurationError: an unknown model without dimensions, or impossible dimensions.
        """
        d_model, d_ff, layers, heads = self.d_model, self.d_ff, self.num_layers, self.num_heads
        complete = d_model is not None and d_ff is not None and layers is not None and heads is not None
        dimensions = (d_model or 0, d_ff or 0, layers or 0, heads or 0) if complete else None
        return Configuration(
            model=resolve_model(self.model, dimensions, self.vocab_size),
            context_length=self.context_length,
            batch_size=self.batch_size,
            precision=precision_from_text(self.precision) if self.precision else None,
            mode=mode_from_text(self.mode) if self.mode else None,
            attention=self.attention,
            source="manifest",
        )


def read_manifest(path: Path) -> Manifest:
    """The manifest in this file; keys it does not know are ignored.

    Raises:
        ManifestError: no such file, not a JSON object, a value of the wrong type, an unknown status, model or
            schema version.
    """
    values = _read_object(path)
    types_by_key = get_type_hints(Manifest)
    known = {one.name: types_by_key[one.name] for one in fields(Manifest) if one.name != "path"}
    given = {key: values[key] for key in known if values.get(key) is not None}
    for key, value in given.items():
        _check_type(path, key, value, known[key])
    manifest = Manifest(path=path, **given)
    _check_values(manifest)
    return manifest


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = decoded(path.read_bytes())
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read ({error.strerror})", "Check the path") from error
    except ValueError as error:
        raise ManifestError(f"{path}: not JSON ({error})", _REMEDY) from error
    if not isinstance(values, dict):
        raise ManifestError(f"{path}: holds a JSON {type(values).__name__}, not an object", _REMEDY)
    return values


def _check_type(path: Path, key: str, value: object, declared: object) -> None:
    allowed = get_args(declared) if isinstance(declared, types.UnionType) else (declared,)
    if type(value) not in allowed:
        kind = next(kind for one, kind in _KINDS.items() if one in allowed)
        raise ManifestError(f"{path}: {key!r} is {value!r} where {kind} is due", _REMEDY)
    least = _LEAST.get(key, 1)
    if type(value) is int and ((least is not None and value < least) or abs(value) > LARGEST):
        raise ManifestError(f"{path}: {key!r} is {value}, which is impossible", _REMEDY)


def _check_values(manifest: Manifest) -> None:
    path = manifest.path
    if manifest.schema_version > SCHEMA_VERSION:
        problem = f"{path}: schema version {manifest.schema_version}, this release reads {SCHEMA_VERSION}"
        raise ManifestError(problem, "Upgrade: pip install --upgrade nsys-analyze")
    if manifest.status not in STATUSES:
        raise ManifestError(f"{path}: unknown status {manifest.status!r}", f"Use one of {', '.join(STATUSES)}")
    try:
        manifest.configuration()
    except ConfigurationError as error:
        hint = f"{error.hint}; or give d_model, d_ff, num_layers and num_heads"
        raise ManifestError(f"{path}: {error.message}", hint) from error


def find_manifest(trace: Path) -> Manifest | None:
    """The manifest that belongs to this trace; ``None`` where there is none.

    ``<stem>.manifest.json`` beside the trace comes first. Then ``manifest.json`` of its folder, which belongs
    to the trace its ``capture`` names, or to the folder's only trace. A trace and its export, ``a.nsys-rep``
    and ``a.sqlite``, are one trace.

    Raises:
        ManifestError: the manifest is malformed.
    """
    stem = trace_stem(trace)
    own = trace.parent / f"{stem}{_SUFFIX}"
    if own.is_file():
        return read_manifest(own)
    shared = trace.parent / _NAME
    if not shared.is_file():
        return None
    manifest = read_manifest(shared)
    named = manifest.capture is not None and trace_stem(Path(manifest.capture)) == stem
    return manifest if named or _trace_stems(trace.parent) <= {stem} else None


@dataclass(frozen=True)
class Traceless:
    """The manifests of runs that left no trace, and why others beside no trace cannot be read, by their paths."""

    manifests: tuple[Manifest, ...] = ()
    refused: Mapping[Path, ManifestError] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.manifests or self.refused)


def manifests_without_trace(folder: Path) -> Traceless:
    """The manifests, in the folder and one level of subfolders, of runs that left no trace, such as OOM.

    In order of folder and file name. A folder that does not exist, or that cannot be read, holds none; a
    ``manifest.json`` without a status is somebody else's.
    """
    if not folder.is_dir():
        return Traceless()
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    manifests, refused = [], {}
    for path in (path for place in (folder, *subfolders) for path in _manifests_in(place)):
        try:
            manifest = read_manifest(path)
        except ManifestError as error:
            if not _trace_stems(path.parent):  # else its trace's row says it
                refused[path] = error
        else:
            if not _has_trace(manifest):
                manifests.append(manifest)
    return Traceless(tuple(manifests), refused)


def _manifests_in(folder: Path) -> list[Path]:
    """The manifests of a folder, none where it cannot be read."""
    try:
        found = sorted(path for path in folder.iterdir() if path.name.endswith(_NAME) and not path.is_fifo())
    except OSError:  # its captures' row says it
        return []
    named = [path for path in found if path.name == _NAME or path.name.endswith(_SUFFIX)]
    return [path for path in named if path.name != _NAME or _tells_a_status(path)]


def _tells_a_status(path: Path) -> bool:
    """Whether a ``manifest.json`` is a run's: web applications and model checkpoints have such a file too."""
    try:
        values = decoded(path.read_bytes())
    except (OSError, ValueError):
        return True  # reading it says what is wrong
    return isinstance(values, dict) and "status" in values


def _has_trace(manifest: Manifest) -> bool:
    folder = manifest.path.parent
    stems = _trace_stems(folder)
    if manifest.path.name != _NAME:
        stem = manifest.path.name.removesuffix(_SUFFIX)
        return stem in stems or (folder / f"{stem}.json").is_file()
    if manifest.capture is None or len(stems) == 1:
        return bool(stems)
    return trace_stem(Path(manifest.capture)) in stems or (folder / Path(manifest.capture).name).is_file()


def _trace_stems(folder: Path) -> set[str]:
    return {trace_stem(path) for path in folder.iterdir() if path.name.endswith(TRACE_SUFFIXES)}

"""Reads the manifest beside a trace, which contains the program, its options, and how the run ended."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from nsys_analyzer.analysis.transformer.models import Configuration, mode_from_text, precision_from_text, resolve_model
from nsys_analyzer.configuration import SCHEMA_VERSION, Run
from nsys_analyzer.errors import ConfigurationError, NsysAnalyzerError
from nsys_analyzer.system.strict_json import decode_json
from nsys_analyzer.trace.sources import is_capture, trace_stem

MANIFEST = "manifest.json"
#: The table of unprofiled times that a sweep writes.
TIMINGS = "timings.csv"
_SUFFIX = ".manifest.json"
#: Matches the stems of capture files that are named after their folder.
_NAME_FROM_FOLDER = re.compile(r"capture((?:_rank\d+)?)")
_HOW_TO_CORRECT = "Correct it, or remove it and give --model, --context-length and --batch-size"


class ManifestError(NsysAnalyzerError):
    """The error that a manifest cannot be read."""


def configuration_of(run: Run) -> Configuration:
    """Returns the configuration in a manifest. If the manifest has all four dimensions, they determine the model.

    Raises:
        ConfigurationError: an unknown model without dimensions, or impossible dimensions.
    """
    d_model, d_ff, layers, heads = run.d_model, run.d_ff, run.num_layers, run.num_heads
    dimensions = (d_model, d_ff, layers, heads) if d_model and d_ff and layers and heads else None
    return Configuration(
        model=resolve_model(run.model, dimensions, run.vocab_size),
        context_length=run.context_length,
        batch_size=run.batch_size,
        precision=precision_from_text(run.precision) if run.precision else None,
        mode=mode_from_text(run.mode) if run.mode else None,
        attention=run.attention,
        source="manifest",
    )


def read_manifest(path: Path) -> Run:
    """Reads a manifest file. Unknown keys are ignored.

    Raises:
        ManifestError: the file does not exist, is not a JSON object, or has a value of a wrong type, or an unknown
            status, model or schema version.
    """
    return make_run(_read_json(path), path)


def _read_json(path: Path) -> Any:
    """Returns the content of a JSON file; raises ManifestError if it cannot be read."""
    try:
        return decode_json(path.read_bytes())
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read ({error.strerror})", "Check the path") from error
    except ValueError as error:
        raise ManifestError(f"{path}: not JSON ({error})", _HOW_TO_CORRECT) from error


def make_run(values: Any, path: Path) -> Run:
    """Returns the run that the content of a manifest describes.

    Args:
        values: the content.
        path: the manifest file, for messages.

    Raises:
        ManifestError: see :func:`read_manifest`.
    """
    if not isinstance(values, dict):
        raise ManifestError(f"{path}: contains a JSON {type(values).__name__}, not an object", _HOW_TO_CORRECT)
    try:
        run = msgspec.convert({key: value for key, value in values.items() if value is not None}, Run)
        if run.schema_version > SCHEMA_VERSION:
            problem = f"{path}: schema version {run.schema_version}, this release reads {SCHEMA_VERSION}"
            raise ManifestError(problem, "Upgrade: pip install --upgrade nsys-analyze")
        configuration_of(run)
    except msgspec.ValidationError as error:
        problem, _, key = str(error).partition(" - at `$.")
        raise ManifestError(
            f"{path}: {key.rstrip('`')} is {values[key.rstrip('`')]!r}: {problem}", _HOW_TO_CORRECT
        ) from error
    except ConfigurationError as error:
        hint = f"{error.hint}; or give d_model, d_ff, num_layers and num_heads"
        raise ManifestError(f"{path}: {error.message}", hint) from error
    # ``replace`` also sets the fields that have default values. msgspec would otherwise not write these fields.
    energy = tuple(replace(row) for row in run.energy) if run.energy else None
    return replace(run, flops=replace(run.flops) if run.flops else None, energy=energy)


def capture_name(stem: str, folder: Path) -> str:
    """Returns the name of a capture: its file's stem, or its folder's name if the stem is ``capture`` or similar."""
    named_after_folder = _NAME_FROM_FOLDER.fullmatch(stem)
    return Path(os.path.realpath(folder)).name + named_after_folder[1] if named_after_folder else stem


def capture_name_of_manifest(path: Path) -> str:
    """Returns the name of the capture that a manifest belongs to, which follows from the name of the manifest file."""
    return capture_name("capture" if path.name == MANIFEST else path.name.removesuffix(_SUFFIX), path.parent)


def manifest_file_name(stem: str) -> str:
    """Returns the file name of the manifest of a capture with this stem."""
    return MANIFEST if stem == "capture" else f"{stem}{_SUFFIX}"


def find_manifests_beside(trace: Path) -> list[Path]:
    """Returns the existing files that may be the manifest of a trace. A file that is named after the trace is first."""
    paths = (trace.parent / name for name in (f"{trace_stem(trace)}{_SUFFIX}", MANIFEST))
    return [path for path in paths if path.is_file()]


def find_manifest(trace: Path) -> Run | None:
    """Returns the manifest of a trace: ``<stem>.manifest.json``, or ``manifest.json`` in its folder, or None.

    A ``manifest.json`` belongs to the trace that its key ``capture`` names, or to the only trace in the folder. A trace
    and its export, such as ``a.nsys-rep`` and ``a.sqlite``, count as one trace.

    Raises:
        ManifestError: the manifest is malformed.
    """
    stem, paths = trace_stem(trace), find_manifests_beside(trace)
    if not paths:
        return None
    manifest = read_manifest(paths[0])
    if paths[0].name != MANIFEST:
        return manifest
    is_named = manifest.capture is not None and trace_stem(Path(manifest.capture)) == stem
    return manifest if is_named or _trace_stems(trace.parent) <= {stem} else None


def find_untraced_manifests(folder: Path) -> dict[Path, Run | ManifestError]:
    """Returns the manifests of runs that left no trace, in a folder and its direct subfolders, by file.

    They are sorted by folder and file name. If a manifest cannot be read, the error takes its place. A folder that does
    not exist or cannot be read contributes no manifest. A ``manifest.json`` without a status belongs to another tool
    and is ignored.
    """
    if not folder.is_dir():
        return {}
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    manifests: dict[Path, Run | ManifestError] = {}
    for place in (folder, *subfolders):
        try:
            files = sorted(path for path in place.iterdir() if not path.is_fifo())
            stems = _trace_stems(place)
        except OSError:  # ignored here, because the report has a row with the error of this folder
            continue
        for path in (path for path in files if path.name == MANIFEST or path.name.endswith(_SUFFIX)):
            try:
                json_values = _read_json(path)
                if path.name == MANIFEST and not (isinstance(json_values, dict) and "status" in json_values):
                    continue  # skips other manifests, such as those of web applications and checkpoints
                manifest = make_run(json_values, path)
            except ManifestError as error:
                if not stems:  # otherwise, the row of the trace that the manifest belongs to contains the error
                    manifests[path] = error
                continue
            if path.name != MANIFEST:
                stem = path.name.removesuffix(_SUFFIX)
                has_trace = stem in stems or (place / f"{stem}.json").is_file()
            elif manifest.capture is None or len(stems) == 1:
                has_trace = bool(stems)
            else:
                capture = Path(manifest.capture)
                has_trace = trace_stem(capture) in stems or (place / capture.name).is_file()
            if not has_trace:
                manifests[path] = manifest
    return manifests


def _trace_stems(folder: Path) -> set[str]:
    """Returns the names of the traces in a folder without their suffixes."""
    return {trace_stem(path) for path in folder.iterdir() if is_capture(path)}

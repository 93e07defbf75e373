"""Writes a report with its figures, and never replaces a file of another program."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.inputs.saved_reports import GENERATOR
from nsys_analyzer.report.figures import SOFTWARE_NAME
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.renderers import RENDERERS
from nsys_analyzer.system.atomic_write import (
    atomic_write,
    check_parent_folder,
    check_regular,
    resolve_links,
    write_text,
)
from nsys_analyzer.trace.sources import capture_suffixes, check_output_is_no_input

#: The marks of files that this package wrote: reports, their JSON, and figures.
_OWN_FILE_MARKS = (
    *(form.mark.encode() for form in RENDERERS.values() if form.mark),
    f'"generator": "{GENERATOR}"'.encode(),
    f"Software\0{SOFTWARE_NAME}".encode(),
)
#: A mark is within this many bytes of the start or the end of a file.
_MARK_DISTANCE_BYTES = 512
#: The suffixes of timings and of exported tables.
_DATA_SUFFIXES = (".csv", ".db")
_MAX_STEM_LENGTH = 120
#: The advice if a file exists and the command has no option to replace it.
FOLDER_IN_USE_HINT = "Move it away, or name another --output-dir"


def is_ours(path: Path) -> bool:
    """Checks whether a file is a report, JSON or figure that this package wrote: the file has a mark or is empty."""
    with path.open("rb") as file:
        start = file.read(_MARK_DISTANCE_BYTES)
        file.seek(max(path.stat().st_size - _MARK_DISTANCE_BYTES, 0))
        end = file.read()
    return not start or any(mark in part for mark in _OWN_FILE_MARKS for part in (start, end))


@dataclass(frozen=True)
class OutputKind:
    """A kind of file that a command writes.

    Attributes:
        noun: its name in an error.
        example: an example of a file name.
        is_ours: checks whether an existing file is of this kind and was written by this package.
        suffix: a suffix that both inputs and files of this kind have, or empty.
        printed: whether ``-o -`` prints it.
    """

    noun: str
    example: str
    is_ours: Callable[[Path], bool]
    suffix: str = ""
    printed: bool = False


REPORT = OutputKind("report", "report.md", is_ours, printed=True)


def check_target(path: Path, sources: Sequence[Path], *, force: bool, output: OutputKind = REPORT) -> None:
    """Checks that ``path``, given by ``-o``, can be written without losing anything.

    Args:
        path: the file to be written.
        sources: the inputs of the command, which must not be replaced.
        force: whether to replace a file of another program, and to make a missing folder.
        output: the kind of file.

    Raises:
        NsysAnalyzerError: the file cannot be written; the path is one of the ``sources``, has the suffix of an input,
            or is not a regular file; or, without ``force``, it is a file of another program or its folder is missing.
    """
    if path.is_dir():
        raise NsysAnalyzerError(f"{path} is a folder", f"Name a file in it: -o {path / output.example}")
    check_regular(path, f"Name a file with -o{', or print with -o -' if output.printed else ''}")
    place = resolve_links(path)
    reserved_suffixes = tuple({*capture_suffixes(with_shared=False), *_DATA_SUFFIXES} - {output.suffix})
    if any(name.lower().endswith(reserved_suffixes) for name in (path.name, place.name)):
        remedy = f"Name another file with -o{'' if output.printed else f', such as {output.example}'}"
        raise NsysAnalyzerError(f"{path} has the name of an input, not of a {output.noun}", remedy)
    check_output_is_no_input(path, sources)
    remedy = "Name another file with -o, or replace it with --force"
    check_replaceable(path, remedy, force=force, written_here=output.is_ours)
    check_parent_folder(place if path.is_symlink() else path, force=force)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place.parent):
            return
    except OSError as error:
        reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise NsysAnalyzerError(f"{path} cannot be written ({reason})", "Name another file with -o") from error


def check_replaceable(
    path: Path, remedy: str, *, force: bool = False, written_here: Callable[[Path], bool] = is_ours
) -> None:
    """Checks that writing to ``path`` replaces no file of another program.

    Raises:
        NsysAnalyzerError: the file was not written here and ``force`` is not set, or the path is not a regular file.
    """
    check_regular(path, "Name a file in its place")
    if path.exists() and not force and not written_here(path):
        raise NsysAnalyzerError(f"{path} was not written by nsys-analyze, and would be replaced", remedy)


def write_report(form: str, built: Report, path: Path, *, figures: bool = True, force: bool = False) -> None:
    """Writes a report in one of the formats of ``RENDERERS``, completely or not at all, and its figures beside it.

    A file at ``path`` is replaced. Commands call ``check_target`` for it before the analysis.

    Raises:
        NsysAnalyzerError: a figure would replace a file of another program, and ``force`` is not set.
    """
    renderer = RENDERERS[form]
    drawings: Mapping[str, str] = {}
    outdated: Sequence[Path] = ()
    with ExitStack() as pending_figures:  # replaces figures only after the report was written
        if renderer.figures == "files":
            drawings, outdated = _draw_png_files(built, path, pending_figures, figures=figures, force=force)
        elif renderer.figures == "inline" and figures:
            from nsys_analyzer.report.figures import draw_svg

            drawings = {figure.key: draw_svg(figure) for figure in built.figures}
        mark = f"\n{renderer.mark}\n" if renderer.mark else ""
        write_text(path, f"{renderer.render(built, drawings)}{mark}")
    for file in outdated:
        file.unlink()


def name_figure_files(keys: Iterable[str]) -> dict[str, str]:
    """Returns the file name of each figure: its key without unsafe characters, numbered if two names are equal.

    Keys contain names from captures, so they are foreign input; no file name leads out of its folder.
    """
    names: dict[str, str] = {}
    for key in dict.fromkeys(keys):
        stem = re.sub(r"[^\w.+-]+", "-", key).strip(".-")[:_MAX_STEM_LENGTH] or "figure"
        numbered_names = (f"{stem}--{number}.png" for number in count(2))
        names[key] = next(name for name in chain([f"{stem}.png"], numbered_names) if name not in names.values())
    return names


def _draw_png_files(
    built: Report, path: Path, pending_figures: ExitStack, *, figures: bool, force: bool
) -> tuple[dict[str, str], list[Path]]:
    """Draws the figures into a folder beside the report. They appear when ``pending_figures`` ends without an error.

    Returns:
        The path of each figure relative to the report, by the figure's key, and the outdated figures of an earlier
        report.
    """
    from nsys_analyzer.report.figures import draw_png

    # The folder lies beside the linked file, from where viewers resolve image paths.
    report = resolve_links(path) if path.is_symlink() else path
    folder = report.parent / f"{report.stem}_figures"
    file_names = name_figure_files(figure.key for figure in built.figures) if figures else {}
    paths = {key: folder / name for key, name in file_names.items()}
    for file in paths.values():
        check_replaceable(file, "Move it away, or write the report elsewhere", force=force)
    if paths:
        folder.mkdir(parents=True, exist_ok=True)
    for figure in built.figures if figures else ():
        draw_png(figure, pending_figures.enter_context(atomic_write(paths[figure.key])))
    outdated = [file for file in set(folder.glob("*.png")).difference(paths.values()) if is_ours(file)]
    return {key: f"{folder.name}/{name}" for key, name in file_names.items()}, outdated

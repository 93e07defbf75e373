"""From traces and timings to a report on disk: what ``report`` and ``run`` have in common."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import chain, count
from pathlib import Path

import click

from nsys_analyzer.analysis.phases import PhaseNames
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.benches.model import Finished, Results
from nsys_analyzer.capture.atomic_write import check_regular, followed, made_whole, write_whole
from nsys_analyzer.capture.inputs import check_no_input
from nsys_analyzer.capture.timings import Selection, Timings, read_timings
from nsys_analyzer.capture.timings.table import has_rows
from nsys_analyzer.capture.timings.writing import NAME as TIMINGS
from nsys_analyzer.commands.bench_results import bench_folders, read_finished
from nsys_analyzer.commands.gather import Given, gather, holds_captures
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.questions import build_report
from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Paragraph, Report, Section
from nsys_analyzer.report.plots import SOFTWARE
from nsys_analyzer.report.renderers import RENDERERS
from nsys_analyzer.report.renderers.json_data import GENERATOR
from nsys_analyzer.report.screen import data_stream
from nsys_analyzer.text import marked

#: What tells our files from others: the mark of a report, the generator of its data, the software of a figure; within
#: so many bytes of the start or the end.
_MARKS = (
    *(form.mark.encode() for form in RENDERERS.values() if form.mark),
    f'"generator": "{GENERATOR}"'.encode(),
    f"Software\0{SOFTWARE}".encode(),
)
_NEAR = 512
#: What captures, their exports and timings are called.
_INPUT_SUFFIXES = (".sqlite", ".nsys-rep", ".qdrep", ".pt.trace.json", ".json.gz", ".csv", ".db")
_LONGEST_STEM = 120
#: What to do where no option replaces a file.
ELSEWHERE = "Move it away, or name another --output-dir"


def write_report(paths: Sequence[Path], csv_path: Path | None, output: Path, command: str) -> Report:
    """Reads captures and timings, and writes the report as markdown with its figures beside it.

    Args:
        paths: traces, and folders that hold them or benches; without any, the folder of the timings.
        csv_path: timings of unprofiled runs; passed over where it has no row, as of programs that time nothing.
        output: the markdown file, in a folder that exists; figures go into ``<stem>_figures`` beside it.
        command: the command line that makes the report again, for its reader.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    timed = [csv_path] if csv_path and has_rows(csv_path) else []
    built = build_report(gather_evidence(paths, timed, command, beside=output.parent))
    write_as("markdown", built, output)
    return built


def gather_evidence(
    paths: Sequence[Path],
    csv_paths: Sequence[Path],
    command: str,
    names: PhaseNames | None = None,
    given: Given | None = None,
    beside: Path | None = None,
    selection: Selection | None = None,
) -> Evidence:
    """What a report of these captures, timings and benches is made from; the arguments are those of ``write_report``.

    Links to what lies in a bench's folder are relative to ``beside``, the report's folder. ``selection``
    says which rows of the timings to read.

    Raises:
        NsysAnalyzerError: nothing could be read.
    """
    beside_them = None if csv_paths else timings_beside(paths, selection)
    timings = read_timings(*csv_paths, selection=selection) if csv_paths else beside_them
    places = paths or tuple(dict.fromkeys(path.resolve().parent for path in csv_paths))
    folders = dict.fromkeys(folder for place in places for folder in bench_folders(place))
    with_traces = [place for place in places if not bench_folders(place) or holds_captures(place)]
    alone = len(folders) == 1 and not with_traces and not timings
    benches = tuple(_finished(one, os.path.relpath(one, beside or Path()), alone=alone) for one in folders)
    captures: tuple[CaptureSummary, ...] = ()
    if with_traces or timings or not benches:
        captures = gather(with_traces, names or PhaseNames.parse(()), given or Given(), timings)
    notes = timings.notes if timings else ()
    if beside_them:
        notes = (*notes, marked("Found in the captures' folder and used; `--csv` names another."))
    return Evidence(captures, command, timings.source if timings else "", notes, benches)


def _finished(folder: Path, seen_as: str, *, alone: bool) -> Finished:
    """An experiment that was run, or why it cannot be read, in place of its section: it ends no report of others.

    Raises:
        NsysAnalyzerError: it cannot be read, and the report is of it alone.
    """
    try:
        return read_finished(folder, seen_as)
    except NsysAnalyzerError as error:
        if alone:
            raise
        section = Section(f"bench-{folder.name}", f"Bench: {folder.name}", (Paragraph(f"Left out: {error}"),))
        return Finished(folder.name, Results(()), section)


def timings_beside(places: Sequence[Path], selection: Selection | None = None) -> Timings | None:
    """The ``timings.csv`` of the one folder among these that has one, read; None where there is none, or several."""
    found = [path for place in places if os.path.isfile(path := place / TIMINGS)]  # noqa: PTH113 - pathlib raises
    if len(found) > 1:
        click.echo(f"Several folders have a {TIMINGS}, and none is used: name one with --csv.", err=True)
    if len(found) != 1:
        return None
    try:
        read = read_timings(found[0], selection=selection) if has_rows(found[0]) else None
    except NsysAnalyzerError as error:
        click.echo(f"Left out, as it cannot be read: {error}", err=True)
        return None
    if read:
        click.echo(f"Unprofiled times: {found[0]}; --csv names others.", err=True)
    return read


def check_target(path: Path, sources: Sequence[Path], *, force: bool) -> None:
    """Makes sure that a report can be written where ``-o`` says, and that nothing is lost there.

    Raises:
        NsysAnalyzerError: it cannot be written, it is one of the ``sources`` or has the name of one, something else
            than a file stands there, or a file that was not written here and that ``force`` does not say to replace.
    """
    if path.is_dir():
        raise NsysAnalyzerError(f"{path} is a folder", f"Name a file in it: -o {path / 'report.md'}")
    check_regular(path, "Name a file with -o, or print with -o -")
    place = followed(path)
    if any(name.lower().endswith(_INPUT_SUFFIXES) for name in (path.name, place.name)):
        raise NsysAnalyzerError(f"{path} has the name of an input, not of a report", "Name another file with -o")
    check_no_input(path, sources)
    check_replaceable(path, "Name another file with -o, or replace it with --force", force=force)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place.parent):
            return
    except OSError as error:
        reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise NsysAnalyzerError(f"{path} cannot be written ({reason})", "Name another file with -o") from error


def check_replaceable(path: Path, remedy: str, *, force: bool = False) -> None:
    """Makes sure that nothing of anybody else's is lost where a report goes.

    Raises:
        NsysAnalyzerError: what is there was not written here, and ``force`` does not say to replace it; or it is
            no file, which nothing replaces.
    """
    check_regular(path, "Name a file in its place")
    if path.exists() and not force and not is_ours(path):
        raise NsysAnalyzerError(f"{path} was not written by nsys-analyze, and would be replaced", remedy)


def is_ours(path: Path) -> bool:
    """Whether a report, its data or a figure was written here: it bears a mark, or there is nothing in it."""
    with path.open("rb") as file:
        start = file.read(_NEAR)
        file.seek(max(path.stat().st_size - _NEAR, 0))
        end = file.read()
    return not start or any(mark in part for mark in _MARKS for part in (start, end))


def command_line() -> str:
    """The command line of this process as a reader of the report would type it, beside the captures."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["nsys-analyze", *words])


def write_as(form: str, built: Report, path: Path, *, figures: bool = True, force: bool = False) -> None:
    """Writes a report in one of the ``RENDERERS``' formats, whole or not at all, and its figures beside it.

    What stands at its path is replaced (``check_target`` comes first, before the long work).

    Raises:
        NsysAnalyzerError: a figure would replace a file that was not drawn here, and ``force`` is not given.
    """
    chosen = RENDERERS[form]
    drawn = _draw(built, path, figures=figures, force=force) if chosen.draws else {}
    mark = f"\n{chosen.mark}\n" if chosen.mark else ""
    write_whole(path, f"{chosen.render(built, drawn)}{mark}")


def print_as(form: str, built: Report) -> None:
    """Prints a report in one of the ``RENDERERS``' formats, without figures."""
    chosen = RENDERERS[form]
    click.echo(chosen.render(built, {}), nl=False, file=data_stream() if chosen.is_data else None)


def file_names(keys: Iterable[str]) -> dict[str, str]:
    """The name of each figure's file: its key, as far as that is safe in a name, numbered where two look alike.

    Keys hold what rows and captures say of themselves; none leads out of its folder.
    """
    names: dict[str, str] = {}
    for key in dict.fromkeys(keys):
        stem = re.sub(r"[^\w.+-]+", "-", key).strip(".-")[:_LONGEST_STEM] or "figure"
        numbered = (f"{stem}--{number}.png" for number in count(2))
        names[key] = next(name for name in chain([f"{stem}.png"], numbered) if name not in names.values())
    return names


def _draw(built: Report, path: Path, *, figures: bool, force: bool) -> dict[str, str]:
    """Draws the figures into a folder beside the report: figure key to its path as the report sees it.

    Figures of an older report there that this one has no more are removed; what is not ours stays.
    """
    from nsys_analyzer.report.plots import draw

    report = followed(path) if path.is_symlink() else path  # its images are looked for beside the file itself
    folder = report.parent / f"{report.stem}_figures"
    places = {key: folder / name for key, name in file_names(f.key for f in built.figures).items()} if figures else {}
    for place in places.values():
        check_replaceable(place, "Move it away, or write the report elsewhere", force=force)
    for old in set(folder.glob("*.png")).difference(places.values()):
        if is_ours(old):
            old.unlink()
    if places:
        folder.mkdir(parents=True, exist_ok=True)
    for figure in built.figures if figures else ():
        with made_whole(places[figure.key]) as unfinished:
            draw(figure, unfinished)
    return {key: f"{folder.name}/{place.name}" for key, place in places.items()}

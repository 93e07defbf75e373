"""Writes a report with its figures, and replaces nothing that was not written here."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.report.figures import SOFTWARE
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.renderers import RENDERERS
from nsys_analyzer.report.renderers.json_report import GENERATOR
from nsys_analyzer.system.atomic_write import atomic_write, check_folder, check_regular, link_target, write_text
from nsys_analyzer.trace.sources import check_output_is_no_input

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


def is_ours(path: Path) -> bool:
    """Whether a report, its data or a figure was written here: it bears a mark, or there is nothing in it."""
    with path.open("rb") as file:
        start = file.read(_NEAR)
        file.seek(max(path.stat().st_size - _NEAR, 0))
        end = file.read()
    return not start or any(mark in part for mark in _MARKS for part in (start, end))


@dataclass(frozen=True)
class Output:
    """What a command writes: in words, an example of a name, and whether a file is one that was written before.

    ``suffix``: an ending of inputs that its files have, too; empty for none.
    """

    what: str
    example: str
    is_ours: Callable[[Path], bool]
    suffix: str = ""
    printed: bool = False


REPORT = Output("report", "report.md", is_ours, printed=True)


def check_target(path: Path, sources: Sequence[Path], *, force: bool, output: Output = REPORT) -> None:
    """Makes sure that a report, or another ``output``, can be written where ``-o`` says, and nothing is lost there.

    Raises:
        NsysAnalyzerError: it cannot be written, it is one of the ``sources`` or has the name of one, something else
            than a file stands there, or a file that was not written here and that ``force`` does not say to replace;
            or its folder is missing, and ``force`` does not say to make it.
    """
    if path.is_dir():
        raise NsysAnalyzerError(f"{path} is a folder", f"Name a file in it: -o {path / output.example}")
    check_regular(path, f"Name a file with -o{', or print with -o -' if output.printed else ''}")
    place = link_target(path)
    reserved = tuple(suffix for suffix in _INPUT_SUFFIXES if suffix != output.suffix)
    if any(name.lower().endswith(reserved) for name in (path.name, place.name)):
        remedy = f"Name another file with -o{'' if output.printed else f', such as {output.example}'}"
        raise NsysAnalyzerError(f"{path} has the name of an input, not of a {output.what}", remedy)
    check_output_is_no_input(path, sources)
    remedy = "Name another file with -o, or replace it with --force"
    check_replaceable(path, remedy, force=force, written_here=output.is_ours)
    check_folder(place if path.is_symlink() else path, force=force)
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
    """Makes sure that nothing of anybody else's is lost where a report goes.

    Raises:
        NsysAnalyzerError: what is there was not written here, and ``force`` does not say to replace it; or it is
            no file, which nothing replaces.
    """
    check_regular(path, "Name a file in its place")
    if path.exists() and not force and not written_here(path):
        raise NsysAnalyzerError(f"{path} was not written by nsys-analyze, and would be replaced", remedy)


def write_as(form: str, built: Report, path: Path, *, figures: bool = True, force: bool = False) -> None:
    """Writes a report in one of the ``RENDERERS``' formats, whole or not at all, and its figures beside it.

    What stands at its path is replaced (``check_target`` comes first, before the long work).

    Raises:
        NsysAnalyzerError: a figure would replace a file that was not drawn here, and ``force`` is not given.
    """
    chosen = RENDERERS[form]
    drawn: Mapping[str, str] = {}
    older: Sequence[Path] = ()
    with ExitStack() as finished:  # a report that cannot be written has changed no figure
        if chosen.figures == "files":
            drawn, older = _draw(built, path, finished, figures=figures, force=force)
        elif chosen.figures == "inline" and figures:
            drawn = _drawn(built)
        mark = f"\n{chosen.mark}\n" if chosen.mark else ""
        write_text(path, f"{chosen.render(built, drawn)}{mark}")
    for old in older:
        old.unlink()


def _drawn(built: Report) -> dict[str, str]:
    """Each figure as SVG, by its key."""
    from nsys_analyzer.report.figures import svg

    return {figure.key: svg(figure) for figure in built.figures}


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


def _draw(
    built: Report, path: Path, finished: ExitStack, *, figures: bool, force: bool
) -> tuple[dict[str, str], list[Path]]:
    """Draws the figures into a folder beside the report, where they are once ``finished`` ends without an error.

    Returns figure key to its path as the report sees it, and the figures of an older report that this one has no more.
    """
    from nsys_analyzer.report.figures import draw

    report = link_target(path) if path.is_symlink() else path  # its images are looked for beside the file itself
    folder = report.parent / f"{report.stem}_figures"
    places = {key: folder / name for key, name in file_names(f.key for f in built.figures).items()} if figures else {}
    for place in places.values():
        check_replaceable(place, "Move it away, or write the report elsewhere", force=force)
    if places:
        folder.mkdir(parents=True, exist_ok=True)
    for figure in built.figures if figures else ():
        draw(figure, finished.enter_context(atomic_write(places[figure.key])))
    older = [old for old in set(folder.glob("*.png")).difference(places.values()) if is_ours(old)]
    return {key: f"{folder.name}/{place.name}" for key, place in places.items()}, older

"""What lies in a bench's folder: its rows, its captures, and the section and the CSV that come of them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsys_analyzer.analysis.phases import PhaseNames
from nsys_analyzer.benches import find_bench
from nsys_analyzer.benches.model import CEILINGS, Bench, Finished, Results
from nsys_analyzer.capture.atomic_write import check_regular, write_whole
from nsys_analyzer.capture.cases import NAME, Row, read_file
from nsys_analyzer.commands.gather import Given, gather, holds_captures
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.report.model import Details, Listing, Paragraph, Section
from nsys_analyzer.text import marked

CAPTURES = "captures"
_FIRST_COLUMNS = (b"target,", b"message")  # without rows there is the latter alone
_NEAR = 512


def bench_folders(path: Path) -> list[Path]:
    """The folders of benches at a path: itself, and those one level below."""
    if not path.is_dir():
        return []
    places = (path, *sorted(path.iterdir()))
    # pathlib raises where a folder cannot be looked into, which then holds none
    return [place for place in places if os.path.isfile(place / NAME)]  # noqa: PTH113


def read_finished(folder: Path, seen_as: str) -> Finished:
    """A bench that was run into a folder, with its section.

    Args:
        folder: the bench's folder.
        seen_as: the folder as the section's reader sees it, empty where the section lies in it.

    Raises:
        ConfigurationError: the file of rows is damaged or of another version, or its bench is unknown.
    """
    header, rows = read_file(folder / NAME)
    bench = find_bench(header["bench"])
    captures = folder / CAPTURES
    summaries = (
        gather([captures], PhaseNames.parse(()), Given(), None, beside_others=True)
        if captures.is_dir() and holds_captures(captures)
        else ()
    )
    try:
        measured = tuple(row for row in rows if row.module != CEILINGS)
        ceilings = {str(row.case["precision"]): row for row in rows if row.module == CEILINGS and row.ok}
        results = Results(measured, ceilings, summaries, tuple(header["runs"]), seen_as)
        section = _section(bench, results)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Its targets never write such rows: they were edited, or are another version's.
        raise ConfigurationError(
            f"{folder / NAME} has rows that this version cannot read ({type(error).__name__}: {error})",
            f"Rows of this version come from nsys-analyze bench {bench.name} --output-dir ANOTHER",
        ) from error
    return Finished(bench.name, results, _with_commands(section, results.commands))


def _section(bench: Bench, results: Results) -> Section:
    if not results.rows:
        text = marked("Nothing was measured yet: the same command with `--resume` goes on.")
        return Section(f"bench-{bench.name}", f"Bench: {bench.name}", (Paragraph(text),))
    return bench.section(results)


def _with_commands(section: Section, commands: tuple[str, ...]) -> Section:
    """The section with the command lines that made its rows at its end."""
    if not commands:
        return section
    how = Details("How these rows were made", (Listing(commands, "commands"),))
    return replace(section, blocks=(*section.blocks, how))


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows as CSV: status, the options of each case, and its figures; lists stay in ``bench.jsonl``."""
    flat = [_flat(row) for row in rows]
    columns = dict.fromkeys(key for row in flat for key in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, "message"], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "message": one.message} for row, one in zip(flat, rows, strict=True))
    write_whole(path, text.getvalue())


def check_rows_replaceable(path: Path, remedy: str) -> None:
    """Makes sure that nobody else's file is lost where the rows go.

    Raises:
        ConfigurationError: a file that :func:`write_rows` did not write is there.
        NsysAnalyzerError: something else than a file is there.
    """
    check_regular(path)
    if path.exists():
        with path.open("rb") as file:
            if not file.readline(_NEAR).strip().startswith(_FIRST_COLUMNS):
                raise ConfigurationError(f"{path} was not written by nsys-analyze bench, and would be replaced", remedy)


def _flat(row: Row) -> Mapping[str, Any]:
    plain = {key: value for key, value in row.figures.items() if not isinstance(value, list | dict)}
    gpu = {"gpu": row.machine["gpu"]} if row.machine.get("gpu") else {}
    return {
        "target": row.module.rpartition(".")[2],
        **row.case,
        **row.environment,
        **gpu,
        "status": row.status,
        **plain,
    }

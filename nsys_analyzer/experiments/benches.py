"""Lists the experiments, and reads the rows of an experiment from its folder.

The docstring of the module ``model`` says how to add an experiment.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments import attainable, attention, decode, flash, memory, precision, timing, variants
from nsys_analyzer.experiments import compile as compiled
from nsys_analyzer.experiments.model import AnyRow, Bench, Results
from nsys_analyzer.experiments.section import make_section
from nsys_analyzer.inputs.rows import ROWS_FILE, convert_row, read_rows_file
from nsys_analyzer.report.model import Details, FinishedBench, Listing, Paragraph, Section
from nsys_analyzer.text import phrase

BENCHES: tuple[Bench, ...] = (
    timing.BENCH,
    precision.BENCH,
    memory.BENCH,
    attention.BENCH,
    variants.BENCH,
    flash.BENCH,
    compiled.BENCH,
    decode.BENCH,
    attainable.BENCH,
)


def read_finished(folder: Path) -> FinishedBench:
    """Returns the experiment whose results a folder contains, with its section.

    Raises:
        ConfigurationError: the file of rows is damaged or of another version, or its experiment is unknown.
    """
    bench, header, rows = read_rows(folder / ROWS_FILE)
    commands = tuple(header["runs"])
    no_rows = Paragraph(phrase("Nothing was measured yet. Continue with the same command and `--resume`."))
    section = Section(f"bench-{bench.name}", f"Bench: {bench.name}", (no_rows,))
    try:
        section = make_section(bench, Results(rows)) if rows else section
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _unreadable(folder / ROWS_FILE, bench, error) from error
    if commands:
        how = Details("How these rows were made", (Listing(commands, "commands"),))
        section = replace(section, blocks=(*section.blocks, how))
    return FinishedBench(bench.name, section, rows, commands)


def read_rows(path: Path) -> tuple[Bench, dict[str, Any], tuple[AnyRow, ...]]:
    """Returns the experiment, the header of its file, and the last row of each case.

    Raises:
        ConfigurationError: as for :func:`read_finished`.
    """
    header, rows = read_rows_file(path)
    by_name = {bench.name: bench for bench in BENCHES}
    if header["bench"] not in by_name:
        raise ConfigurationError(f"Unknown bench {header['bench']!r}", f"Known benches: {', '.join(by_name)}")
    bench = by_name[header["bench"]]
    try:
        typed_rows = [convert_row(row, bench.target) for row in rows if row.module == bench.target.module]
    except (ConfigurationError, TypeError, ValueError) as error:
        raise _unreadable(path, bench, error) from error
    return bench, header, tuple({row.key: row for row in typed_rows}.values())


def _unreadable(path: Path, bench: Bench, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{path} has rows that this version cannot read ({type(error).__name__}: {error})",
        f"Measure again with nsys-analyze bench {bench.name} --output-dir ANOTHER",
    )

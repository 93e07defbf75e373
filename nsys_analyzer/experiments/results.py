"""The list of the experiments, and the folder of one: its rows, its section and its CSV.

How an experiment is added: see ``model``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments import attention, decode, flash, memory, precision, timing, variants
from nsys_analyzer.experiments import compile as compiled
from nsys_analyzer.experiments.model import AnyRow, Bench, Results
from nsys_analyzer.experiments.section import make_section
from nsys_analyzer.report.model import Details, FinishedBench, Listing, Paragraph, Section
from nsys_analyzer.runs.rows import NAME, read_file, typed, written
from nsys_analyzer.system.atomic_write import check_regular, write_text
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
)
_FIRST_COLUMNS = (b"target,", b"message")  # without rows there is the latter alone
_NEAR = 512


def read_finished(folder: Path, seen_as: str) -> FinishedBench:
    """Returns a bench that was run into a folder, with its section; ``seen_as`` is the folder as its reader sees it.

    Raises:
        ConfigurationError: the file of rows is damaged or of another version, or its bench is unknown.
    """
    bench, header, rows = read_rows(folder / NAME)
    commands = tuple(header["runs"])
    nothing = Paragraph(phrase("Nothing was measured yet: the same command with `--resume` goes on."))
    section = Section(f"bench-{bench.name}", f"Bench: {bench.name}", (nothing,))
    try:
        section = make_section(bench, Results(rows, seen_as)) if rows else section
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _unreadable(folder / NAME, bench, error) from error
    if commands:
        how = Details("How these rows were made", (Listing(commands, "commands"),))
        section = replace(section, blocks=(*section.blocks, how))
    return FinishedBench(bench.name, section, rows, commands)


def read_rows(path: Path) -> tuple[Bench, dict[str, Any], tuple[AnyRow, ...]]:
    """Returns the bench, the header and the rows of its targets, each case once; raises as ``read_finished``."""
    header, rows = read_file(path)
    by_name = {bench.name: bench for bench in BENCHES}
    if header["bench"] not in by_name:
        raise ConfigurationError(f"Unknown bench {header['bench']!r}", f"Known benches: {', '.join(by_name)}")
    bench = by_name[header["bench"]]
    targets = {target.module: target for target in bench.targets}
    try:
        found = [typed(row, targets[row.module]) for row in rows if row.module in targets]
    except (ConfigurationError, TypeError, ValueError) as error:
        raise _unreadable(path, bench, error) from error
    return bench, header, tuple({row.key: row for row in found}.values())


def _unreadable(path: Path, bench: Bench, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{path} has rows that this version cannot read ({type(error).__name__}: {error})",
        f"Rows of this version come from nsys-analyze bench {bench.name} --output-dir ANOTHER",
    )


def write_rows(rows: Sequence[AnyRow], path: Path) -> None:
    """Writes the rows as CSV: status, the options of each case, and its figures; lists stay in ``bench.jsonl``."""

    def flat(row: AnyRow) -> dict[str, Any]:
        figures = {key: value for key, value in written(row.figures).items() if not isinstance(value, list | dict)}
        gpu = {"gpu": row.machine["gpu"]} if row.machine.get("gpu") else {}
        target = row.module.rpartition(".")[2]
        return {"target": target, **written(row.case), **row.environment, **gpu, "status": row.status, **figures}

    import pandas as pd  # help need not wait for it

    table = pd.DataFrame([flat(row) for row in rows], dtype=object)
    table["message"] = [row.message for row in rows]
    write_text(path, table.to_csv(index=False))


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

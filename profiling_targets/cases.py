"""Targets that measure one case at a time: alone from the command line, or many from a file.

A target is a function ``measure(case, figures)`` and the types of both, which ``nsys_analyzer`` declares: the fields of
the case are the options of the command line. Run alone it prints its figures; with
``--cases FILE --rows FILE`` it measures each case of a JSON list and appends a line of JSON for it, so that whoever
started it can go on where it ended. Running out of memory ends the process after its row: the memory of the next case
should be that of a fresh one.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.runs.rows import CaseTarget, written
from profiling_targets.harness import is_out_of_memory, machine

C = TypeVar("C")
F = TypeVar("F")


class NotHereError(ConfigurationError):
    """A case that this device or installation cannot run."""


@dataclass(frozen=True)
class Ending:
    """How a case ended: ``ok``, ``oom``, ``unsupported`` or ``failed``, and why in a line."""

    status: str
    message: str | None = None


#: Exit codes by status; after any other than 0 the process has ended before its last case.
EXIT_CODES = {"ok": 0, "unsupported": 0, "failed": 1, "oom": 3}


def default_device() -> str:
    """``cuda`` where there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def main(target: CaseTarget[C, F], measure: Callable[[C, F], None], arguments: list[str] | None = None) -> int:
    """Runs the command line of a target and returns its exit code.

    Args:
        target: its types; each field of a case is an option, and has a default, but for ``device``.
        measure: fills the figures as it goes: what was there when memory ran out is kept.
        arguments: the command line without the program, of this process where there is none.
    """
    parser = _parser(target, measure.__doc__ or "")
    given = vars(parser.parse_args(arguments))
    cases, rows = given.pop("cases"), given.pop("rows")
    if bool(cases) != bool(rows):
        parser.error("--cases and --rows go together")
    try:
        if not cases:
            return _alone(target, target.case(**given), measure)
        return _many(target, json.loads(cases.read_text(encoding="utf-8")), rows, measure)
    except ConfigurationError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


def _parser(target: CaseTarget[Any, Any], says: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"python -m {target.module}", description=says.partition("\n")[0])
    hints = get_type_hints(target.case)
    for one in fields(target.case):
        _add_option(parser, one, hints[one.name])
    parser.add_argument("--cases", type=Path, metavar="FILE", help="measure the cases of a JSON list instead")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append a line of JSON for each of them there")
    return parser


def _add_option(parser: argparse.ArgumentParser, one: Field[Any], kind: Any) -> None:
    name = f"--{one.name.replace('_', '-')}"
    default = default_device() if one.name == "device" else one.default
    says = f"{one.metadata.get('help', '')} (default {default})".strip()
    choices = one.metadata.get("choices") or None
    if kind is bool:
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=says)
    else:
        read = partial(_whole_number, one.metadata["least"]) if kind is int else kind
        parser.add_argument(name, type=read, default=default, choices=choices, help=says)


def _whole_number(least: int, text: str) -> int:
    if not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}")
    return int(text)


def _alone(target: CaseTarget[C, F], case: C, measure: Callable[[C, F], None]) -> int:
    row = measured(target, case, measure)
    for key, value in row["figures"].items():
        print(f"{key:32} {value:.6g}" if isinstance(value, float) else f"{key:32} {value}")
    if row["message"]:
        print(f"{row['status']}: {row['message']}", file=sys.stderr)
    return EXIT_CODES[row["status"]]


def _many(target: CaseTarget[C, F], cases: list[Mapping[str, Any]], rows: Path, measure: Callable[[C, F], None]) -> int:
    """Measures the cases in order; ends after the first that leaves the process in doubt."""
    for values in cases:
        row = measured(target, target.case(**values), measure)
        with rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if code := EXIT_CODES[row["status"]]:
            return code
    return 0


def measured(target: CaseTarget[C, F], case: C, measure: Callable[[C, F], None]) -> dict[str, Any]:
    """One row in JSON's types: the case, how it ended, its figures, and the machine."""
    device = written(case)["device"]
    _forget(device)
    figures = target.figures()
    ending = Ending("ok")
    try:
        measure(case, figures)
    except NotHereError as error:
        ending = Ending("unsupported", str(error))
    except Exception as error:  # noqa: BLE001  it is this case's result, and its row says so
        line = " ".join(str(error).split()) or type(error).__name__
        if is_out_of_memory(error):
            ending = Ending("oom", line)
        else:
            traceback.print_exc()
            ending = Ending("failed", f"{type(error).__name__}: {line}")
    return {
        "case": written(case),
        "status": ending.status,
        "message": ending.message,
        "figures": dict(_plain(written(figures))),
        "machine": _machine(device),
    }


def _machine(device: str) -> dict[str, Any]:
    """The machine as a harness tells it, without the peak of memory: what a case says of that stands in its figures."""
    known = machine(device)
    del known["peak_memory_bytes"]
    return {**known, "threads": torch.get_num_threads()}


def _plain(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The figures in JSON's types: an infinity or a NaN is none of them."""
    for key, value in figures.items():
        finite = not isinstance(value, float) or value - value == 0
        yield key, value if finite else None


def _forget(device: str) -> None:
    """Frees what earlier cases left, so that a case's memory and compiled code are its own."""
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

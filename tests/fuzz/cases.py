"""Makes a case: an input that a seeded generator breaks, and a command that reads it."""

from __future__ import annotations

import lzma
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

from nsys_analyzer.export import FORMATS
from nsys_analyzer.trace.kineto import read_tables
from nsys_analyzer.trace.reader import write_sqlite
from tests.fuzz import documents, exports, oracle
from tests.fuzz.sandbox import Outcome, run
from tests.fuzz.texts import text

_ROOT = Path(__file__).parents[2]
#: Captures beyond this size take the longest, and are chosen less often.
_LARGE = 1_500_000
_OFTEN = 12


@dataclass(frozen=True)
class Inputs:
    """Sound inputs: exports, small ones several times; traces of PyTorch's profiler, a sweep's folder, benches'."""

    exports: tuple[Path, ...]
    kineto: tuple[Path, ...]
    sweep: Path
    benches: tuple[Path, ...]


@dataclass(frozen=True)
class Bench:
    """Sound inputs, and the folder to work in."""

    inputs: Inputs
    folder: Path


@dataclass(frozen=True)
class Finding:
    """A case that went wrong, and how to see it again."""

    seed: int
    number: int
    kind: str
    what: str
    command: tuple[str, ...]
    fault: str

    def __str__(self) -> str:
        again = f"python -m tests.fuzz --seed {self.seed} --case {self.number} --kind {self.kind}"
        return f"FOUND {self.fault}\n  {self.kind}: {self.what[:200]}\n  {' '.join(self.command)[:300]}\n  {again}"


def inputs(folder: Path) -> Inputs:
    """The captures, traces, sweep and benches of the repository, unpacked into a folder."""
    folder.mkdir(parents=True)
    for packed in sorted((_ROOT / "tests/data").glob("*.sqlite.xz")):
        (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
        _without_constraints(folder / packed.stem)
    recorded = folder / "cpu_train.pt.trace.json.gz"
    shutil.copyfile(_ROOT / "tests/data" / recorded.name, recorded)
    write_sqlite(read_tables(recorded), folder / "cpu_train.sqlite")
    found = [
        path for path in sorted(folder.glob("*.sqlite")) for _ in range(1 if path.stat().st_size > _LARGE else _OFTEN)
    ]
    benches = sorted(path.parent for path in (_ROOT / "examples/benches").glob("*/bench.jsonl"))
    return Inputs(tuple(found), tuple(sorted(folder.glob("*.json.gz"))), _ROOT / "examples/sweep", tuple(benches))


def _without_constraints(path: Path) -> None:
    """Lets every column hold NULL: a broken export is not held to what nsys declares."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '') WHERE type = 'table'")
        connection.commit()


def try_case(
    bench: Bench, seed: int, number: int, kind: str | None = None, *, keep: bool = False
) -> tuple[str, Finding | None]:
    """Tries one case: its kind, and what went wrong with it.

    Args:
        bench: what to break, and where.
        seed, number: make the case.
        kind: of this kind; else they choose it.
        keep: whether the broken input stays.
    """
    random = Random(f"{seed}/{number}")
    chosen = random.choice(list(KINDS))
    kind = kind or chosen
    place = bench.folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    what, outcome = KINDS[kind](bench, place, random)
    fault = oracle.fault(outcome) or oracle.others_lost(outcome)
    if not keep:
        shutil.rmtree(place)
    return kind, Finding(seed, number, kind, what, outcome.command, fault) if fault else None


def _command(trace: str, random: Random) -> list[str]:
    """A command that reads a trace, its path given in one of the ways people do."""
    return random.choice(
        (
            ["report", trace, "--format", "json"],
            ["report", trace, "--format", "json"],
            ["report", trace, "-o", "report.md", "--no-figures"],
            ["report", trace, "-o", "report.md"],
            ["report", "--no-figures", "-o", "report.md", trace, oracle.SOUND],
            ["kernels", trace, "--format", random.choice(("text", "csv", "json"))],
            ["info", trace],
            ["compare", trace, trace, "--force", "--format", random.choice(("text", "markdown", "json"))],
            ["share", trace, "-o", "shared.sqlite"],
            ["export", trace, "--format", random.choice(tuple(FORMATS))],
        )
    )


def _exports(bench: Bench, place: Path, random: Random) -> tuple[str, Outcome]:
    path = place / "capture.sqlite"
    shutil.copyfile(random.choice(bench.inputs.exports), path)
    shutil.copyfile(bench.inputs.exports[0], place / oracle.SOUND)
    said = [random.choice(exports.MUTATORS[2:])(path, random) for _ in range(random.choice((1, 1, 2, 4)))]
    if random.random() < 0.3:  # last: what is broken as a file cannot be changed as a database
        said.append(random.choice(exports.MUTATORS[:2])(path, random))
    return "; ".join(said), run(_command(path.name, random), place)


def _kineto(bench: Bench, place: Path, random: Random) -> tuple[str, Outcome]:
    path = place / "capture.json.gz"
    shutil.copyfile(random.choice(bench.inputs.kineto), path)
    shutil.copyfile(bench.inputs.exports[0], place / oracle.SOUND)
    return documents.kineto(path, random), run(_command(path.name, random), place)


def _sweep(bench: Bench, place: Path, random: Random) -> tuple[str, Outcome]:
    """A folder of runs whose manifest or timings are broken."""
    sweep = place / "sweep"
    shutil.copytree(bench.inputs.sweep, sweep, ignore=shutil.ignore_patterns("*.png"))
    manifests = sorted(sweep.glob("*/manifest.json"))
    if random.random() < 0.5:
        what = documents.json_file(random.choice(manifests), random)
    else:
        what = documents.csv(sweep / "timings.csv", random)
    formats = random.choice((["--format", "json"], ["-o", "report.md", "--no-figures"]))
    return what, run(["report", "sweep", *formats], place)


def _benches(bench: Bench, place: Path, random: Random) -> tuple[str, Outcome]:
    source = random.choice(bench.inputs.benches)
    shutil.copytree(source, place / source.name, ignore=shutil.ignore_patterns("*.png", "captures"))
    what = documents.json_lines(place / source.name / "bench.jsonl", random)
    formats = random.choice((["--format", "json"], ["-o", "report.md", "--no-figures"], ["-o", "report.md"]))
    return what, run(["report", source.name, *formats], place)


def _paths(bench: Bench, place: Path, random: Random) -> tuple[str, Outcome]:
    """A file whose name is odd, or that is no capture at all."""
    name = text(random).replace("/", "_").replace("\0", "")[:60].encode("utf-8", "surrogateescape")[:120]
    name = name.decode("utf-8", "ignore") + random.choice(("", ".sqlite", ".nsys-rep", ".json.gz", ".csv"))
    path = place / (name if name.strip(".") else "x.sqlite")
    content = random.choice((bench.inputs.exports[0].read_bytes(), b"", random.randbytes(2_000), b"SQLite format 3\0"))
    path.write_bytes(content)
    shutil.copyfile(bench.inputs.exports[0], place / oracle.SOUND)
    shown = random.choice((str(path), f"./{path.name}", "."))
    return repr(name), run(_command(shown, random), place)


KINDS: dict[str, Callable[[Bench, Path, Random], tuple[str, Outcome]]] = {
    "exports": _exports,
    "Kineto": _kineto,
    "sweeps": _sweep,
    "benches": _benches,
    "paths": _paths,
}

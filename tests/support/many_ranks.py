"""Makes captures of hundreds of ranks from the committed captures of two, with a slow rank, link or stage planted.

Every capture is a copy of a real rank's on a clock of its own. Time is inserted into all tables alike, so that a
capture stays consistent: into computation where a rank is slow, and into collectives where other ranks wait for it.
"""

from __future__ import annotations

import lzma
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

import numpy as np

Plant = Literal["rank", "link", "stage"]
#: The packed captures of the two ranks that the copies are made from.
SOURCES = {"rank": "usual_buckets", "link": "tensor", "stage": "pipeline"}
CAPTURES = Path(__file__).parents[2] / "examples" / "ranks" / "captures"
WORLD, FIRST_PAIR, FIRST_STAGE = 7, 1_000, 500
#: The planted delay per step, and the largest random delay of a rank in a step, ns.
PLANTED_NS, LARGEST_JITTER_NS = 4_000_000, 300_000
_REDUCE_NS = 400_000
_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True)
class Planted:
    """The captures, in order of rank, and the ranks that are slow: one, or the two of a link."""

    paths: list[Path]
    ranks: tuple[int, ...]


@dataclass
class _Source:
    """A real rank's capture, with the times of its steps, collectives and other kernels, and of all other work."""

    db: sqlite3.Connection
    steps: list[tuple[int, int]] = field(init=False)
    collectives: np.ndarray = field(init=False)
    kernels: np.ndarray = field(init=False)
    work: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        name = "SELECT start, end FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId WHERE coalesce(text, value) = ?"
        self.steps = self.db.execute(f"{name} ORDER BY start", ("step",)).fetchall()
        kernels = "SELECT start, end FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = demangledName WHERE value"
        self.collectives, self.kernels = (
            np.array(self.db.execute(f"{kernels} {which} 'nccl%' ORDER BY start").fetchall(), np.int64)
            for which in ("LIKE", "NOT LIKE")
        )
        memory = "SELECT start, end FROM CUPTI_ACTIVITY_KIND_MEM"
        copies = self.db.execute(f"{memory}CPY UNION ALL {memory}SET").fetchall()
        self.work = np.array(sorted([*map(tuple, self.kernels.tolist()), *copies]), np.int64)

    def in_step(self, step: tuple[int, int]) -> np.ndarray:
        return self.collectives[(self.collectives[:, 0] >= step[0]) & (self.collectives[:, 0] < step[1])]

    def exposed(self, collective: Sequence[int]) -> int | None:
        """A moment at which only the collective runs; None if work hides it."""
        return self._moment(collective, self.work)

    def computing(self, begin: int, end: int) -> int | None:
        """A moment between two times at which a kernel runs and no collective does."""
        inside = (self.kernels[:, 0] > begin) & (self.kernels[:, 1] < end)
        longest = sorted(self.kernels[inside].tolist(), key=lambda kernel: kernel[0] - kernel[1])
        return next((moment for one in longest if (moment := self._moment(one, self.collectives))), None)

    def reduction_of(self, step: tuple[int, int]) -> int:
        """A moment behind the last collective of a step, and before the next step's, at which nothing runs."""
        last, later = int(self.in_step(step)[-1, 1]), self.collectives[self.collectives[:, 0] > step[1], 0]
        moment = self._moment((last, int(later.min(initial=step[1] + 10**7))), self.work)
        assert moment, "something always runs"
        return moment

    @staticmethod
    def _moment(wanted: Sequence[int], others: np.ndarray) -> int | None:
        """The middle of the longest part of an interval in which no other interval lies."""
        begin, end = wanted
        rows = others[(others[:, 1] > begin) & (others[:, 0] < end)]
        edges = [begin, *np.clip(np.maximum.accumulate(rows[:, 1]), begin, end).tolist()]
        gaps = [(stop - at, (at + stop) // 2) for at, stop in zip(edges, [*rows[:, 0].tolist(), end], strict=True)]
        length, middle = max(gaps)
        return middle if length > 1_000 else None


#: Time to insert: at which time of the source, and how long, ns.
Insertions = list[tuple[int, int]]


def make_ranks(folder: Path, plant: Plant, count: int = 256, seed: int = 0) -> Planted:
    """Writes the captures of ``count`` ranks, of which one rank, one link of two ranks, or one stage is slow."""
    random = Random(seed)
    slow = random.randrange(count)
    sources = [_open(CAPTURES / f"{SOURCES[plant]}_rank{rank}.sqlite.xz") for rank in (0, 1)]
    paths = []
    insertions = {"rank": _slow_rank, "link": _slow_link, "stage": _slow_stage}[plant](sources, count, slow, random)
    for rank, (source, inserted) in enumerate(insertions):
        path = folder / f"{plant}_rank{rank}.sqlite"
        _write(source, path, rank, count, inserted, offset_ns=random.randrange(10**9), plant=plant)
        paths.append(path)
    return Planted(paths, (slow & ~1, slow | 1) if plant == "link" else (slow,))


def _slow_rank(
    sources: Sequence[_Source], count: int, slow: int, random: Random
) -> Iterator[tuple[_Source, Insertions]]:
    """Each rank computes for a random time longer, and the slow one for longer still; the others wait for it."""
    source = sources[0]
    places = [_compute_and_wait(source, step) for step in source.steps]
    delays = [[random.randrange(LARGEST_JITTER_NS) for _ in range(count)] for _ in places]
    for of_step in delays:
        of_step[slow] += PLANTED_NS
    for rank in range(count):
        rows = zip(places, delays, strict=True)
        yield source, [
            pair for (compute, wait), of_step in rows
            for pair in ((compute, of_step[rank]), (wait, max(of_step) - of_step[rank]))
        ]  # fmt: skip


def _compute_and_wait(source: _Source, step: tuple[int, int]) -> tuple[int, int]:
    """Two moments of a step: one at which the rank computes, and one at which it waits in the next collective."""
    before = step[0]
    for collective in source.in_step(step).tolist():
        compute, wait = source.computing(before, collective[0]), source.exposed(collective)
        if compute and wait:
            return compute, wait
        before = collective[1]
    raise ValueError("No collective of this step is exposed, with computation before it.")


def _slow_link(
    sources: Sequence[_Source], count: int, slow: int, random: Random
) -> Iterator[tuple[_Source, Insertions]]:
    """The ranks exchange in pairs, and all together at the end of a step. One pair transfers for twice as long."""
    source, jitter = sources[0], Random(random.random())
    for rank in range(count):
        inserted = []
        for collectives in np.split(source.collectives, len(source.steps)):
            *of_pair, of_all = collectives.tolist()
            longer = [((begin + end) // 2, end - begin) for begin, end in of_pair]
            own = jitter.randrange(LARGEST_JITTER_NS)
            compute = source.computing(of_pair[-1][1], of_all[0])
            assert compute
            wait = LARGEST_JITTER_NS - own
            if rank // 2 == slow // 2:
                inserted += longer
            else:
                wait += sum(ns for _, ns in longer)
            inserted += [(compute, own), ((of_all[0] + of_all[1]) // 2, wait)]
        yield source, inserted


def _slow_stage(
    sources: Sequence[_Source], count: int, slow: int, random: Random
) -> Iterator[tuple[_Source, Insertions]]:
    """Pairs of ranks are the stages of a pipeline, whose replicas reduce their gradients at the end of a step."""
    jitter, ends = Random(random.random()), [source.collectives[:, 1] for source in sources]
    planted, other = sources[slow % 2], sources[1 - slow % 2]
    ahead = int(np.median(ends[1 - slow % 2] - ends[slow % 2]))  # the other clock
    moments_of_steps = []  # at which the slow stage computes while the other one waits for it
    for step in other.steps:
        rows = (other.in_step(step) - ahead).tolist()
        moments_of_steps.append([moment for row in rows if (moment := planted.computing(*row))])
    for rank in range(count):
        inserted = []
        for step, moments in zip(sources[rank % 2].steps, moments_of_steps, strict=True):
            is_of_slow, own = rank // 2 == slow // 2, jitter.randrange(LARGEST_JITTER_NS)
            if is_of_slow:
                shift = 0 if rank == slow else ahead
                inserted += [(moment + shift, PLANTED_NS // len(moments)) for moment in moments]
            wait = LARGEST_JITTER_NS - own + (0 if is_of_slow else PLANTED_NS)
            at = sources[rank % 2].reduction_of(step)
            inserted += [(at - 30, own), (at - 10, wait + _REDUCE_NS)]
        yield sources[rank % 2], inserted


def _open(packed: Path) -> _Source:
    db = sqlite3.connect(":memory:")
    db.deserialize(lzma.decompress(packed.read_bytes()))
    return _Source(db)


def _write(
    source: _Source, path: Path, rank: int, count: int, inserted: Insertions, offset_ns: int, plant: Plant
) -> None:
    """Writes a rank's capture: with its own clock, process, communicators and peer, and the inserted time."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.deserialize(source.db.serialize())
    pid = (rank + 100) << 24
    if plant == "stage":  # a reduction of gradients that no capture of a pipeline alone has
        (text,) = db.execute("SELECT max(id) + 1 FROM StringIds").fetchone()
        db.execute("INSERT INTO StringIds VALUES (?, ?)", (text, _REDUCE))
        for number, step in enumerate(source.steps):
            end = source.reduction_of(step)
            launch = min(end, step[1]) - 25
            correlation = 900_000_000 + number
            db.execute("INSERT INTO NCCL_CALLS SELECT ?, globalTid, 'ncclAllReduce', ?, 1 << 20, -1 FROM NCCL_CALLS "
                       "LIMIT 1", (launch, FIRST_STAGE + rank % 2))  # fmt: skip
            for table, times in (("RUNTIME", (launch + 1, launch + 3)), ("KERNEL", (end - 15, end - 5))):
                columns = [row[1] for row in db.execute(f"PRAGMA table_info(CUPTI_ACTIVITY_KIND_{table})")]
                changed = {"start": times[0], "end": times[1], "correlationId": correlation, "demangledName": text}
                values = ", ".join(str(changed.get(column, f'"{column}"')) for column in columns)
                db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} SELECT {values} FROM CUPTI_ACTIVITY_KIND_{table} "
                           "WHERE correlationId = (SELECT correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds "
                           "ON id = demangledName WHERE value LIKE 'nccl%SendRecv%' LIMIT 1) LIMIT 1")  # fmt: skip
    later = " + ".join(f"(start > {at}) * {ns}" for at, ns in inserted)
    for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        columns = {row[1] for row in db.execute(f'PRAGMA table_info("{table}")')}
        times = columns & {"start", "end"}
        moved = [f"{time} = {time} + {offset_ns} + {later.replace('start', time)}" for time in sorted(times)]
        moved += [f"{key} = {key} + {pid}" for key in sorted(columns & {"globalPid", "globalTid"})]
        moved += [f"pid = {rank + 100}"] if "pid" in columns else []
        if moved:
            db.execute(f'UPDATE "{table}" SET {", ".join(moved)}')
    process = "(SELECT globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL LIMIT 1)"
    db.execute(f"UPDATE PROCESS_RANKS SET globalPid = {process}, rank = ?, worldSize = ?", (rank, count))
    pair = FIRST_PAIR + rank // 2
    if plant == "rank":
        db.execute("UPDATE NCCL_CALLS SET communicator = ?", (WORLD,))
    elif plant == "stage":
        db.execute("UPDATE NCCL_CALLS SET communicator = ? WHERE peer >= 0", (pair,))
    else:
        per_step = len(source.collectives) // len(source.steps)
        numbered = "SELECT rowid, row_number() OVER (ORDER BY start) % ? AS place FROM NCCL_CALLS"
        last = f"SELECT rowid FROM ({numbered}) WHERE place = 0"
        db.execute("UPDATE NCCL_CALLS SET communicator = ?", (pair,))
        db.execute(f"UPDATE NCCL_CALLS SET communicator = ? WHERE rowid IN ({last})", (WORLD, per_step))
    path.write_bytes(db.serialize())
    db.close()

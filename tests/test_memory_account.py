"""The account of a GPU's memory: the peak and its parts, what grows, and why an allocation failed."""

from __future__ import annotations

import gzip
import lzma
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsys_analyzer.analysis.memory.account import MemoryAccount, MemoryPhase
from nsys_analyzer.analysis.memory.accounting import account_memory
from nsys_analyzer.trace.memory_snapshot import read_snapshot
from tests.conftest import DATA
from tests.support.commands import make_command_test
from tests.support.export import AUTOGRAD, Export, training_step
from tests.support.snapshot import BACKWARD, OPTIMIZER, OUTSIDE, Snapshot, forward

KIB, MIB = 2**10, 2**20
STATE = 0x9000_0000


def parts_of(account: MemoryAccount) -> dict[str, int]:
    return {part.category: part.bytes for part in account.parts}


def training(steps: int, *, kept: int = 0, last: int | None = None) -> Snapshot:
    """A training of a weight of 1 MiB, with 4 + 2 MiB of activations, a gradient, and a state of the optimizer.

    Each step leaves blocks of ``kept`` bytes behind. The last step ends after ``last`` of its events.
    """
    snapshot = Snapshot()
    snapshot.segment(0x1000, 2 * MIB, (MIB, MIB, "active_allocated"), (MIB, MIB, "inactive"))  # the weight
    for step in range(steps):
        if kept:
            snapshot.alloc(0x5000_0000 + step * MIB, kept, forward(9))
        snapshot.alloc(0x1000_0000, 4 * MIB, forward(10)).alloc(0x2000_0000, 2 * MIB, forward(11))
        snapshot.alloc(0x2800_0000, 512 * KIB, forward(12)).free(0x2800_0000, 512 * KIB)
        if step == steps - 1 and last == 0:
            return snapshot
        snapshot.alloc(0x3000_0000, MIB, BACKWARD).free(0x2000_0000, 2 * MIB)  # the gradient
        snapshot.alloc(0x3800_0000, 3 * MIB, BACKWARD).free(0x3800_0000, 3 * MIB).free(0x1000_0000, 4 * MIB)
        if step == 0:
            snapshot.alloc(STATE, MIB, OPTIMIZER)
        snapshot.alloc(0x4000_0000, 256 * KIB, OPTIMIZER).free(0x4000_0000, 256 * KIB)
        snapshot.free(0x3000_0000, MIB)
    return snapshot


def test_what_fills_the_peak_of_a_training(tmp_path: Path) -> None:
    account = account_memory(training(3).read(tmp_path))
    # In backward of the second step: weight 1, state 1, activation 4, gradient 1, and a temporary of 3 MiB. In the
    # first step, there is no state yet. In forward, it is 1 + 1 + 4 + 2 + 0.5.
    assert account.peak.allocated_bytes == 10 * MIB
    assert parts_of(account) == {
        "weights": MIB, "gradients": MIB, "optimizer state": MIB, "activations": 4 * MIB, "temporaries": 3 * MIB,
    }  # fmt: skip
    assert (account.steps, account.peak.phase, account.peak.step) == (3, "backward", 1)
    largest = next(line for line in account.lines if line.category == "activations")
    assert (largest.place.line, largest.place.called_from) == ("model.py:10 (forward)", "")
    assert (account.growth, account.out_of_memory) == ((), ())


def test_a_peak_in_forward_names_its_line(tmp_path: Path) -> None:
    snapshot = Snapshot().segment(0x1000, 2 * MIB, (MIB, MIB, "active_allocated"), (MIB, MIB, "inactive"))
    snapshot.alloc(0x1000_0000, 4 * MIB, forward(10)).alloc(0x2000_0000, 512 * KIB, forward(12))
    snapshot.free(0x2000_0000, 512 * KIB).free(0x1000_0000, 4 * MIB)
    account = account_memory(snapshot.read(tmp_path))
    # Only a forward pass: there are no gradients that tell weights. 1 + 4 + 0.5 MiB.
    assert account.peak.allocated_bytes == 5 * MIB + 512 * KIB
    assert parts_of(account) == {"temporaries": 4 * MIB + 512 * KIB, "held": MIB}
    assert (account.peak.phase, account.steps) == ("forward", None)
    assert account.peak.place.line == "model.py:12 (forward)"


def test_ranges_replace_the_phases_of_the_stacks(tmp_path: Path) -> None:
    snapshot = training(1).read(tmp_path)
    times = snapshot.events.time_ns
    # The first four events are allocations and releases of forward, the rest is called backward here.
    ranges = [
        MemoryPhase("forward", 4, int(times[0]), int(times[4])),
        MemoryPhase("backward", 4, int(times[4]), int(times[-1])),
    ]
    account = account_memory(snapshot, ranges)
    assert (account.phases_from, account.peak.phase, account.peak.step) == ("ranges", "backward", 4)


def test_a_batch_that_is_copied_between_two_steps_belongs_to_the_next_step(tmp_path: Path) -> None:
    snapshot, ranges = Snapshot().alloc(0x1000, MIB, OUTSIDE), []  # the weight, before the first range
    for step in range(4):
        # The new batch replaces the old one, and lives until the batch of the next step has been copied.
        snapshot.alloc(0x5000_0000 + step * MIB, MIB, OUTSIDE)
        if step:
            snapshot.free(0x5000_0000 + (step - 1) * MIB, MIB)
        starts = [1_000_000 + 1_000 * len(snapshot.events)]
        snapshot.alloc(0x1000_0000, 4 * MIB, forward(10)).alloc(0x2000_0000, MIB, forward(11)).free(0x2000_0000, MIB)
        starts.append(1_000_000 + 1_000 * len(snapshot.events))
        snapshot.alloc(0x3000_0000, MIB, BACKWARD).free(0x1000_0000, 4 * MIB)
        starts.append(1_000_000 + 1_000 * len(snapshot.events))
        snapshot.alloc(0x4000_0000, KIB, OPTIMIZER).free(0x4000_0000, KIB)
        ends = [*starts[1:], 1_000_000 + 1_000 * len(snapshot.events)]
        names = ("forward", "backward", "optimizer")
        ranges += [MemoryPhase(*part) for part in zip(names, [step] * 3, starts, ends, strict=True)]
        ranges.append(MemoryPhase("step", step, starts[0], ends[-1]))
        snapshot.free(0x3000_0000, MIB)
    account = account_memory(snapshot.read(tmp_path), ranges)
    # At the peak in the first step: the weight, 4 MiB, a temporary of 1 MiB, and the batch from before the first range.
    assert account.peak.allocated_bytes == 7 * MIB
    assert parts_of(account) == {"weights": MIB, "activations": 4 * MIB, "temporaries": MIB, "held": MIB}
    assert account.growth == ()


def test_two_passes_in_a_step(tmp_path: Path) -> None:
    snapshot = Snapshot()
    for _ in range(2):
        for _ in range(2):
            snapshot.alloc(0x1000_0000, 4 * MIB, forward(10)).alloc(0x2000_0000, 9 * MIB, forward(11))
            snapshot.free(0x2000_0000, 9 * MIB).alloc(0x3000_0000, MIB, BACKWARD).free(0x3000_0000, MIB)
            snapshot.free(0x1000_0000, 4 * MIB)
        snapshot.alloc(0x4000_0000, MIB, BACKWARD).alloc(0x5000_0000, KIB, OPTIMIZER).free(0x5000_0000, KIB)
        snapshot.alloc(0x6000_0000, 10 * MIB, forward(12)).free(0x4000_0000, MIB).free(0x6000_0000, 10 * MIB)
    account = account_memory(snapshot.read(tmp_path))
    # The peak is 4 + 9 MiB in the first pass; the block of the second pass is the same.
    assert parts_of(account) == {"activations": 4 * MIB, "temporaries": 9 * MIB}


def test_without_stacks_nothing_is_guessed(tmp_path: Path) -> None:
    snapshot = Snapshot().segment(0x1000, MIB, (MIB, MIB, "active_allocated"))
    snapshot.alloc(0x1000_0000, MIB).free(0x1000_0000, MIB)
    account = account_memory(snapshot.read(tmp_path))
    assert (account.phases_from, account.steps, account.peak.phase) == (None, None, None)
    assert parts_of(account) == {"held": MIB, "unknown": MIB}


def test_what_each_step_leaves_behind_grows(tmp_path: Path) -> None:
    account = account_memory(training(5, kept=MIB).read(tmp_path))
    # The block of the last step is still in use, too, but it could be an activation: 4 steps × 1 MiB.
    (growth,) = account.growth
    assert (growth.place.line, growth.bytes_per_step, growth.steps) == ("model.py:9 (forward)", MIB, 4)
    assert growth.held_bytes == 4 * MIB
    # At the peak in the last step, three older steps have certainly left 1 MiB each, and the fourth as well.
    assert parts_of(account)["kept"] == 4 * MIB


@pytest.mark.parametrize(("steps", "kept"), [(5, 0), (3, MIB), (5, 512)])
def test_too_few_steps_or_bytes_are_no_growth(tmp_path: Path, steps: int, kept: int) -> None:
    # 512 bytes of 10 MiB are below a thousandth: numbers that a log keeps.
    assert account_memory(training(steps, kept=kept).read(tmp_path)).growth == ()


def test_a_ring_of_buffers_is_no_growth(tmp_path: Path) -> None:
    snapshot = training(1)
    for step in range(1, 9):
        snapshot.alloc(0x5000_0000 + step * MIB, MIB, forward(9)).alloc(0x3000_0000, MIB, BACKWARD)
        if step > 3:  # each step replaces the block of the third step before
            snapshot.free(0x5000_0000 + (step - 3) * MIB, MIB)
        snapshot.alloc(0x4000_0000, KIB, OPTIMIZER).free(0x4000_0000, KIB).free(0x3000_0000, MIB)
    assert account_memory(snapshot.read(tmp_path)).growth == ()


def failing(**options: Any) -> Snapshot:
    """A forward pass with little memory left. Three segments of 4 MiB have 1 + 2 MiB, 2 MiB, and 0 bytes unused."""
    snapshot = Snapshot(**options)
    base = 0x1000_0000
    snapshot.segment(base, 4 * MIB, (MIB, MIB, "active_allocated"), (MIB, 0, "inactive"))
    snapshot.segments[-1]["blocks"] += [
        {"address": base + 2 * MIB, "size": 2 * MIB, "requested_size": 0, "state": "inactive", "frames": []}
    ]
    snapshot.segment(base + 8 * MIB, 4 * MIB, (2 * MIB, 2 * MIB, "active_allocated"), (2 * MIB, 0, "inactive"))
    snapshot.segment(base + 16 * MIB, 4 * MIB, (4 * MIB, 4 * MIB, "active_allocated"))
    snapshot.alloc(base + 8 * MIB, 2 * MIB, forward(3)).alloc(base + 16 * MIB, 4 * MIB, forward(4))
    return snapshot


def test_fragmentation_explains_a_failure(tmp_path: Path) -> None:
    account = account_memory(failing().add("oom", MIB, 4 * MIB, forward(5)).read(tmp_path))
    (failure,) = account.out_of_memory
    assert (failure.requested_bytes, failure.device_free_bytes, failure.is_limited) == (4 * MIB, MIB, False)
    moment = failure.moment
    # 12 MiB are held, 1 + 2 + 4 in use: 5 MiB are unused, in pieces of 3 (the first segment) and 2 MiB.
    assert (moment.reserved_bytes, moment.allocated_bytes) == (12 * MIB, 7 * MIB)
    assert (moment.fragmented_bytes, moment.cached_bytes, moment.largest_free_bytes) == (5 * MIB, 0, 3 * MIB)
    assert moment.place.line == "model.py:5 (forward)"
    remedies = {remedy.kind: (remedy.bytes, remedy.is_enough) for remedy in failure.remedies}
    assert remedies["expandable_segments"] == (5 * MIB, True)


def test_a_limit_of_the_process_explains_a_failure(tmp_path: Path) -> None:
    snapshot = failing(expandable_segments=True).add("oom", 2**36, 3 * MIB, forward(5))
    (failure,) = account_memory(snapshot.read(tmp_path)).out_of_memory
    assert failure.is_limited
    assert [remedy.kind for remedy in failure.remedies][-1] == "limit"
    assert "expandable_segments" not in [remedy.kind for remedy in failure.remedies]


def test_a_failure_is_explained_by_what_was_held_when_it_occurred(tmp_path: Path) -> None:
    # The segment of 4 MiB at the end was made after the failure, one of 2 MiB was given back, and the block is new.
    snapshot = Snapshot().segment(0x1000_0000, 4 * MIB, (4 * MIB, 4 * MIB, "active_allocated"))
    snapshot.add("segment_alloc", 0x2000_0000, 2 * MIB).alloc(0x2000_0000, MIB, forward(3))
    snapshot.add("oom", 0, 4 * MIB, forward(4)).free(0x2000_0000, MIB).add("segment_free", 0x2000_0000, 2 * MIB)
    snapshot.add("segment_alloc", 0x1000_0000, 4 * MIB).alloc(0x1000_0000, 4 * MIB, forward(4))
    (failure,) = account_memory(snapshot.read(tmp_path)).out_of_memory
    assert (failure.moment.reserved_bytes, failure.moment.allocated_bytes) == (2 * MIB, MIB)


def test_an_expandable_segment_shrinks_when_its_growth_is_undone(tmp_path: Path) -> None:
    snapshot = Snapshot().segment(0x1000_0000, 6 * MIB, (6 * MIB, 6 * MIB, "active_allocated"))
    snapshot.add("segment_map", 0x1000_0000, 2 * MIB).add("oom", 0, 4 * MIB, forward(4))
    snapshot.add("segment_map", 0x1000_0000 + 2 * MIB, 4 * MIB).alloc(0x1000_0000, 6 * MIB, forward(4))
    (failure,) = account_memory(snapshot.read(tmp_path)).out_of_memory
    assert failure.moment.reserved_bytes == 2 * MIB


SIZES = st.integers(1, 4 * MIB)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    operations=st.lists(
        st.tuples(st.integers(0, 6), SIZES, st.sampled_from([forward(3), forward(4), BACKWARD, OPTIMIZER, OUTSIDE])),
        min_size=1, max_size=60,
    )
)  # fmt: skip
def test_parts_add_up_to_the_peak_of_a_running_sum(tmp_path: Path, operations: list[Any]) -> None:
    snapshot, live, level, peak = Snapshot(), dict[int, int](), 0, 0
    for slot, size, stack in operations:
        address = 0x1000_0000 + slot * 16 * MIB
        if address in live:
            level -= -(-live[address] // 512) * 512
            snapshot.free(address, live.pop(address))
        else:
            level += -(-size // 512) * 512
            snapshot.alloc(address, size, stack)
            live[address] = size
        peak = max(peak, level)
    for address, size in live.items():
        snapshot.segment(address, 16 * MIB, (-(-size // 512) * 512, size, "active_allocated"))
    account = account_memory(snapshot.read(tmp_path))
    assert account.peak.allocated_bytes == peak
    assert sum(part.bytes for part in account.parts) == sum(line.bytes for line in account.lines) == peak
    assert all(0 < part.bytes <= peak for part in account.parts)


def replay(document: dict[str, Any]) -> tuple[int, int, int]:
    """The peak, what PyTorch holds then, and the bytes of blocks from before the recording, in plain Python."""

    def round_up(size: int) -> int:
        return -(-size // 512) * 512

    events = document["device_traces"][0]
    blocks = {
        block["address"]: block["size"]
        for segment in document["segments"]
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    last_allocation = {event["addr"]: i for i, event in enumerate(events) if event["action"] == "alloc"}
    last_free = {event["addr"]: i for i, event in enumerate(events) if event["action"] == "free_completed"}
    at_end = {address for address, i in last_allocation.items() if last_free.get(address, -1) < i}
    older = sum(size for address, size in blocks.items() if address not in at_end)
    level = peak = older
    held = sum(segment["total_size"] for segment in document["segments"])
    held -= sum(event["size"] for event in events if event["action"] == "segment_alloc")
    held += sum(event["size"] for event in events if event["action"] == "segment_free")
    held_at_peak = held
    for i, event in enumerate(events):
        is_last = event.get("addr") in at_end and last_allocation[event["addr"]] == i
        size = blocks[event["addr"]] if is_last else round_up(event["size"])
        level += {"alloc": size, "free_completed": -size}.get(event["action"], 0)
        held += {"segment_alloc": size, "segment_free": -size}.get(event["action"], 0)
        if level > peak:
            peak, held_at_peak = level, held
    return peak, held_at_peak, older


@pytest.mark.parametrize("name", ["healthy", "oom"])
def test_the_peak_of_a_real_training_is_that_of_plain_python(name: str) -> None:
    path = DATA / "memory" / f"{name}.pickle.xz"
    account = account_memory(read_snapshot(path))
    peak, held, older = replay(pickle.loads(lzma.decompress(path.read_bytes())))
    assert (account.peak.allocated_bytes, account.peak.reserved_bytes) == (peak, held)
    old_parts = ("weights", "optimizer state", "held")
    assert sum(part.bytes for part in account.parts if part.category in old_parts) == older
    # AdamW keeps two numbers for each weight, and the allocator does not round them up by more than 1 MiB each.
    parts = parts_of(account)
    assert parts["optimizer state"] == pytest.approx(2 * parts["weights"], rel=0.01)


def test_a_real_training_that_keeps_its_losses() -> None:
    account = account_memory(read_snapshot(DATA / "memory" / "oom.pickle.xz"))
    (failure,) = account.out_of_memory
    # The logits in fp32: 4,096 tokens × 32,000 words × 4 bytes = 524,288,000 bytes.
    assert failure.requested_bytes == 4_096 * 32_000 * 4
    assert failure.is_limited
    assert [(remedy.kind, remedy.is_enough) for remedy in failure.remedies] == [("growth", True)]
    assert account.growth[0].place.line == "loss/loss_utils.py:40 (fixed_cross_entropy)"
    assert {row.place.called_from for row in account.growth} == {"train.py:19"}
    assert account_memory(read_snapshot(DATA / "memory" / "healthy.pickle.xz")).growth == ()


def write_files(folder: Path) -> None:
    snapshot = training(3).write(folder / "snapshot.pickle").read_bytes()
    for name in ("capture", "recorded", "damaged"):
        training_step(Export().thread(AUTOGRAD, "pt_autograd_0").gpu()).write(folder / f"{name}.sqlite")
    (folder / "recorded.memory.pickle.gz").write_bytes(gzip.compress(snapshot))
    (folder / "damaged.memory.pickle.gz").write_bytes(gzip.compress(snapshot)[:99])
    (folder / "text.pickle").write_text("no snapshot", encoding="utf-8")


test_commands = make_command_test("memory", prepare=write_files)

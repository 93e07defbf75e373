"""The reader of PyTorch's memory snapshots: what it reads, and what it refuses."""

from __future__ import annotations

import gzip
import lzma
import pickle
import pickletools
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsys_analyzer.errors import TraceError
from nsys_analyzer.trace.memory_snapshot import ACTIONS, MemorySnapshot, read_snapshot
from tests.conftest import DATA
from tests.support.snapshot import OPTIMIZER, OUTSIDE, Snapshot, forward

STACKS = ((), OUTSIDE, OPTIMIZER, forward(3), forward(4))


def rows_of(snapshot: MemorySnapshot) -> list[tuple[Any, ...]]:
    """The events as Python's own unpickler would give them: time in µs, and the stack as pairs of file and line."""
    events = snapshot.events
    columns = (events.device, events.action, events.address, events.size_bytes, events.time_ns // 1_000, events.stack)
    return [
        (device, [*ACTIONS, "other"][action], address, size, time,
         [(frame.function, frame.file, frame.line) for frame in snapshot.list_frames(stack)])
        for device, action, address, size, time, stack in zip(*(column.tolist() for column in columns), strict=True)
    ]  # fmt: skip


def expected_rows(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    rows = []
    for device, trace in enumerate(document["device_traces"]):
        for event in trace:
            action = event["action"] if event["action"] in ACTIONS else "other"
            address = event["device_free"] if action == "oom" else event["addr"]
            frames = [(frame["name"], frame["filename"], frame["line"]) for frame in event["frames"]]
            rows.append((device, action, address, event["size"], event["time_us"], frames))
    return rows


@pytest.mark.parametrize("name", ["healthy", "oom"])
def test_a_real_snapshot_is_read_as_python_reads_it(name: str) -> None:
    path = DATA / "memory" / f"{name}.pickle.xz"
    document = pickle.loads(lzma.decompress(path.read_bytes()))
    snapshot = read_snapshot(path)
    assert rows_of(snapshot) == expected_rows(document)
    assert snapshot.segments.size_bytes.tolist() == [row["total_size"] for row in document["segments"]]
    blocks = [block for row in document["segments"] for block in row["blocks"] if block["state"] != "inactive"]
    assert snapshot.live_blocks.address.tolist() == [block["address"] for block in blocks]
    assert len(snapshot.annotations) * 2 == len(document["external_annotations"])


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "free_completed", "oom", "snapshot"]),
        st.integers(0, 2**47),
        st.integers(0, 2**40),
        st.sampled_from(STACKS),
    ),
    max_size=40,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces=st.lists(EVENTS, min_size=1, max_size=3), repeats=st.sampled_from([1, 60]), protocol=st.integers(2, 5))
def test_events_are_moved_into_columns_whatever_the_frames_of_the_file(
    tmp_path: Path, traces: list[Any], repeats: int, protocol: int
) -> None:
    # 60 repeats of 40 events of 3 GPUs are about 500 KB: several frames of 64 KiB, and batches of 1,000 events.
    parts = []
    for trace in traces:
        part = Snapshot()
        for action, address, size, stack in trace * repeats:
            part.add(action, address, size, stack)
        parts.append(part.events)
    document = Snapshot().document | {"device_traces": parts}
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(document, protocol))
    assert rows_of(read_snapshot(path)) == expected_rows(document)


def test_events_are_moved_while_the_file_is_read(tmp_path: Path) -> None:
    part = Snapshot()
    for i in range(20_000):
        part.alloc(i << 10, 512)
    path = part.write(tmp_path / "snapshot.pickle")

    def measure_peak(read: Callable[[], object]) -> int:
        tracemalloc.start()
        read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    # An event of Python has a dictionary of 400 bytes, a list, and numbers of 32 bytes; an empty dictionary has 64.
    whole_peak = measure_peak(lambda: pickle.loads(path.read_bytes()))
    assert measure_peak(lambda: read_snapshot(path)) < 0.7 * whole_peak


def test_compressed_snapshots(tmp_path: Path) -> None:
    plain = Snapshot().alloc(0x1000, 512).write(tmp_path / "plain.pickle").read_bytes()
    zstd = pa.compress(plain, "zstd", asbytes=True)
    for name, data in (("a.gz", gzip.compress(plain)), ("a.xz", lzma.compress(plain)), ("a.zst", zstd)):
        (tmp_path / name).write_bytes(data)
        assert read_snapshot(tmp_path / name).events.address.tolist() == [0x1000]
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(TraceError, match="is damaged"):
            read_snapshot(tmp_path / name)


class _Harm:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("place", ["device_traces", "segments", "other"])
def test_a_pickle_with_code_is_refused_in_one_line(tmp_path: Path, protocol: int, place: str) -> None:
    path, touched = tmp_path / "bad.pickle", tmp_path / "touched"
    path.write_bytes(pickle.dumps(Snapshot().document | {place: [_Harm(touched)]}, protocol))
    with pytest.raises(
        TraceError, match=r"bad.pickle is refused: it is a pickle that names [\w.]+, which could run"
    ) as error:
        read_snapshot(path)
    assert "\n" not in str(error.value)
    assert not touched.exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "ends too early"),
        (b"no pickle at all", "is damaged or is no memory snapshot"),
        (pickle.dumps([1, 2]), "is no memory snapshot"),
        (pickle.dumps({"segments": 1, "device_traces": [[1]]}), "is damaged"),
        (pickle.dumps({"segments": [{}], "device_traces": []}), "is damaged"),
        (b"\x80\x04\x8c\x01xQ.", "refers to objects outside of it"),  # a persistent ID
        (b"\x80\x04\x82\x01.", "is damaged"),  # a registered class
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.", "impossible size"),  # a frame of 8 EiB
        (b"\x80\x04K\x01K\x02R.", "is damaged"),  # calls the number 1
    ],
)
def test_what_is_no_snapshot_is_refused_in_one_line(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=why) as error:
        read_snapshot(path)
    assert "\n" not in str(error.value)


def test_a_snapshot_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.pickle"
    whole = Snapshot().alloc(0x1000, 512, forward(3)).segment(0x1000, 2**21, (512, 512, "active_allocated")).write(path)
    data = whole.read_bytes()
    assert pickletools.optimize(data)  # the file is a whole pickle
    for size in range(len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(TraceError):
            read_snapshot(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.pickle", "does not exist"), (tmp_path, "is not a regular file")):
        with pytest.raises(TraceError, match=why):
            read_snapshot(path)

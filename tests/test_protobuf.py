"""Messages written by numpy against those of Google's library."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from nsys_analyzer.export.perfetto_packets import (
    encode_fixed64,
    encode_if,
    encode_message,
    encode_number,
    encode_text,
    take_rows,
    to_bytes,
)

times = st.integers(0, 2**63 - 1)
values = st.integers(-(2**63), 2**63 - 1)
rows = st.lists(st.tuples(times, values, st.booleans(), st.integers(0, 3)), min_size=1, max_size=20)
TEXTS = ("", "ä", "x" * 127, "y" * 128)


def column(found: list[int]) -> np.ndarray:
    return np.array(found, np.int64)


@given(rows)
def test_messages_are_those_of_the_library(found: list[tuple[int, int, bool, int]]) -> None:
    """Every kind of field, some left out of some messages, in messages inside messages."""
    time, value, present, which = (list(one) for one in zip(*found, strict=True))
    expected = Trace()
    for at, count, is_there, chosen in found:
        packet = expected.packet.add(timestamp=at, trusted_packet_sequence_id=7)
        packet.track_event.counter_value = count
        if is_there:
            packet.track_event.debug_annotations.add(name_iid=chosen, int_value=count)
            packet.track_event.flow_ids.append(at)
        packet.track_event.name = TEXTS[3]
    annotation = encode_message(4, encode_number(1, column(which)), encode_number(4, column(value)))
    event = encode_message(
        11,
        encode_number(30, column(value)),
        encode_if(np.array(present), annotation),
        encode_if(np.array(present), encode_fixed64(47, column(time))),
        encode_text(23, TEXTS[3]),
    )
    ours = to_bytes(encode_message(1, encode_number(8, column(time)), encode_number(10, 7), event))
    read = Trace()
    read.ParseFromString(ours)
    assert read == expected
    assert len(ours) == expected.ByteSize()  # no number takes more bytes than it needs


@given(st.lists(st.integers(0, 3), max_size=10))
def test_what_is_encoded_once_serves_many_messages(index: list[int]) -> None:
    once = tuple(
        part for field in (encode_number(1, column([1, 200, 70_000, 2**40])), encode_text(2, "x")) for part in field
    )
    packets = encode_message(1, encode_number(10, 1), encode_message(60, take_rows(once, column(index))))
    read = Trace()
    read.ParseFromString(to_bytes(packets) if index else b"")
    assert [(one.track_descriptor.uuid, one.track_descriptor.name) for one in read.packet] == [
        ([1, 200, 70_000, 2**40][i], "x") for i in index
    ]


@pytest.mark.parametrize("content", TEXTS)
def test_texts(content: str) -> None:
    read = Trace()
    read.ParseFromString(to_bytes(encode_message(1, encode_message(60, encode_text(2, content)))))
    assert read.packet[0].track_descriptor.name == content

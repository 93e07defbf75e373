"""Tests which occurrences of a phase are measured."""

from __future__ import annotations

from tests.support.cases import Capture, make_case_test
from tests.support.export import global_pid


def open_phases(capture: Capture) -> list[tuple[str, ...]]:
    return [tuple(capture.attributed.find_open_phases(global_pid(pid))) for pid in (100, 200)]


test_instances = make_case_test(
    "instances",
    {
        "phases with backward": lambda capture: {
            one.phase: (one.instances, one.holds_backward) for one in capture.summary.phases
        },
        "open phases": open_phases,
        "open warm-ups": lambda capture: [capture.attributed.count_open_warmups(global_pid(pid)) for pid in (100, 200)],
        "out of memory": lambda capture: [capture.attributed.ran_out_of_memory(global_pid(pid)) for pid in (100, 200)],
        "nested phases": lambda capture: [
            dict(capture.attributed.count_nested_phases(global_pid(pid))) for pid in (100, 200)
        ],
        "warnings of crossing phases": lambda capture: [
            text.partition(" A pop ")[0] for text in capture.warnings if "popped" in text
        ],
    },
)

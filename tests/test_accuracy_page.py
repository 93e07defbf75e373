"""What the page on accuracy counts: pairs whose capture is of the program that was timed, in two halves."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="the descriptions of the faults are in programs that need PyTorch")

accuracy: Any = importlib.import_module("accuracy")
#: The unprofiled times in examples/faults.
MEASURED = msgspec.json.decode(
    (accuracy.FOLDER / "measured.json").read_bytes(), type=dict[str, dict[str, accuracy.Measured]]
)


@pytest.fixture(scope="module")
def waiting() -> Any:
    """The encoder that reads the norm of each parameter: a fault of the host, which leaves the kernels unchanged."""
    return accuracy.pair_of("encoder", "item", MEASURED["encoder"]["item"])


def test_a_capture_of_another_program_is_not_counted(waiting: Any) -> None:
    """Kernels that take 50 ms per step did not run in a step of 45 ms, even if both differ by 5 %."""
    assert waiting.host_cause == "sync"
    assert not waiting.is_of_other_program
    step_ms = [0.9 * waiting.compute_ms]
    other = replace(waiting, measured=msgspec.structs.replace(waiting.measured, remedy_ms=step_ms))
    assert other.is_of_other_program
    counted, without = ("\n".join(accuracy.summary(pairs)) for pairs in ([waiting], [other]))
    assert "| encoder, recorded | 1 |" in counted
    assert "encoder" not in without


def test_a_network_on_another_gpu_is_in_the_second_half(waiting: Any) -> None:
    """Constants were chosen with the encoder that was recorded first, and not with a later recording of it."""
    later = replace(
        waiting, recording="encoder_h200", measured=msgspec.structs.replace(waiting.measured, network="encoder")
    )
    assert (waiting.is_calibrated, later.is_calibrated) == (True, False)
    assert (later.network, later.is_planted) == ("encoder", True)
    rows = [line.split(" | ")[0] for line in [*accuracy.summary([waiting, later])][2:]]
    assert rows == [
        "| **pairs that set a constant**, recorded", "| **pairs that set a constant**, timed",
        "| encoder, recorded", "| encoder, timed",
        "| **other pairs**, recorded", "| **other pairs**, timed",
        "| encoder_h200, recorded", "| encoder_h200, timed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("recording", "fault", "is_calibrated"),
    [("convolution", "pageable", True), ("convolution", "item", False), ("llama", "pageable", False)],
)
def test_single_pairs_set_a_constant(waiting: Any, recording: str, fault: str, is_calibrated: bool) -> None:
    """Of the convolution, only the copies ahead and the CUDA graph were in view when rules were chosen."""
    assert replace(waiting, recording=recording, fault=fault).is_calibrated == is_calibrated

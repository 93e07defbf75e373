"""What GPUs can do, from their datasheets: dense rates, memory bandwidth and L2; and whether one is busy or waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nsys_analyzer.trace.metadata import Gpu


@dataclass(frozen=True)
class Peaks:
    """The peaks of one GPU, by the document ``source``; None where that is silent.

    Attributes:
        name: as ``torch.cuda.get_device_name`` and ``nvidia-smi`` call it, without NVIDIA before it.
        flops_per_s: dense FLOP/s by precision of the operands: fp32 (CUDA cores), tf32, bf16, fp16 (tensor cores).
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    source: str
    l2_bytes: int | None = None


def _peaks(
    name: str, fp32: float, tf32: float, half: float, bandwidth: float, source: str, l2_mib: int | None = None
) -> Peaks:
    """Makes a row from TFLOP/s, TB/s and MiB; bf16 and fp16 have one rate on all of these."""
    rates = {"fp32": fp32 * 1e12, "tf32": tf32 * 1e12, "bf16": half * 1e12, "fp16": half * 1e12}
    return Peaks(name, rates, bandwidth * 1e12, source, l2_mib and l2_mib << 20)


# Datasheets give tensor rates "with sparsity": twice the dense ones, which stand here. L2: NVIDIA's architecture
# whitepapers of A100, H100 and Ada; of the H200 what the driver says (62,914,560 bytes).
PEAKS: tuple[Peaks, ...] = (
    _peaks("H200", 67, 494.7, 989.4, 4.8, "NVIDIA H200 Tensor Core GPU datasheet, SXM", 60),
    _peaks("H100 PCIe", 51, 378, 756, 2.0, "NVIDIA H100 Tensor Core GPU datasheet, PCIe", 50),
    _peaks("H100 NVL", 60, 417.5, 835.5, 3.9, "NVIDIA H100 Tensor Core GPU datasheet, NVL"),
    _peaks("H100 80GB HBM3", 67, 494.7, 989.4, 3.35, "NVIDIA H100 Tensor Core GPU datasheet, SXM", 50),
    _peaks("A100-SXM4-80GB", 19.5, 156, 312, 2.039, "NVIDIA A100 Tensor Core GPU datasheet, SXM 80 GB", 40),
    _peaks("A100-SXM4-40GB", 19.5, 156, 312, 1.555, "NVIDIA A100 Tensor Core GPU datasheet, SXM 40 GB", 40),
    _peaks("A100 80GB PCIe", 19.5, 156, 312, 1.935, "NVIDIA A100 Tensor Core GPU datasheet, PCIe 80 GB", 40),
    _peaks("L40S", 91.6, 183, 362, 0.864, "NVIDIA L40S datasheet"),
    _peaks("L4", 30.3, 60, 121, 0.300, "NVIDIA L4 datasheet"),
    _peaks(
        "GeForce RTX 4090", 82.6, 82.6, 165.2, 1.008, "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090", 72
    ),
)


def find_peaks(gpu: str | None) -> Peaks | None:
    """Finds the peaks of the GPU of exactly this name; None where the table has no row for it.

    A name that only holds another one, such as ``NVIDIA H200 NVL`` or ``NVIDIA L40``, is of another GPU.
    """
    name = (gpu or "").strip().lower().removeprefix("nvidia ")
    return next((peaks for peaks in PEAKS if peaks.name.lower() == name), None)


def memory_bytes_per_s(gpu: Gpu | None) -> float | None:
    """Finds the peak bandwidth of a GPU's memory: its datasheet's, else the trace's; None where neither says."""
    peaks = find_peaks(gpu.name if gpu else None)
    return peaks.bytes_per_s if peaks else (gpu.memory_bytes_per_s or None if gpu else None)


def l2_bytes(gpu: Gpu | None) -> int | None:
    """Returns the size of the L2 cache of a GPU: what the trace says, else its datasheet; None where neither does."""
    peaks = find_peaks(gpu.name if gpu else None)
    return (gpu.l2_bytes if gpu else 0) or (peaks.l2_bytes if peaks else None)


def roofline_ms(flops: float, moved_bytes: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Returns the least milliseconds for the work: the longer of computing and moving, which at best overlap.

    Source: Williams, Waterman and Patterson, Roofline, Communications of the ACM 52 (4), 2009.
    """
    return max(flops / flops_per_s, moved_bytes / bytes_per_s) * 1e3


#: From this share of the wall on, busy, a phase is GPU-bound; from this share on, idle, the GPU waits for the CPU.
GPU_BOUND, IDLE = 0.9, 0.3

Verdict = Literal["GPU-bound", "GPU waits", "neither", "undecided"]


def verdict_of(share: float) -> Verdict:
    """Whether a share is that of a GPU with work, of one that waits, or of neither."""
    if share >= GPU_BOUND:
        return "GPU-bound"
    return "GPU waits" if 1 - share >= IDLE else "neither"

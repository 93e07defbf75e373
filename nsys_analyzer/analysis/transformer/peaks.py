"""The peaks of GPUs from their datasheets (dense FLOP/s, memory bandwidth, L2 cache), and limits of the busy share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nsys_analyzer.trace.metadata import Gpu


@dataclass(frozen=True)
class Peaks:
    """The peaks of one GPU.

    Attributes:
        name: the name of the GPU in ``torch.cuda.get_device_name`` and ``nvidia-smi``, without the word NVIDIA.
        flops_per_s: dense FLOP/s by the precision of the operands: fp32 on CUDA cores, other precisions on tensor
            cores.
        bytes_per_s: the bandwidth of the GPU's memory, bytes/s.
        source: the document that states these peaks.
        l2_bytes: the size of the L2 cache, bytes; None if the document does not state the size.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    source: str
    l2_bytes: int | None = None


#: The precisions in the order of the rates in ``PEAKS``. bf16 and fp16 have the same rate on all of these GPUs.
_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")


def _peaks(
    name: str, fp32: float, tf32: float | None, half: float, fp8: float | None, fp4: float | None, bandwidth: float,
    source: str, l2_mib: int | None = None,
) -> Peaks:  # fmt: skip
    """Makes the peaks of a GPU from TFLOP/s, TB/s and MiB. A rate is None if the GPU or its datasheet lacks it."""
    rates = zip(_PRECISIONS, (fp32, tf32, half, half, fp8, fp4), strict=True)
    flops = {precision: rate * 1e12 for precision, rate in rates if rate}
    return Peaks(name, flops, bandwidth * 1e12, source, l2_mib and l2_mib << 20)


_NVL72 = "NVIDIA {0} NVL72 datasheet, a 72nd"

# Datasheets give tensor rates with sparsity, which are twice the dense rates below. The rates of GeForce GPUs are those
# with accumulation in fp32, which libraries use. fp4 is NVFP4 or MXFP4. The fp4 rate of the B300 is an eighth of the
# 108 PFLOP/s of HGX. The L2 sizes come from NVIDIA's architecture whitepapers of A100, H100, Ada and RTX Blackwell. The
# L2 size of the H200 is the size that the driver reports (62,914,560 bytes).
PEAKS: tuple[Peaks, ...] = (
    # name; TFLOP/s in fp32 (CUDA cores), tf32, bf16 and fp16, fp8, fp4; TB/s; source; MiB of L2
    _peaks("GB300", 80, 1250, 2500, 5000, 15000, 8.0, _NVL72.format("GB300")),
    _peaks("B300 SXM6 AC", 75, 1100, 2250, 4500, 13500, 7.7, "NVIDIA Blackwell Ultra datasheet, HGX B300"),
    _peaks("GB200", 80, 1250, 2500, 5000, 10000, 8.0, _NVL72.format("GB200")),
    _peaks("B200", 75, 1100, 2250, 4500, 9000, 7.7, "NVIDIA Blackwell datasheet, HGX B200"),
    _peaks("H200", 67, 494.7, 989.4, 1978.9, None, 4.8, "NVIDIA H200 Tensor Core GPU datasheet, SXM", 60),
    _peaks("H100 PCIe", 51, 378, 756, 1513, None, 2.0, "NVIDIA H100 Tensor Core GPU datasheet, PCIe", 50),
    _peaks("H100 NVL", 60, 417.5, 835.5, 1670.5, None, 3.9, "NVIDIA H100 Tensor Core GPU datasheet, NVL"),
    _peaks("H100 80GB HBM3", 67, 494.7, 989.4, 1978.9, None, 3.35, "NVIDIA H100 Tensor Core GPU datasheet, SXM", 50),
    _peaks("H800", 67, 494.7, 989.4, 1978.9, None, 3.35, "NVIDIA H800 Tensor Core GPU datasheet, SXM", 50),
    _peaks("H20", 44, 74, 148, 296, None, 4.0, "NVIDIA H20 Tensor Core GPU datasheet"),
    _peaks("A100-SXM4-80GB", 19.5, 156, 312, None, None, 2.039, "NVIDIA A100 Tensor Core GPU datasheet, SXM 80 GB", 40),
    _peaks("A100-SXM4-40GB", 19.5, 156, 312, None, None, 1.555, "NVIDIA A100 Tensor Core GPU datasheet, SXM 40 GB", 40),
    _peaks("A100 80GB PCIe", 19.5, 156, 312, None, None, 1.935, "NVIDIA A100 Tensor Core GPU datasheet, PCIe", 40),
    _peaks("A10", 31.2, 62.5, 125, None, None, 0.600, "NVIDIA A10 Tensor Core GPU datasheet"),
    _peaks("L40S", 91.6, 183, 362, 733, None, 0.864, "NVIDIA L40S datasheet"),
    _peaks("L4", 30.3, 60, 121, 242.5, None, 0.300, "NVIDIA L4 datasheet"),
    _peaks(
        "GeForce RTX 5090", 104.8, 104.8, 209.5, 419, 1676, 1.792,
        "NVIDIA RTX Blackwell GPU architecture whitepaper, GeForce RTX 5090", 96,
    ),
    _peaks(
        "GeForce RTX 4090", 82.6, 82.6, 165.2, 330.3, None, 1.008,
        "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090", 72,
    ),
    _peaks("AMD Instinct MI355X", 157.3, None, 2516.6, 5033.2, 10066.3, 8.0, "AMD Instinct MI355X GPU datasheet"),
    _peaks("AMD Instinct MI325X", 163.4, 653.7, 1307.4, 2614.9, None, 6.0, "AMD Instinct MI325X accelerator datasheet"),
    _peaks("AMD Instinct MI300X", 163.4, 653.7, 1307.4, 2614.9, None, 5.3, "AMD Instinct MI300X accelerator datasheet"),
)  # fmt: skip


def find_peaks(gpu: str | None) -> Peaks | None:
    """Returns the peaks of the GPU with this name, or None if ``PEAKS`` lacks this GPU.

    The name must be equal, except for upper and lower case and the word NVIDIA. ``NVIDIA H200 NVL`` is not the H200.
    """
    name = (gpu or "").strip().lower().removeprefix("nvidia ")
    return next((peaks for peaks in PEAKS if peaks.name.lower() == name), None)


def find_memory_bandwidth(gpu: Gpu | None) -> float | None:
    """Returns the peak bandwidth of a GPU's memory, bytes/s: from the datasheet, else from the trace, else None."""
    peaks = find_peaks(gpu.name if gpu else None)
    return peaks.bytes_per_s if peaks else (gpu.memory_bytes_per_s or None if gpu else None)


def find_l2_bytes(gpu: Gpu | None) -> int | None:
    """Returns the size of a GPU's L2 cache, bytes: from the trace, else from the datasheet, else None."""
    peaks = find_peaks(gpu.name if gpu else None)
    return (gpu.l2_bytes if gpu else 0) or (peaks.l2_bytes if peaks else None)


#: A phase is GPU-bound if the GPU is busy for at least this share of its wall time.
GPU_BOUND_SHARE = 0.9
#: A phase has the verdict "GPU waits" if the GPU is idle for at least this share of its wall time.
IDLE_SHARE = 0.3

BusyVerdict = Literal["GPU-bound", "GPU waits", "neither", "undecided"]


def judge_busy_share(share: float) -> BusyVerdict:
    """Judges whether a phase is GPU-bound, given the share of its wall time in which the GPU is busy."""
    if share >= GPU_BOUND_SHARE:
        return "GPU-bound"
    return "GPU waits" if 1 - share >= IDLE_SHARE else "neither"

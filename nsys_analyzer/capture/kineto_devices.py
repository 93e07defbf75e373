"""On what a PyTorch profiler's trace ran: the platform of its device, the driver and runtime, and the devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nsys_analyzer.capture.kineto_events import KinetoTrace
from nsys_analyzer.capture.kineto_tables import Rows
from nsys_analyzer.trace.metadata import CUDA, HIP, MTIA, XPU

_OLD_GPUS, _OLD_UNITS = "computeProperties", "multiProcessorCount"  # of PyTorch before 1.11
_HIP_PROPERTIES = ("hip_runtime_version", "hip_driver_version", "roctracer_version")
_MAKERS = {"AMD": HIP, "Intel": XPU}
#: What a device is called that the trace gives no name.
_UNNAMED = {CUDA: "unnamed NVIDIA GPU", HIP: "unnamed AMD GPU", XPU: "unnamed Intel GPU", MTIA: "MTIA"}

#: The properties of a trace that say on what it ran; Kineto's own, or those our recorder adds.
_ENVIRONMENT = {
    "CudaDriverVersion": "cuda_driver_version",
    "HipDriverVersion": "hip_driver_version",
    "HipRuntimeVersion": "hip_runtime_version",
    "NvDriverVersion": "driver_version",
    "CpuDescription": "cpu",
    "OsDescription": "os",
}


def platform_of(trace: KinetoTrace) -> str:
    """The platform that the trace's device is programmed by: "CUDA", "HIP", "XPU" or "MTIA".

    Known by the categories of the events, by the properties, by the names of the API calls or by that of the GPU.
    """
    if trace.on_mtia:
        return MTIA
    calls = {event.name for event in trace.of("runtime")}
    if not trace.properties.keys().isdisjoint(_HIP_PROPERTIES) or any(name.startswith("hip") for name in calls):
        return HIP
    makers = (str(gpu.get("name", "")).partition(" ")[0].partition("(")[0] for gpu in device_properties(trace))
    return next((_MAKERS[maker] for maker in makers if maker in _MAKERS), CUDA)


def device_properties(trace: KinetoTrace) -> list[dict[str, Any]]:
    """The machine's GPUs as Kineto lists them."""
    return list(trace.properties.get("deviceProperties") or trace.properties.get(_OLD_GPUS) or ())


def device_rows(trace: KinetoTrace, used: Iterable[int]) -> Rows:
    """TARGET_INFO_GPU: the devices that the trace lists; where it lists none, those used, if they are no NVIDIA's."""
    platform = platform_of(trace)
    listed = device_properties(trace)
    if not listed and platform != CUDA:
        return [(device, _UNNAMED[platform], 0, 0) for device in sorted(set(used))]
    return [
        (
            gpu["id"], _device_name(gpu, platform), gpu.get("totalGlobalMem", 0),
            gpu.get("numSms", gpu.get(_OLD_UNITS, 0)),
        )
        for gpu in listed
    ]  # fmt: skip


def _device_name(gpu: dict[str, Any], platform: str) -> str:
    """The name as it is written, with the maker's where that says nothing: "MTIA ARTEMIS", "unnamed AMD GPU"."""
    name = str(gpu.get("name") or "").strip()
    if not name:
        return _UNNAMED[platform]
    return f"{MTIA} {name}" if platform == MTIA and MTIA not in name else name


def environment_rows(trace: KinetoTrace) -> Rows:
    """TARGET_INFO_SYSTEM_ENV, as far as the trace knows."""
    found = ((name, trace.properties.get(key)) for name, key in _ENVIRONMENT.items())
    platform = platform_of(trace)
    told = [("DevicePlatform", platform)] if trace.has_gpu and platform != CUDA else []
    return [*told, *((name, str(value)) for name, value in found if value)]

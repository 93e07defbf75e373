"""On what a PyTorch profiler's trace ran: the platform of its device, the driver and runtime, and the devices."""

from __future__ import annotations

from collections.abc import Iterable

from nsys_analyzer.capture.kineto_events import KinetoTrace
from nsys_analyzer.capture.kineto_properties import Device
from nsys_analyzer.capture.kineto_tables import Rows
from nsys_analyzer.trace.metadata import CUDA, HIP, MTIA, XPU

_MAKERS = {"AMD": HIP, "Intel": XPU}
#: What a device is called that the trace gives no name.
_UNNAMED = {CUDA: "unnamed NVIDIA GPU", HIP: "unnamed AMD GPU", XPU: "unnamed Intel GPU", MTIA: "MTIA"}


def platform_of(trace: KinetoTrace) -> str:
    """The platform that the trace's device is programmed by: "CUDA", "HIP", "XPU" or "MTIA".

    Known by the categories of the events, by the properties, by the names of the API calls or by that of the GPU.
    """
    if trace.on_mtia:
        return MTIA
    told = trace.properties
    versions = (told.hip_runtime_version, told.hip_driver_version, told.roctracer_version)
    calls = {event.name for event in trace.calls}
    if any(version is not None for version in versions) or any(name.startswith("hip") for name in calls):
        return HIP
    makers = ((gpu.name or "").partition(" ")[0].partition("(")[0] for gpu in trace.properties.devices)
    return next((_MAKERS[maker] for maker in makers if maker in _MAKERS), CUDA)


def device_rows(trace: KinetoTrace, used: Iterable[int]) -> Rows:
    """TARGET_INFO_GPU: the devices that the trace lists; where it lists none, those used, if they are no NVIDIA's."""
    platform = platform_of(trace)
    listed = trace.properties.devices
    if not listed and platform != CUDA:
        return [(device, _UNNAMED[platform], 0, 0) for device in sorted(set(used))]
    return [
        (gpu.id, _device_name(gpu, platform), gpu.memory, gpu.old_sms if gpu.sms is None else gpu.sms) for gpu in listed
    ]


def _device_name(gpu: Device, platform: str) -> str:
    """The name as it is written, with the maker's where that says nothing: "MTIA ARTEMIS", "unnamed AMD GPU"."""
    name = (gpu.name or "").strip()
    if not name:
        return _UNNAMED[platform]
    return f"{MTIA} {name}" if platform == MTIA and MTIA not in name else name


def environment_rows(trace: KinetoTrace) -> Rows:
    """TARGET_INFO_SYSTEM_ENV, as far as the trace knows: of Kineto's own properties, and those our recorder adds."""
    told = trace.properties
    found = {
        "CudaDriverVersion": told.cuda_driver_version,
        "HipDriverVersion": told.hip_driver_version,
        "HipRuntimeVersion": told.hip_runtime_version,
        "NvDriverVersion": told.driver_version,
        "CpuDescription": told.cpu,
        "OsDescription": told.os,
    }
    platform = platform_of(trace)
    on_other = [("DevicePlatform", platform)] if trace.has_gpu and platform != CUDA else []
    return [*on_other, *((name, str(value)) for name, value in found.items() if value)]

"""What a PyTorch profiler's trace says beside its events, each property as far as it can be what its name says."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from nsys_analyzer.capture.kineto_left_out import reason

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""An ordinal: of a device, a rank; a version."""

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63) + 1, le=2**63 - 1)]
"""What a column of integers holds, of either sign."""

Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of bytes or of processors."""

Text = str | int | float


class Device(msgspec.Struct, rename={"memory": "totalGlobalMem", "sms": "numSms", "old_sms": "multiProcessorCount"}):
    """A GPU of the machine, as Kineto lists it; ``old_sms`` is what PyTorch before 1.11 wrote."""

    id: Int32
    name: str | None = None
    memory: Size = 0
    sms: Size | None = None
    old_sms: Size = 0


class Distributed(msgspec.Struct):
    """The rank of the process in its group."""

    rank: Int32 | None = None
    world_size: Int32 | None = None


class Properties(msgspec.Struct):
    """The properties that are read; None, or empty, where the trace does not have one."""

    device_properties: tuple[Device, ...] | None = msgspec.field(name="deviceProperties", default=None)
    compute_properties: tuple[Device, ...] | None = msgspec.field(name="computeProperties", default=None)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    torch_version: Text | None = None
    cuda_driver_version: Int32 | None = None
    hip_driver_version: Int32 | None = None
    hip_runtime_version: Int32 | None = None
    roctracer_version: Text | None = None
    driver_version: Text | None = None
    cpu: Text | None = None
    os: Text | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """The machine's GPUs; before PyTorch 1.11 they had another key."""
        return self.device_properties or self.compute_properties or ()


PROPERTIES = frozenset(Properties.__struct_encode_fields__)
"""The keys that are read."""


def read_properties(written: dict[str, Any]) -> tuple[Properties, tuple[str, ...]]:
    """Return the properties of a trace, and what its reader must be told: those that cannot be what they should."""
    properties, remarks = Properties(), []
    for key, value in written.items():
        try:
            one = msgspec.json.decode(msgspec.json.encode({key: value}), type=Properties)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
            remarks.append(f"The trace's {key} is ignored: {reason(error)}")
        else:
            name = Properties.__struct_fields__[Properties.__struct_encode_fields__.index(key)]
            setattr(properties, name, getattr(one, name))
    return properties, tuple(remarks)

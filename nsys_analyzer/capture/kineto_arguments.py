"""The arguments of an event (``args``), each as far as it can be what its name says."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from nsys_analyzer.capture.kineto_left_out import BadEventError, reason
from nsys_analyzer.capture.kineto_properties import Int32, Int64, Size

_NULL = msgspec.Raw(b"null")


class OfCall(msgspec.Struct, gc=False):
    """Those of an API call."""

    correlation: Int64 = 0


class OnGpu(msgspec.Struct, gc=False, rename={"in_device": "inDevice", "in_context": "inContext"}):
    """Those of what ran on a GPU; a copy between GPUs has those of the one that it was made ``in``."""

    correlation: Int64 = 0
    device: Int32 | None = None
    in_device: Int32 | None = None
    context: Int64 | None = None
    in_context: Int64 | None = None
    stream: Int64 | None = None
    bytes: Size | None = None
    size: Size | None = None
    graph_node: Int64 | None = msgspec.field(name="graph node id", default=None)
    direction: str | None = None


class OfMemory(msgspec.Struct, gc=False):
    """Those of what PyTorch's allocator did."""

    device_type: Int64 = msgspec.field(name="Device Type", default=0)  # c10::DeviceType: 0 is the CPU
    device: Int32 = msgspec.field(name="Device Id", default=0)
    size: Int64 = msgspec.field(name="Bytes", default=0)
    address: Int64 = msgspec.field(name="Addr", default=0)
    reserved: Int64 | None = msgspec.field(name="Total Reserved", default=None)
    allocated: Int64 | None = msgspec.field(name="Total Allocated", default=None)


class OfThread(msgspec.Struct, gc=False):
    """Those of a thread's name."""

    name: str = ""


_Form = TypeVar("_Form", bound=msgspec.Struct)
_by_name = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ArgumentReader(Generic[_Form]):
    """Reads the arguments of one kind of event.

    Those that the event can do without have None for a default. A null is as good as none.
    """

    def __init__(self, form: type[_Form]) -> None:
        self._form = form
        self._as_written = msgspec.json.Decoder(form)
        self._fields = [
            (field.name, field.encode_name, field.default is None, msgspec.json.Decoder(field.type, strict=False))
            for field in msgspec.structs.fields(form)
        ]

    def read(self, written: msgspec.Raw, unreadable: list[str]) -> _Form:
        """The arguments; the names of those that are left out, since they cannot be read, join ``unreadable``.

        Raises:
            BadEventError: one without which the event says nothing cannot be read.
            msgspec.ValidationError: they are no object.
        """
        try:
            return self._as_written.decode(written)
        except msgspec.ValidationError:
            return self._one_by_one({} if written == _NULL else _by_name.decode(written), unreadable)

    def _one_by_one(self, written: dict[str, msgspec.Raw], unreadable: list[str]) -> _Form:
        """The arguments where one has another form: numbers may be texts ("1") or have a point (1.0)."""
        found = {}
        for name, key, is_optional, decoder in self._fields:
            raw = written.get(key, _NULL)
            if raw == _NULL:
                continue
            try:
                found[name] = decoder.decode(raw)
            except msgspec.ValidationError as error:
                if not is_optional:
                    raise BadEventError(reason(error, key)) from error
                unreadable.append(key)
        return self._form(**found)

"""Reports the answer to a what-if question about memory: the peak memory and the length of a step after the changes."""

from __future__ import annotations

from nsys_analyzer.analysis.what_if_memory import ChangedMemoryPart, MemoryWhatIf
from nsys_analyzer.report.facts import say
from nsys_analyzer.report.model import Answer, Block, Field, Paragraph, Section, make_table
from nsys_analyzer.report.units import format_bytes, format_ms, format_ms_range
from nsys_analyzer.text import NO_BREAK_SPACE, format_fixed, plain

_GIB = 2**30
#: The assumptions of each change, by the ID of its fact, or by the kind of the optimizer.
_ASSUMPTIONS: dict[str, str] = {
    "checkpointed": (
        "Checkpointing: backward runs the forward pass of these modules again. The shortest step assumes that PyTorch "
        "stops at the last value that backward reads, and that the CPU is not slower. The longest step assumes that "
        "whole forward passes run again, and that the CPU needs 30 µs more for each saved tensor in both passes."
    ),
    "changed_batch": (
        "Batch: activations grow with the batch; weights, gradients and optimizer state do not. The time of kernels "
        "grows by the factor of their attainable times, or by the factor of the batch. Launches take as long as "
        "before. Loading a batch takes as long as before, or grows with the batch."
    ),
    "micro_batches": (
        "Micro-batches: forward and backward run once for each micro-batch with all their launches. The gradients stay "
        "in memory, and are added up by a kernel for each parameter."
    ),
    "8bit": (
        "8-bit state: each element takes a byte, and each block of 256 elements a scale in fp32. The optimizer's "
        "kernels move fewer bytes, or are as slow as before and are launched for each parameter."
    ),
    "offload": (
        "Offloaded state: before the update, the state is copied to the GPU tensor by tensor, and after the update, it "
        "is copied back. Both directions overlap, or run one after the other. Nothing else runs meanwhile."
    ),
}
_PART_FIELDS: tuple[Field[ChangedMemoryPart], ...] = (
    Field("at the peak", "text", lambda row: row.part),
    Field("before", "bytes", lambda row: row.before_bytes),
    Field("after", "bytes", lambda row: row.after_bytes),
)


def memory_what_if_section(prediction: MemoryWhatIf) -> Section:
    """Returns the predicted peak memory and length of a step, what fills the memory, and the assumptions."""
    memory = prediction.memory
    low_ms, high_ms = (prediction.step_ms - saving for saving in (prediction.saves_ms_high, prediction.saves_ms_low))
    blocks: list[Block] = [
        Answer(
            f"The peak memory of tensors would be {_format_size(memory.after_bytes)} instead of "
            f"{_format_size(memory.before_bytes)}, with an interval from {_format_size(memory.after_bytes_low)} to "
            f"{_format_size(memory.after_bytes_high)}. Without the profiler, a step would take "
            f"{format_ms(prediction.new_step_ms)} instead of {format_ms(prediction.step_ms)}, with an interval of "
            f"{format_ms_range(low_ms, high_ms)}."
        ),
        make_table(
            _PART_FIELDS,
            memory.parts,
            f"What fills the memory at its peak, which is at {memory.before_at} before the changes, and at "
            f"{memory.after_at} after them:",
        ),
    ]
    for change in prediction.changes:
        blocks.append(Paragraph(_ASSUMPTIONS[change.values.get("kind", change.id)]))
    if prediction.link_bytes_per_s:
        slowest, fastest = (f"{bandwidth / 1e9:.0f} GB/s" for bandwidth in prediction.link_bytes_per_s)
        source = "is that of the capture's large copies" if prediction.is_link_measured else "is assumed"
        blocks.append(
            Paragraph(f"The bandwidth of the link between CPU and GPU {source}: from {slowest} to {fastest}.")
        )
    source = (
        "The peak before the changes was measured without the profiler."
        if memory.is_measured
        else "The peak before the changes was not measured: it is the sum of the tensors that the operators use."
    )
    blocks.append(
        Paragraph(
            f"{source} A tensor is assumed to be freed after the last operator that reads it. The allocator's reserve, "
            "its fragmentation and memory outside of PyTorch are not part of these figures."
        )
    )
    changes = ", ".join(plain(say(change)) for change in prediction.changes)
    return Section("what_if", f"{prediction.capture}: what if {changes}", tuple(blocks))


def _format_size(size_bytes: float) -> str:
    """Returns a size with two decimal places of GiB, so that the ends of an interval differ."""
    return (
        f"{format_fixed(size_bytes / _GIB, 2)}{NO_BREAK_SPACE}GiB" if size_bytes >= _GIB else format_bytes(size_bytes)
    )

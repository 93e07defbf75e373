"""Computes the waves in which the blocks of a kernel run, and the share of its time that idle multiprocessors waste."""

from __future__ import annotations

import numpy as np

from nsys_analyzer.trace.arrays import Floats, Ints
from nsys_analyzer.trace.columns import BlockResources
from nsys_analyzer.trace.metadata import Gpu

#: The granularities with which a multiprocessor gives its resources to blocks: the registers of a warp, the parts of
#: the register file, and bytes of shared memory, from ``cuda_occupancy.h`` of the CUDA Toolkit 13.2.
_REGISTERS_OF_WARP, _REGISTER_FILE_PARTS, _SHARED_BYTES = 256, 4, 128
#: The shared memory that CUDA reserves for itself in each block since compute capability 8, bytes, from the tuning
#: guides for the Ampere and the Hopper architecture.
_RESERVED_BYTES, _FIRST_CAPABILITY_THAT_RESERVES = 1024, 8
_THREADS_OF_WARP = 32
#: The number of blocks that a multiprocessor runs at once, if the capture does not contain it, as on an H100.
_USUAL_BLOCKS_PER_SM = 32


def count_resident_blocks(block: BlockResources, gpu: Gpu) -> int:
    """Returns the number of blocks that a multiprocessor of the GPU runs at once; 0 if its limits are unknown."""
    if not (gpu.registers_per_sm and gpu.shared_bytes_per_sm and gpu.warps_per_sm):
        return 0
    warps = -(-block.threads // _THREADS_OF_WARP)
    registers = _round_up(block.registers * _THREADS_OF_WARP, _REGISTERS_OF_WARP)
    warps_with_registers = gpu.registers_per_sm // _REGISTER_FILE_PARTS // registers * _REGISTER_FILE_PARTS
    reserved_bytes = _RESERVED_BYTES if gpu.compute_capability >= _FIRST_CAPABILITY_THAT_RESERVES else 0
    shared_bytes = _round_up(block.shared_bytes + reserved_bytes, _SHARED_BYTES)
    by_shared_memory = gpu.shared_bytes_per_sm // shared_bytes if shared_bytes else _USUAL_BLOCKS_PER_SM
    return min(
        gpu.blocks_per_sm or _USUAL_BLOCKS_PER_SM,
        gpu.warps_per_sm // warps,
        warps_with_registers // warps,
        by_shared_memory,
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def find_wasted_shares(blocks: Ints, resident_blocks: Ints, multiprocessors: int) -> tuple[Floats, Floats]:
    """Returns the least and the greatest share of the time of each kernel in which multiprocessors have no block.

    A grid with fewer blocks than multiprocessors leaves the others idle. A grid that exceeds one wave wastes the places
    of its last wave. If the blocks of a multiprocessor share its speed, at least the difference between the mean number
    of blocks of a multiprocessor and the next integer is wasted. If each wave takes the same time, the empty places of
    the last wave are wasted. A grid between both fills the GPU with one wave: persistent kernels choose such grids.

    Args:
        blocks: the number of blocks of each kernel; 0 if it is unknown.
        resident_blocks: the number of its blocks that a multiprocessor runs at once; 0 if it is unknown.
        multiprocessors: the number of multiprocessors of the GPU.
    """
    per_multiprocessor = blocks / max(multiprocessors, 1)
    waves = per_multiprocessor / np.maximum(resident_blocks, 1)
    is_small = (blocks > 0) & (per_multiprocessor < 1)
    has_tail = (resident_blocks > 0) & (waves > 1)
    least = np.where(is_small | has_tail, 1 - per_multiprocessor / np.maximum(np.ceil(per_multiprocessor), 1), 0.0)
    return least, np.where(has_tail, np.maximum(least, 1 - waves / np.maximum(np.ceil(waves), 1)), least)

"""Computes in how many waves the blocks of a kernel run, and in which share of its time multiprocessors are idle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.columns import KERNEL, BlockResources
from nsys_analyzer.trace.metadata import Gpu

#: The granularities with which a multiprocessor gives its resources to blocks: the registers of a warp, the parts of
#: the register file, and bytes of shared memory, from ``cuda_occupancy.h`` of the CUDA Toolkit 13.2.
_REGISTERS_OF_WARP, _REGISTER_FILE_PARTS, _SHARED_BYTES = 256, 4, 128
#: The shared memory that CUDA reserves for itself in each block since compute capability 8, bytes, from the tuning
#: guides for the Ampere and the Hopper architecture.
_RESERVED_BYTES, _FIRST_CAPABILITY_THAT_RESERVES = 1024, 8
_THREADS_OF_WARP = 32
#: The largest number of blocks that a multiprocessor runs at once, if the capture does not contain it: that of an H100.
_USUAL_BLOCKS_PER_SM = 32


def count_resident_blocks(block: BlockResources, gpu: Gpu) -> int:
    """Returns the number of blocks that a multiprocessor runs at once; 0 if its limits or the block are unknown."""
    if not (gpu.registers_per_sm and gpu.shared_bytes_per_sm and gpu.warps_per_sm):
        return 0
    if not (block.registers and block.threads):  # the trace does not contain them
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


class IdleShares(NamedTuple):
    """The share of each kernel's time that multiprocessors spend without a block; arrays of shape (operations,).

    Attributes:
        least, most: the bounds of the share.
        is_small: True for each kernel with fewer blocks than the GPU has multiprocessors.
        blocks_per_wave: the number of the kernel's blocks that the GPU runs at once; 0 if it is unknown.
    """

    least: Floats
    most: Floats
    is_small: Bools
    blocks_per_wave: Ints


def find_idle_shares(study: Study) -> IdleShares:
    """Returns the share of the time of each kernel in which multiprocessors have no block; 0 for other operations.

    If a grid has fewer blocks than the GPU has multiprocessors, the remaining multiprocessors are idle. If a grid needs
    more than one wave, its last wave may not fill the GPU. The lower bound assumes that the blocks of a multiprocessor
    share its speed: with n blocks per multiprocessor on average, the share is 1 − n / ⌈n⌉. The upper bound assumes that
    each wave takes equally long: with n waves, the share is 1 − n / ⌈n⌉. Any other grid runs in one wave, as the grids
    of persistent kernels do, and its share is 0. Collectives are left out, because more blocks would not help them.
    """
    operations, gpu = study.operations, study.gpu
    resident = [count_resident_blocks(block, gpu) if gpu else 0 for block in study.resources]
    multiprocessors = gpu.sm_count if gpu else 0
    is_kernel = (operations.kind == KERNEL) & (multiprocessors > 0) & ~study.of_class("communication")
    blocks = np.where(is_kernel, operations.size, 0)
    blocks_per_wave = np.array([*resident, 0])[operations.resource] * multiprocessors
    per_multiprocessor, waves = blocks / max(multiprocessors, 1), blocks / np.maximum(blocks_per_wave, 1)
    is_small = (blocks > 0) & (blocks < multiprocessors)
    has_tail = (blocks_per_wave > 0) & (waves > 1)
    shares = [1 - count / np.maximum(np.ceil(count), 1) for count in (per_multiprocessor, waves)]
    least = np.where(is_small | has_tail, shares[0], 0.0)
    return IdleShares(least, np.where(has_tail, np.maximum(*shares), least), is_small, blocks_per_wave)

"""The findings, one module each; a new one is a module and a row here.

Each module has ``find(case)``, which yields a candidate for each thing that it sees.
"""

from __future__ import annotations

from nsys_analyzer.analysis.findings import (
    allocator,
    data_loading,
    device_to_host_copy,
    exposed_communication,
    fp32_matmul,
    host_stall,
    host_sync,
    launch_bound,
    layout_copies,
    pageable_copy,
    small_grids,
    unfused_attention,
    unfused_elementwise,
    unfused_optimizer,
)
from nsys_analyzer.analysis.findings.case import Rule

RULES: tuple[Rule, ...] = (
    data_loading.find,
    host_sync.find,
    launch_bound.find,
    pageable_copy.find,
    device_to_host_copy.find,
    fp32_matmul.find,
    unfused_optimizer.find,
    allocator.find,
    unfused_attention.find,
    host_stall.find,
    unfused_elementwise.find,
    layout_copies.find,
    small_grids.find,
    exposed_communication.find,
)

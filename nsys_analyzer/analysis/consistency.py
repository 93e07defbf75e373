"""Whether what is said of a capture can be true of its kernels."""

from __future__ import annotations

from collections.abc import Sequence

from nsys_analyzer.analysis.models import Configuration
from nsys_analyzer.analysis.summary import PhaseSummary


def contradiction(configuration: Configuration | None, phases: Sequence[PhaseSummary]) -> str:
    """Why a configuration read from a file name cannot be the capture's; empty where it can.

    A forward pass of L layers needs at least 4·L + 1 products, however they are fused: Q, K and V as one, output,
    gate and up as one, down, and the head.
    """
    if not configuration or configuration.source != "file name" or not configuration.model:
        return ""
    layers = configuration.model.num_layers
    for phase in phases:
        products = sum(row.launches_per_instance for row in phase.classes if row.kernel_class == "matmul")
        if phase.phase == "forward" and phase.instances and 0 < products < 4 * layers + 1:
            return (
                f"The file name says {configuration.model.name}, which needs {4 * layers + 1} products per forward or "
                f"more; the capture launches {products:,.0f}, so the name is not believed."
            )
    return ""

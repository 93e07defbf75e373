"""Under what conditions a bench measured, in one paragraph."""

from __future__ import annotations

from collections.abc import Iterable

from nsys_analyzer.analysis.mantissa import MANTISSA_BITS, precision_title
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.report.model import Paragraph
from nsys_analyzer.text import emphasis, strong


def conditions(results: Results, *, warmup: str, steps: str, synchronized: str, grad: str) -> Paragraph:
    """Device, versions, the precision that products really had, and how was timed.

    Args:
        results: the bench's results.
        warmup: what ran before the measured steps, such as "5 steps".
        steps: what was measured, such as "10 steps".
        synchronized: where the device was waited for, such as "at the end of each phase".
        grad: whether gradients were recorded, such as "forward under no_grad".
    """
    parts = (
        ("Device", _device(results)),
        ("precision of products, as found by multiplying", _precisions(results.ceilings.values())),
        ("warm-up", warmup),
        ("measured", steps),
        ("synchronized", synchronized),
        ("gradients", grad),
    )
    return Paragraph(emphasis("Conditions.") + " " + "; ".join(f"{name}: {text}" for name, text in parts if text) + ".")


def _device(results: Results) -> str:
    machine = next((row.machine for row in (*results.rows, *results.ceilings.values()) if row.machine), {})
    device = machine.get("gpu") or f"CPU, {machine.get('threads', '?')} threads"
    return f"{device}, PyTorch {machine.get('torch', '?')}, Python {machine.get('python', '?')}"


def _precisions(ceilings: Iterable[Row]) -> str:
    found = [(row.case.get("precision"), row.figures.get("product_bits")) for row in ceilings]
    return ", ".join(f"{asked} ran as {precision_title(bits)}" for asked, bits in found if bits)


def precision_warnings(results: Results) -> tuple[str, ...]:
    """A line for each precision whose products ran as another one."""
    lines = []
    for row in results.ceilings.values():
        asked, bits = row.case.get("precision"), row.figures.get("product_bits")
        if asked == "fp32" and bits is not None and bits < MANTISSA_BITS["fp32"]:
            lines.append(
                f"{strong(f'Products called fp32 ran as {precision_title(bits)}')}: a speed-up over them "
                "understates, and their error is TF32's. Look for NVIDIA_TF32_OVERRIDE and "
                "torch.backends.cuda.matmul settings."
            )
        if asked == "tf32" and bits == MANTISSA_BITS["fp32"]:
            lines.append(
                f"{strong('Products called tf32 ran as fp32')}: this device has no TF32, or a setting forbids it."
            )
    return tuple(lines)

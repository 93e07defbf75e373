"""The floating-point operations of one step, counted by PyTorch's own formulas as its operators run.

A compiled function is run operator by operator meanwhile, so that its operations are among them.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

#: Operations of a softmax for each of its scores: maximum, difference, exponential, sum, quotient.
_OF_A_SCORE = 5
_SOFTMAX = ("aten._softmax", "aten._safe_softmax")
_MAXIMUM = ("aten.max", "aten.amax")
_FUSED = ("scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention")
#: Matmuls of a fused attention's backward pass: PyTorch counts one more, which computes the scores again.
_MATMULS_OF_MODEL, _MATMULS_COUNTED = 4, 5
#: The namespaces of PyTorch itself, and what in them computes matmuls, whether there is a formula for it or not.
_KNOWN = (
    "aten",
    "prims",
    "prim",
    "c10d",
    "c10d_functional",
    "_c10d_functional",
    "inductor",
    "profiler",
    "fsdp",
    "_dtensor",
)
_COMPUTES = re.compile(r"mm(?:_|$)|mkldnn_rnn|cudnn_rnn|miopen_rnn|trilinear|matmul|attention|conv")


class Flops:
    """Counts the operators of some calls, those that autograd's threads run for them included."""

    def __init__(self, torch: Any, place: Callable[[], tuple[str, str]]) -> None:
        """``place`` gives the phase and the module of an operator that runs."""
        self._torch, self._place = torch, place
        self._formulas = _formulas(torch)
        self._mode: Any = _mode(self, torch)
        self._counting = False
        self._by_class: dict[tuple[str, str], int] = defaultdict(int)
        self._by_module: dict[tuple[str, str], int] = defaultdict(int)
        self._batched: dict[str, int] = defaultdict(int)
        self._softmax: dict[str, int] = defaultdict(int)
        self._fused = self._fused_softmax = 0
        self._with_maximum: set[str] = set()
        self._unknown: set[str] = set()

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        """Counts until the result is left; calls inside are counted once.

        Raises:
            RuntimeError: PyTorch allows it nowhere but outside of compiled code.
        """
        if self._counting:
            return contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            if hasattr(self._torch.compiler, "set_stance"):  # compiled code is not seen by a mode
                stack.enter_context(self._torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._mode)
            stack.callback(self._ended)
            self._counting = True
            return stack.pop_all()

    def _ended(self) -> None:
        self._counting = False

    def count(self, function: Any, arguments: Any, keywords: Any, result: Any) -> None:
        """Counts an operator that has run."""
        phase, module = self._place()
        packet = getattr(function, "_overloadpacket", function)
        formula, name = self._formulas.get(packet), str(packet)
        if formula is not None:
            flops, kind = int(formula(*arguments, **keywords, out_val=result)), _class_of(name)
            if kind == "fused attention":
                if "backward" in name:
                    flops = flops * _MATMULS_OF_MODEL // _MATMULS_COUNTED
                elif phase == "forward":
                    self._fused += flops
                    self._fused_softmax += _OF_A_SCORE * _scores(arguments)
            elif name in ("aten.bmm", "aten.baddbmm") and phase == "forward":
                self._batched[module] += flops
            self._by_class[phase, kind] += flops
            self._by_module[module, phase] += flops
        elif phase == "forward" and (name in _SOFTMAX or (name == "aten.exp" and module in self._with_maximum)):
            self._softmax[module] += _OF_A_SCORE * int(result.numel())
        elif name in _MAXIMUM:  # a softmax written by hand begins with it
            self._with_maximum.add(module)
        elif getattr(function, "namespace", None) not in _KNOWN or _COMPUTES.search(name):
            self._unknown.add(name)

    def failed(self, function: Any, error: Exception) -> None:
        """An operator could not be counted."""
        self._unknown.add(f"{getattr(function, '_overloadpacket', function)} ({type(error).__name__})")

    def counted(self, passes: Mapping[str, int]) -> dict[str, Any]:
        """What was counted, by the keys of a manifest; ``passes`` are the instances of each phase in the step."""
        unfused = self._batched.keys() & self._softmax.keys()  # a softmax alone is that of a head or a router
        return {
            "passes": dict(passes),
            "classes": _nested(self._by_class),
            "modules": _nested(self._by_module),
            "softmax": self._fused_softmax + sum(self._softmax[module] for module in unfused),
            "attention_matmul": self._fused + sum(self._batched[module] for module in unfused),
            "unknown": sorted(self._unknown),
        }


def _nested(flat: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (outer, inner), value in flat.items():
        found.setdefault(outer, {})[inner] = value
    return found


def _class_of(name: str) -> str:
    """The class of the kernels of an operator with a formula."""
    if any(word in name for word in _FUSED):
        return "fused attention"
    return "convolution" if "conv" in name else "matmul"


def _scores(arguments: Any) -> int:
    """Scores of a fused attention: batch × heads × queries × keys."""
    query, key = arguments[:2]
    return int(query.shape[0] * query.shape[1] * query.shape[-2] * key.shape[-2])


def _formulas(torch: Any) -> dict[Any, Any]:
    """PyTorch's formulas by operator; those of fused attention for its CPU's, too, and products with a vector."""
    from torch.utils.flop_counter import flop_registry

    formulas, aten = dict(flop_registry), torch.ops.aten
    for behind in ("", "_backward"):
        known = formulas.get(getattr(aten, f"_scaled_dot_product_flash_attention{behind}"))
        of_cpu = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{behind}", None)
        if known is not None and of_cpu is not None:
            formulas.setdefault(of_cpu, known)
    formulas.setdefault(aten.mv, lambda matrix, _, **__: 2 * matrix.numel())
    formulas.setdefault(aten.addmv, lambda _, matrix, *__, **___: 2 * matrix.numel())
    formulas.setdefault(aten.dot, lambda vector, _, **__: 2 * vector.numel())
    return formulas


def _mode(flops: Flops, torch: Any) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            distributed = sys.modules.get("torch.distributed.tensor")
            if distributed is not None and any(issubclass(one, distributed.DTensor) for one in types):
                return NotImplemented  # the operators on this rank's part follow
            # In inference mode composite operators arrive undecomposed.
            if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
                with self:
                    parts = func.decompose(*args, **(kwargs or {}))
                if parts is not NotImplemented:
                    return parts
            result = func(*args, **(kwargs or {}))
            try:
                flops.count(func, args, kwargs or {}, result)
            except Exception as error:  # noqa: BLE001 - a formula that this operator's arguments do not fit
                flops.failed(func, error)
            return result

    return Counting()  # type: ignore[no-untyped-call]

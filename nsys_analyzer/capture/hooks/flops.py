"""Counts the FLOPs of one step with PyTorch's formulas while its operators run, and reads the model's dimensions.

The counted step is a step of the warm-up in a run without a profiler. During this step, compiled functions run operator
by operator, so that their operators are counted.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .modules import Modules

#: The phases for which FLOPs are counted, besides backward. Operators outside of all phases count as ``other``.
_PHASES = ("forward", "loss", "evaluation", "optimizer")
#: FLOPs of a softmax for each attention score: maximum, difference, exponential, sum and quotient.
_SOFTMAX_FLOPS_PER_SCORE = 5
_SOFTMAX_OPERATORS = ("aten._softmax", "aten._safe_softmax")
_MAXIMUM_OPERATORS = ("aten.max", "aten.amax")
_FUSED_ATTENTION_WORDS = ("scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention")
#: The matmuls in the backward pass of a fused attention: those of its gradients, and those that PyTorch counts, which
#: include the matmul that recomputes the scores.
_BACKWARD_MATMULS, _COUNTED_BACKWARD_MATMULS = 4, 5
#: The namespaces of PyTorch's own operators.
_TORCH_NAMESPACES = (
    "aten", "prims", "prim", "c10d", "c10d_functional", "_c10d_functional", "inductor", "profiler", "fsdp", "_dtensor",
)  # fmt: skip
#: Matches the names of PyTorch's operators that compute matmuls.
_MATMUL_NAME = re.compile(r"mm(?:_|$)|mkldnn_rnn|cudnn_rnn|miopen_rnn|trilinear|matmul|attention|conv")
#: For each dimension, by its key in a manifest: the attributes of a model's ``config`` that may contain it.
_CONFIG_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "vocab_size": ("vocab_size",),
}
#: The attributes of a model's ``config`` that may contain the number of experts of a mixture of experts.
_EXPERT_COUNT_NAMES = ("num_local_experts", "num_experts", "n_routed_experts")
#: The arguments of a call of a model that may contain the batch.
_BATCH_ARGUMENTS = ("input_ids", "decoder_input_ids", "inputs_embeds", "pixel_values")
#: The fewest equal modules in a list that count as the layers of a model.
_LEAST_LAYERS = 2


class CountedStep:
    """Counts the FLOPs of one step, including those on autograd's threads, and reads the dimensions of its models.

    Attributes:
        is_open: whether the step is running.
        manifest: the FLOPs and dimensions by the keys of a manifest. It is empty before the step has ended.
    """

    def __init__(self, torch: Any, modules: Modules, is_active: Callable[[str], bool]) -> None:
        """Prepares the count. The function ``is_active`` returns whether the phase of a name is active."""
        self.is_open = False
        self.manifest: dict[str, Any] = {}
        self._torch, self._modules, self._is_active = torch, modules, is_active
        self._backward_passes = self._passes_with_graph = 0
        self._batch: dict[str, int] = {}

    def open(self) -> None:
        """Starts the counted step.

        Raises:
            ImportError: this PyTorch is too old to count FLOPs.
        """
        self._formulas, self._mode = _collect_formulas(self._torch), _make_dispatch_mode(self, self._torch)
        self._is_counting = False
        self._passes: Counter[str] = Counter()
        self._flops_by_class: dict[tuple[str, str], int] = defaultdict(int)
        self._flops_by_module: dict[tuple[str, str], int] = defaultdict(int)
        self._batched_matmul_flops: dict[str, int] = defaultdict(int)
        self._softmax_flops: dict[str, int] = defaultdict(int)
        self._fused_attention_flops = self._fused_softmax_flops = 0
        self._modules_with_maximum: set[str] = set()
        self._modules_of_unknown: defaultdict[str, set[str]] = defaultdict(set)
        self.is_open = self._modules.is_tracking = True

    def close(self, *, succeeded: bool = True) -> None:
        """Ends the counted step, and discards the count of a step that was interrupted."""
        if not self.is_open:
            return
        self.is_open = self._modules.is_tracking = False
        if succeeded:
            batch = self._batch if self._passes["forward"] == 1 else {}
            if "vocab_size" not in self.manifest:  # without a vocabulary, the integers of a batch may not be tokens
                batch.pop("context_length", None)
            # A module with a softmax and no batched matmul is no attention.
            unfused = self._batched_matmul_flops.keys() & self._softmax_flops.keys()
            flops = {
                "passes": dict(self._passes),
                "classes": _nest_by_first_key(self._flops_by_class),
                "modules": _nest_by_first_key(self._flops_by_module),
                "softmax": self._fused_softmax_flops + sum(self._softmax_flops[module] for module in unfused),
                "attention_matmul": self._fused_attention_flops
                + sum(self._batched_matmul_flops[module] for module in unfused),
                "unknown": sorted(self._modules_of_unknown),
                "modules_of_unknown": {name: sorted(modules) for name, modules in self._modules_of_unknown.items()},
            }
            self.manifest = {**self.manifest, **batch, "flops": flops}

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager that counts the operators in its block during the counted step.

        The operators of a block inside another block are counted once.

        Raises:
            RuntimeError: PyTorch refuses to change the stance of torch.compile here.
        """
        if not self.is_open or self._is_counting:
            return contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            if hasattr(self._torch.compiler, "set_stance"):  # a dispatch mode sees no operators of compiled code
                stack.enter_context(self._torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._mode)
            stack.callback(setattr, self, "_is_counting", False)
            self._is_counting = True
            return stack.pop_all()

    def count_phase(self, name: str) -> None:
        """Counts an instance of a phase that begins."""
        if self.is_open:
            self._passes[name] += 1

    def change_backward_depth(self, change: int, *, creates_graph: bool) -> None:
        """Notes the start (``change`` is 1) or the end (−1) of a backward pass.

        ``creates_graph`` is whether autograd records the pass itself, for gradients of gradients.
        """
        self._backward_passes += change
        self._passes_with_graph += change if creates_graph else 0

    def read_dimensions(self, module: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Reads the dimensions of a model that is called, and of its batch."""
        if not (self.is_open and self._is_active("forward")):
            return
        with contextlib.suppress(Exception):  # attributes and tensors of the program may raise any error
            self._batch = read_batch_dimensions(arguments, keywords)
            self.manifest = {**read_model_dimensions(module), **count_bytes_read_by_decode(module), **self.manifest}

    def find_phase(self) -> str:
        """Returns the phase that the program is in. ``recomputed`` is a forward pass that backward runs again."""
        if self._backward_passes:
            recomputes = self._torch.is_grad_enabled() and not self._passes_with_graph
            return "recomputed" if recomputes else "backward"
        return next((name for name in _PHASES if self._is_active(name)), "other")

    def count(self, function: Any, arguments: Any, keywords: Any, result: Any) -> None:
        """Counts an operator that has run."""
        phase, module = self.find_phase(), self._modules.current_module() or ""
        packet = getattr(function, "_overloadpacket", function)
        formula, name = self._formulas.get(packet), str(packet)
        if formula is not None:
            flops = int(formula(*arguments, **keywords, out_val=result))
            kernel_class = "convolution" if "conv" in name else "matmul"
            if any(word in name for word in _FUSED_ATTENTION_WORDS):
                kernel_class = "fused attention"
                if "backward" in name:
                    flops = flops * _BACKWARD_MATMULS // _COUNTED_BACKWARD_MATMULS
                elif phase == "forward":
                    self._fused_attention_flops += flops
                    query, key = arguments[:2]  # (batch, head, query, feature) and (batch, head, key, feature)
                    scores = query.shape[0] * query.shape[1] * query.shape[-2] * key.shape[-2]
                    self._fused_softmax_flops += _SOFTMAX_FLOPS_PER_SCORE * int(scores)
            elif name in ("aten.bmm", "aten.baddbmm") and phase == "forward":
                self._batched_matmul_flops[module] += flops
            self._flops_by_class[phase, kernel_class] += flops
            self._flops_by_module[module, phase] += flops
        elif phase == "forward" and (
            name in _SOFTMAX_OPERATORS or (name == "aten.exp" and module in self._modules_with_maximum)
        ):
            self._softmax_flops[module] += _SOFTMAX_FLOPS_PER_SCORE * int(result.numel())
        elif name in _MAXIMUM_OPERATORS:  # an unfused softmax starts with its maximum
            self._modules_with_maximum.add(module)
        elif getattr(function, "namespace", None) not in _TORCH_NAMESPACES or _MATMUL_NAME.search(name):
            self._modules_of_unknown[name].add(module)

    def note_failure(self, function: Any, error: Exception) -> None:
        """Notes an operator that could not be counted."""
        name = f"{getattr(function, '_overloadpacket', function)} ({type(error).__name__})"
        self._modules_of_unknown[name].add(self._modules.current_module() or "")


def _nest_by_first_key(flat: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (outer, inner), value in flat.items():
        nested.setdefault(outer, {})[inner] = value
    return nested


def _collect_formulas(torch: Any) -> dict[Any, Any]:
    """Returns the FLOP formulas by operator: PyTorch's, and ours for attention on a CPU and matrix-vector products."""
    from torch.utils.flop_counter import flop_registry

    formulas, aten = dict(flop_registry), torch.ops.aten
    for suffix in ("", "_backward"):
        formula = formulas.get(getattr(aten, f"_scaled_dot_product_flash_attention{suffix}"))
        of_cpu = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}", None)
        if formula is not None and of_cpu is not None:
            formulas.setdefault(of_cpu, formula)
    formulas.setdefault(aten.mv, lambda matrix, _, **__: 2 * matrix.numel())
    formulas.setdefault(aten.addmv, lambda _, matrix, *__, **___: 2 * matrix.numel())
    formulas.setdefault(aten.dot, lambda vector, _, **__: 2 * vector.numel())
    return formulas


def _make_dispatch_mode(step: CountedStep, torch: Any) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            distributed = sys.modules.get("torch.distributed.tensor")
            if distributed is not None and any(issubclass(kind, distributed.DTensor) for kind in types):
                return NotImplemented  # the operators on the local tensors are counted instead
            # In inference mode, PyTorch passes composite operators to the counter before it decomposes them.
            if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
                with self:
                    parts = func.decompose(*args, **(kwargs or {}))
                if parts is not NotImplemented:
                    return parts
            result = func(*args, **(kwargs or {}))
            try:
                step.count(func, args, kwargs or {}, result)
            except Exception as error:  # noqa: BLE001 - the formula may not fit the operator's arguments
                step.note_failure(func, error)
            return result

    return Counting()  # type: ignore[no-untyped-call]


# --- dimensions ---


def read_model_dimensions(module: Any) -> dict[str, int]:
    """Returns the known dimensions of a model by the keys of a manifest.

    They are read from the model's modules, and from its ``config``, which models of transformers and many others have.
    If both contain a dimension, the one of ``config`` counts.
    """
    import torch

    dimensions: dict[str, int] = {}
    # The layers are the longest list of modules of one class.
    lists = [child for child in module.modules() if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential))]
    layers = max((len(child) for child in lists if len({type(layer) for layer in child}) == 1), default=0)
    if layers >= _LEAST_LAYERS:
        dimensions["num_layers"] = layers
    attention = next((child for child in module.modules() if isinstance(child, torch.nn.MultiheadAttention)), None)
    if attention is not None:
        dimensions |= {"num_heads": attention.num_heads, "d_model": attention.embed_dim}
    embeddings = [child for child in module.modules() if isinstance(child, torch.nn.Embedding)]
    if embeddings:
        largest = max(embeddings, key=lambda child: child.num_embeddings)
        dimensions |= {"vocab_size": largest.num_embeddings, "d_model": largest.embedding_dim}
    config = _find_config(module)
    for key, names in _CONFIG_NAMES.items():
        values = (getattr(config, name, None) for name in names)
        value = next((candidate for candidate in values if isinstance(candidate, int) and candidate > 0), None)
        if value is not None:
            dimensions[key] = value
    return dimensions


def count_bytes_read_by_decode(module: Any) -> dict[str, int]:
    """Returns the bytes of weights that each forward pass reads, and the bytes of one position in the KV cache.

    Embeddings count only if they are tied to the head, because a pass otherwise reads only some of their rows. For a
    mixture of experts the bytes of weights are unknown, because a pass may use only some experts.
    """
    import torch

    config = _find_config(module)
    parts = list(module.modules())
    uses = Counter(id(weight) for part in parts for weight in part.parameters(recurse=False))
    looked_up = {id(part.weight) for part in parts if isinstance(part, torch.nn.Embedding)}
    weights = [weight for weight in module.parameters() if id(weight) not in looked_up or uses[id(weight)] > 1]
    sizes = {"weights_bytes": sum(weight.numel() * weight.element_size() for weight in weights)}
    if any(getattr(config, name, None) for name in _EXPERT_COUNT_NAMES) or not sizes["weights_bytes"]:
        sizes = {}
    dimensions = read_model_dimensions(module)
    if getattr(config, "is_encoder_decoder", True) or not {"num_layers", "num_heads", "d_model"} <= dimensions.keys():
        return sizes
    heads = getattr(config, "num_key_value_heads", None) or dimensions["num_heads"]
    width = getattr(config, "head_dim", None) or dimensions["d_model"] // dimensions["num_heads"]
    element = next(weight.element_size() for weight in module.parameters() if weight.is_floating_point())
    return {**sizes, "cache_bytes": 2 * dimensions["num_layers"] * heads * width * element}


def read_batch_dimensions(arguments: Iterable[Any], keywords: Mapping[str, Any]) -> dict[str, int]:
    """Returns the batch size of a call's arguments, and the context length if the batch consists of tokens."""
    values = [*(keywords[name] for name in _BATCH_ARGUMENTS if name in keywords), *arguments, *keywords.values()]
    batch = next((value for value in values if hasattr(value, "shape") and hasattr(value, "is_floating_point")), None)
    if batch is None or not len(batch.shape) or not batch.shape[0]:
        return {}
    dimensions = {"batch_size": int(batch.shape[0])}
    if len(batch.shape) == 2 and not batch.is_floating_point():
        dimensions["context_length"] = int(batch.shape[1])
    return dimensions


def _find_config(module: Any) -> Any:
    configs = (getattr(candidate, "config", None) for candidate in module.modules())
    return next((candidate for candidate in configs if candidate is not None), None)

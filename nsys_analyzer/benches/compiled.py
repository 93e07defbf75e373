"""The whole model eager and with torch.compile: time of forward, backward and optimizer, and what traces show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nsys_analyzer.analysis.models import find_model
from nsys_analyzer.benches import compiled_pairs, compiled_traces
from nsys_analyzer.benches.conditions import conditions
from nsys_analyzer.benches.model import Bench, Case, Option, Profiled, Results, Settings
from nsys_analyzer.benches.physics import physics
from nsys_analyzer.benches.steps import SHARED, each, endings, flags, messages, rates, residences, step_case
from nsys_analyzer.capture.targets import Sweep, Target
from nsys_analyzer.report.model import Block, Listing, Paragraph, Section
from nsys_analyzer.text import marked

_COMPILED = {"eager": False, "compiled": True}
#: On a CPU one narrow layer, its attention PyTorch's: the C++ compiler needs seconds for each kernel.
_ON_CPU: dict[str, tuple[Any, ...]] = {
    "attention": ("sdpa",), "d_model": (256,), "d_ff": (1024,), "num_layers": (1,), "num_heads": (4,),
}  # fmt: skip
_OPTIONS = (
    Option("model", str, ("small", "medium", "large"), ("small",), "Sizes."),
    Option("context_length", int, (256,), (32,), "Tokens of a sequence."),
    Option("precision", ("fp32", "tf32", "bf16"), ("fp32", "bf16"), ("fp32",), "bf16 is autocast."),
    Option("mode", ("forward", "train"), ("forward", "train"), ("train",), "Forward alone, a full step."),
    Option("batch_size", int, (4,), (1,), "Sequences.", several=False),
    Option("profiled_models", int, (1,), (1,), "So many models, the first, are profiled.", several=False, least=0),
    *(replace(one, cpu=_ON_CPU.get(one.name, one.cpu)) for one in SHARED),
)
_DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
_MOST_PROFILED = 5
#: Lets PyTorch find nothing that an earlier run compiled. On a CPU it may: the traces would wait for the C++ compiler.
_COLD = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
_DEFINITIONS = marked(
    "*Speed-up* is the eager time ÷ the compiled one, each the median of unprofiled steps (of backward + optimizer the "
    "sum of their medians). `torch.compile(model)` compiles forward and backward; loss and optimizer stay eager. "
    "*Compile s* is the first compiled step without the median of the measured ones: the start of PyTorch's libraries "
    "is in it, and in the first row of a process the import of the compiler. *Repaid after* is compile time ÷ what a "
    "step saves."
)
_ANEW = "compiled code made anew, no cache in use"
_KEPT = "compiled code from PyTorch's cache where an earlier run left it: compile time is then that of finding it"


def _cases(settings: Settings) -> Iterator[Case]:
    """Everything eager, then everything compiled: a process each, as long as memory lasts."""
    for word, compiled in _COMPILED.items():
        cold = _COLD if compiled and settings.device == "cuda" else {}
        for model in (find_model(name).name for name in settings["model"]):
            for length in settings["context_length"]:
                for precision in settings["precision"]:
                    for mode in settings["mode"]:
                        yield step_case(
                            settings, f"{model}, context {length:,}, {precision}, {mode}, {word}", cold,
                            model=model, context_length=length, precision=precision, mode=mode,
                            batch_size=settings["batch_size"], optimizer="torch", compile=compiled,
                        )  # fmt: skip


def _captures(settings: Settings) -> Profiled:
    """A training step of the first models, eager and compiled; what it takes was timed by the cases."""
    models = settings["model"][: settings["profiled_models"]]
    if not models:
        return Profiled(())
    steps = min(settings["steps"], _MOST_PROFILED)
    targets = [
        target
        for compiled in _COMPILED.values()
        for target in Sweep(
            models, settings["context_length"], settings["mode"][-1:], settings["precision"], settings["batch_size"],
            settings["warmup_steps"], steps, settings.device, settings["attention"], compile=compiled,
            options=tuple(_target_options(settings)),
        ).targets()
    ]  # fmt: skip
    return Profiled(tuple(_untimed(target, settings) for target in targets))


def _target_options(settings: Settings) -> Iterator[str]:
    for key in (*_DIMENSIONS, "seed"):
        if settings[key]:
            yield from (f"--{key.replace('_', '-')}", str(settings[key]))


def _untimed(target: Target, settings: Settings) -> Target:
    """The target without its run under no profiler, which would have told the dimensions of the model."""
    size = find_model(str(target.described["model"]))
    dimensions: dict[str, int] = {key: settings[key] or getattr(size, key) for key in _DIMENSIONS}
    return replace(target, timed=False, described={**target.described, **dimensions, "seed": settings["seed"]})


def _section(results: Results) -> Section:
    rows, pairs = results.rows, compiled_pairs.pairs_of(results.rows)
    traces = compiled_traces.trace_pairs(results.captures)
    on_cpu = bool(results.captures) and all(capture.on_cpu for capture in results.captures if capture.whole)
    word = "operator" if on_cpu else "kernel"
    shares = () if on_cpu else compiled_traces.shares(traces, pairs)
    said = (*compiled_pairs.answers(pairs), *compiled_traces.answers(traces, word), *shares, *endings(rows))
    suspect = tuple(compiled_pairs.flags(pairs))
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join(said)),
        conditions(
            results,
            warmup=f"{each(rows, 'warmup_steps')} steps",
            steps=f"{each(rows, 'steps')} steps, batch {each(rows, 'batch_size')}, attention "
            f"{each(rows, 'attention')}; {_ANEW if _is_cold(results) else _KEPT}",
            synchronized="at the end of each phase",
            grad="off in forward alone (no_grad), recorded in train",
        ),
        *flags(results, rows),
        *([Listing(suspect)] if suspect else []),
        compiled_pairs.speed_ups(pairs),
        *compiled_pairs.bars(pairs),
        compiled_pairs.times(pairs),
        *compiled_traces.blocks(traces, results.captures, word),
        *compiled_pairs.memory(pairs),
        *messages(rows),
        *physics(results, rates(rows), residences(rows)),
        Paragraph(_DEFINITIONS),
    )
    return Section("bench-compile", "Bench: the model eager and compiled", blocks)


def _is_cold(results: Results) -> bool:
    compiled = results.of(compile=True)
    return bool(compiled) and all(row.environment == _COLD for row in compiled)


BENCH = Bench(
    "compile",
    "The whole model eager and with torch.compile: speed-up of each phase, compile time, and kernels from traces.",
    _OPTIONS,
    lambda settings: tuple(_cases(settings)),
    _section,
    _captures,
    lambda settings: settings["precision"],
)

"""The whole model eager and with torch.compile: time of each phase, and kernels from traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

from nsys_analyzer.analysis.transformer.models import find_model
from nsys_analyzer.configuration import Option
from nsys_analyzer.experiments.compile import pairs as compiled_pairs
from nsys_analyzer.experiments.compile import traces as compiled_traces
from nsys_analyzer.experiments.model import Bench, Profiled, Results, Settings, Task, grid, several, single
from nsys_analyzer.experiments.section import messages, no_cache
from nsys_analyzer.experiments.steps import DIMENSIONS, SHARED, TARGET, StepCase, models, step_section
from nsys_analyzer.report.model import Section
from nsys_analyzer.runs.targets import transformer_targets
from nsys_analyzer.text import phrase

#: On a CPU one narrow layer, its attention PyTorch's: the C++ compiler needs seconds for each kernel.
_ON_CPU: dict[str, Any] = {"attention": "sdpa", "d_model": 256, "d_ff": 1024, "num_layers": 1, "num_heads": 4}
_OPTIONS = (
    several(StepCase, "model", ("small", "medium", "large"), ("small",), help="sizes"),
    several(StepCase, "context_length", (256,), (32,)),
    several(StepCase, "precision", ("fp32", "bf16"), ("fp32",)),
    several(StepCase, "mode", ("forward", "train"), ("train",), choices=("forward", "train")),
    *single(StepCase, "batch_size"),
    Option(1, "how many models are profiled, the first ones", least=0, name="profiled_models"),
    *(replace(option, default_on_cpu=_ON_CPU.get(option.name, option.default_on_cpu)) for option in SHARED),
)
_MOST_PROFILED = 5
_DEFINITIONS = phrase(
    "*Speed-up* is the eager time ÷ the compiled one, each the median of unprofiled steps (of backward + optimizer the "
    "sum of their medians). `torch.compile(model)` compiles forward and backward; loss and optimizer stay eager. "
    "*Compile s* is the first compiled step without the median of the measured ones: it holds the start of PyTorch's "
    "libraries, and in the first row of a process the import of the compiler. *Repaid after* is compile time ÷ what a "
    "step saves."
)


def _cases(settings: Settings) -> Iterator[Task[StepCase]]:
    """Everything eager, then everything compiled: a process each, as long as memory lasts."""
    for compiled in (False, True):
        yield from grid(
            TARGET, settings, _label, environment=no_cache(settings) if compiled else None,
            compile=(compiled,), model=models(settings), context_length=settings["context_length"],
            precision=settings["precision"], mode=settings["mode"],
        )  # fmt: skip


def _label(case: StepCase) -> str:
    word = "compiled" if case.compile else "eager"
    return f"{case.model}, context {case.context_length:,}, {case.precision}, {case.mode}, {word}"


def _captures(settings: Settings) -> Profiled:
    """A training step of the first models, eager and compiled; the cases time it."""
    first = settings["model"][: settings["profiled_models"]]
    options = {
        "context_length": settings["context_length"], "mode": settings["mode"][-1:],
        "precision": settings["precision"], "batch_size": [settings["batch_size"]],
        "attention": [settings["attention"]], "device": [settings.device], "warmup_steps": [settings["warmup_steps"]],
        "steps": [min(settings["steps"], _MOST_PROFILED)], "compile": [False, True],
    }  # fmt: skip
    changed = {key: value for key in (*DIMENSIONS, "seed") if (value := settings[key])}
    words = [word for key, value in changed.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    targets = []
    for target in transformer_targets(first, options, words):
        size = find_model(str(target.run.model))
        # Its unprofiled run would have told these.
        dimensions: dict[str, Any] = {key: settings[key] or getattr(size, key) for key in DIMENSIONS}
        run = replace(target.run, **dimensions, seed=settings["seed"])
        targets.append(replace(target, timed=False, run=run))
    return Profiled(tuple(targets))


def _section(results: Results) -> Section:
    rows = results.rows_of(TARGET)
    pairs, traces = compiled_pairs.pairs_of(rows), compiled_traces.trace_pairs(results.captures)
    from nsys_analyzer.report.sections.evidence import kernel_word  # numpy with it, which help must not wait for

    word = kernel_word(*(capture for capture in results.captures if capture.whole))
    return step_section(
        "compile",
        "the model eager and compiled",
        results,
        rows,
        answers=(*compiled_pairs.answers(pairs), *compiled_traces.answers(traces, pairs, word)),
        suspect=compiled_pairs.warnings(pairs),
        blocks=(
            compiled_pairs.speed_ups(pairs),
            *compiled_pairs.speed_up_bars(pairs),
            compiled_pairs.phases(pairs),
            *compiled_traces.blocks(traces, word),
            *messages(results.captures, attrgetter("name")),
        ),
        definitions=_DEFINITIONS,
    )


BENCH = Bench(
    "compile",
    "The whole model eager and with torch.compile: speed-up of each phase, compile time, and kernels from traces.",
    _OPTIONS,
    lambda settings: tuple(_cases(settings)),
    _section,
    _captures,
    lambda settings: settings["precision"],
    (TARGET,),
)

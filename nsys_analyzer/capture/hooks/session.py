"""A program's steps as the hooks see them: which is warm-up, which is recorded, and what each takes.

A step of training is what lies between the ends of two optimizer steps; of several optimizers, the one that steps
least often closes it. Without an optimizer, a step is a call of a model, or of ``generate``.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

from .flops import CountedStep
from .modules import Backward, Modules
from .ranges import Clock, Ranges, Results, Work
from .stacks import Lines, Sampler, Waits

#: The variable that holds the descriptor by which two programs take turns (``verify.side_by_side``).
_TURN = "NSYS_ANALYZE_TURN"
#: What a program writes that opens the capture range by itself.
_OWN_WINDOW = re.compile(r"cudaProfilerStart|cuda\.profiler|from torch\.cuda import .*\bprofiler\b")
#: An optimizer that has not stepped yet is waited for, while another makes so many steps: it may close the first one.
_PATIENCE = 20
#: The step whose FLOPs are counted: the first one prepares what later ones use.
_COUNTED = 1
#: Steps that take equally long: so many, and by how much they may differ.
_ALIKE, _EVEN = 3, 1.25
#: What no thread is called: none makes steps any more.
_NO_THREAD = -1
#: Phases inside which a call of a module is no phase of its own.
_HOLDING = ("forward", "loss", "evaluation", "data", "zero_grad")


Method = TypeVar("Method", bound=Callable[..., Any])


def harmless(method: Method) -> Method:
    """A method that never fails the program: an error is said, and ends the annotation."""

    @functools.wraps(method)
    def guarded(session: Session, *arguments: Any, **keywords: Any) -> Any:
        begun = session.results.cost_begins()
        try:
            return method(session, *arguments, **keywords)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is none of the program's
            session.give_up()
            session.results.say(f"the annotation ended: {type(error).__name__}: {error}")
            return None
        finally:
            session.results.cost_ends(begun)

    return cast(Method, guarded)


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    counted = utils.counters if utils is not None else {}
    kinds = (("frames", "total"), ("stats", "unique_graphs"))
    return any(counted[kind][name] for kind, name in kinds if kind in counted)


class Phase:
    """A phase that goes on: whether it has a range, and when it began, where it is timed."""

    __slots__ = ("begun", "name", "pushed")

    def __init__(self, name: str) -> None:
        self.name = name
        self.pushed = False
        self.begun: Any = None


class Session:
    """The steps of this process, on the thread that makes them: the first that calls a model.

    Attributes:
        results: what is left for the report.
        thread: that thread, None before.
        ranges: what it writes.
        sampler: looks at its stack while it is recorded.
        steps: how many have ended.
        training: whether there is an optimizer.
        holds_calls: whether a call of a module is part of a phase already.
        modules: where the program is among its modules.
        passes: how many passes the generation has made that goes on, None where none does.
        root_classes: the classes of the modules that the program calls itself.
        on_settled: is called once, where these are known before the capture range opens.
    """

    def __init__(self, settings: Any, torch: Any) -> None:
        self.settings, self.torch = settings, torch
        self.results = Results(settings.results)
        self.thread: int | None = None
        self.steps = self._backward = 0
        self.holds_calls = False
        self.training = False
        self.ranges = Ranges(torch, settings.spellings, self.own_window_opens, self.own_window_closes)
        self.sampler, self._waits = Sampler(settings.samples, self.ranges), Waits(torch)
        self._lines = Lines() if settings.stacks and settings.results else None
        self.modules = Modules(torch, self.ranges)
        self.root_classes: set[type] = set()
        self.passes: int | None = None
        self.on_settled: Callable[[], None] | None = None
        self._root_classes_before = 0
        self._counted = CountedStep(torch, self.modules, self.is_active)
        self._work = Work(torch) if settings.block else None
        self._ends: deque[float] = deque(maxlen=_ALIKE + 1)
        self._active: dict[str, Phase] = {}
        self._optimizers: dict[int, int] = {}
        self._clock: Clock | None = None
        self._step: Any = None
        self._inferring = self._open = self._closed = False
        self._own_window = not settings.window
        self._recorded = 0

    def give_up(self) -> None:
        """The annotation ends: from here on the program is as it would be without it."""
        self.thread = _NO_THREAD
        self._counted.close(well=False)
        self._waits.close()
        self.modules.active = False

    @harmless
    def forked(self) -> None:
        """This is a child of ``os.fork()`` now: the steps are its parent's, if there were any."""
        if self.thread is not None:
            self.give_up()
            self._open, self._closed = False, True
            self.results = Results(None)

    # --- phases

    @harmless
    def is_here(self) -> bool:
        """Whether this thread is the one that makes the steps."""
        if self.thread is None:
            self.thread = threading.get_ident()
            self._find_own_window()
        return self.thread == threading.get_ident()

    @harmless
    def enter(self, name: str, *, begins: bool = True) -> Phase | None:
        """A phase begins, or will with ``resume``; None inside another of its name and on other threads."""
        loads_ahead = name == "data" and self.thread is None  # maybe on a thread of its own
        if loads_ahead or not self.is_here() or name in self._active:
            return None
        phase = self._active[name] = Phase(name)
        if self._lines:
            self._lines.add_call(name)
        if begins:
            self.resume(phase)
        self._count()
        self._counted.begin_phase(name)
        return phase

    @harmless
    def leave(self, phase: Phase | None) -> None:
        """The phase ends."""
        if phase is None or self._active.pop(phase.name, None) is None:
            return
        self.pause(phase)
        self._count()

    @harmless
    def resume(self, phase: Phase) -> None:
        """The phase goes on."""
        phase.begun = self._clock.begin() if self._clock and self._open else None
        phase.pushed = self.ranges.push(phase.name)

    @harmless
    def pause(self, phase: Phase) -> None:
        """What comes until ``resume`` is no part of the phase."""
        if phase.begun is not None and self._clock:
            self._clock.end(phase.name, phase.begun)
        if phase.pushed:
            self.ranges.pop()
        phase.begun, phase.pushed = None, False

    @harmless
    def backward_begins(self, roots: list[Any], *, some: bool, creates_graph: bool) -> Callable[[], None] | None:
        """A backward pass begins, or one inside another: calls of modules inside are recomputations.

        None for one that another thread of the program's runs by itself; else the result is called when it ends.

        Args:
            roots: the tensors behind which the graph lies.
            some: whether the pass runs some of the graph's nodes alone.
            creates_graph: whether it computes with gradients on.
        """
        if not (self._backward or self.is_here()):
            return None
        if self._work and not self._backward and self.steps < self.settings.warmup_steps:
            self._work.begin_backward(roots[0])
        hooks = self.modules.backward_begins(roots, some=some) if self.modules.active else None
        self._backward_passes(+1, creates_graph=creates_graph)
        return functools.partial(self._backward_ended, hooks, creates_graph=creates_graph)

    @harmless
    def _backward_ended(self, hooks: Backward | None, *, creates_graph: bool) -> None:
        self._backward_passes(-1, creates_graph=creates_graph)
        if hooks is not None:
            self.modules.backward_ended(hooks, outermost=not self._backward)

    def _backward_passes(self, more: int, *, creates_graph: bool) -> None:
        self._backward += more
        self._counted.begin_backward(more, creates_graph=creates_graph)
        self._count()

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        """Counts the FLOPs of what is called until the result is left, in the step in which they are counted."""
        try:
            return self._counted.counting()
        except Exception as error:  # noqa: BLE001 - whatever PyTorch says, it is none of the program's
            self._counted.close(well=False)
            self.results.say(f"FLOPs are not counted: {type(error).__name__}: {error}")
            return contextlib.nullcontext()

    def is_active(self, name: str) -> bool:
        """Whether a phase goes on."""
        return name in self._active

    def _count(self) -> None:
        self.holds_calls = self._backward > 0 or not self._active.keys().isdisjoint(_HOLDING)

    # --- modules

    @harmless
    def root_called(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """The program calls a module itself."""
        if self._lines and type(module) not in self.root_classes:
            self._lines.add_classes(module)
        self.root_classes.add(type(module))
        self._counted.call_model(module, arguments, keywords)
        if self._work and self.steps < self.settings.warmup_steps:
            self._work.call_model((*arguments, *keywords.values()))

    @harmless
    def pass_begins(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """A pass of a generation begins, the first over the prompts; True where its range has to be closed."""
        named = (keywords.get(name) for name in ("decoder_input_ids", "input_ids", "inputs_embeds"))
        shapes: list[Any] = [shape for one in (*named, *arguments[:1]) if len(shape := getattr(one, "shape", ())) > 1]
        if not shapes or self.passes is None:
            return False
        batch, new = shapes[0][:2]
        kind = "decode" if self.passes and new == 1 else "prefill"
        self.passes += 1
        # Of each sequence the mask has all positions that it attends to.
        mask: Any = getattr(keywords.get("attention_mask"), "shape", ())
        positions = f" sk={batch * mask[1]}" if len(mask) == 2 else ""
        return self.ranges.push(f"{kind} (inferred) bs={batch} toks={batch * new}{positions}")

    @harmless
    def batch_begins(self, processor: Any) -> bool:
        """A step of continuous batching begins; True where its range has to be closed."""
        inputs = getattr(processor, "inputs_and_outputs", None)
        if inputs is None:  # older ones hold their inputs themselves
            return False
        if pairs := getattr(inputs, "io_pairs", ()):  # of its asynchronous kind
            inputs = pairs[inputs.current_pair].host_io
        new = [request.query_length for request in inputs.requests_in_batch]
        positions = sum(request.state.position_offset for request in inputs.requests_in_batch)
        kinds = {"decode" if tokens == 1 else "prefill" for tokens in new}
        kind = "mixed" if len(kinds) > 1 else "".join(kinds)
        return bool(kind) and self.ranges.push(f"{kind} bs={len(new)} toks={sum(new)} sk={positions}")

    @harmless
    def module_called(self, module: Any) -> bool:
        """A module is called whose place is wanted; True for ``module_returned``."""
        self.modules.enter(module)
        return True

    @harmless
    def module_returned(self) -> None:
        """That call ends."""
        self.modules.leave()

    # --- steps

    @harmless
    def optimizer_made(self, optimizer: object) -> None:
        """There is an optimizer: the program trains, and what it did so far were no steps."""
        if not self.training:
            self.training, self.steps = True, 0
        self._optimizers[id(optimizer)] = 0

    @harmless
    def optimizer_stepped(self, optimizer: object) -> None:
        """An optimizer has stepped: it may have ended a step."""
        counts = self._optimizers
        counts[id(optimizer)] = mine = counts.get(id(optimizer), 0) + 1
        if 0 in counts.values() and max(counts.values()) <= _PATIENCE:
            return
        if mine == min(count for count in counts.values() if count):
            self._step_ended()

    @harmless
    def call_begins(self) -> bool:
        """A model is called, or generates; True where that is a step of inference, for ``call_ended``."""
        if self.training or self._inferring:
            return False
        self._inferring = True
        self._between_steps()
        self._begin_step()
        return True

    @harmless
    def call_ended(self, *, well: bool) -> None:
        """The step of inference has ended; one with an error is none."""
        self._inferring = False
        if well:
            self._step_ended()
        else:
            self._counted.close(well=False)
            self._end_step()

    def _step_ended(self) -> None:
        if self._work and self.steps < self.settings.warmup_steps:
            self._work.end_step()
        self.steps += 1
        self._ends.append(time.perf_counter())
        self._counted.close()
        self._waits.close()
        if self._open:
            self._end_step()
            self._recorded += 1
            if self.settings.block and not self._recorded % self.settings.block:
                self._take_turns()
            if not self._own_window and self._recorded >= self.settings.steps:
                # On a thread that is not the main one, the program goes on.
                stops = not self.settings.run_to_end and threading.current_thread() is threading.main_thread()
                self._close_window(stops=stops)
                if stops:
                    raise SystemExit(0)  # as sys.exit(0) would
        elif self.training:
            self._between_steps()
        if self.training:
            self._begin_step()

    def _between_steps(self) -> None:
        """A step may begin: it is one of the warm-up, or the first of the capture range."""
        if self._open or self._closed:
            return
        warmup, roots, roots_before = self.settings.warmup_steps, len(self.root_classes), self._root_classes_before
        self._root_classes_before = roots
        if self.on_settled and self.steps > _COUNTED and roots == roots_before and not self.settings.modules:
            self.on_settled()
            self.on_settled = None
        if self.settings.results is not None and self.steps == _COUNTED and warmup > _COUNTED and not self._work:
            self._count_flops()
        # The next step is like those that are recorded; nothing waits for a GPU that the program does not use.
        looks = self.settings.stacks and self.settings.results is not None and self.torch.cuda.is_initialized()
        if looks and self.steps == _COUNTED + 1 < warmup:
            self._waits.open()
        if self._own_window or self.steps < warmup:
            return
        taken = [end - before for before, end in pairwise(self._ends)]
        is_steady = len(taken) == _ALIKE and max(taken) <= _EVEN * min(taken)
        if is_steady or not self.settings.steady or self.steps >= 2 * warmup:
            self._switch_profiler(self.ranges.open_window)
            self._opened()

    def _count_flops(self) -> None:
        """Counts the FLOPs of the step that begins; an old PyTorch cannot, and compiled code may not fit uncompiled."""
        cuda, is_full = self.torch.cuda, False
        if has_compiled() and cuda.is_available() and cuda.is_initialized():
            total_bytes = cuda.get_device_properties(cuda.current_device()).total_memory
            is_full = 2 * cuda.max_memory_reserved() > total_bytes
        if is_full:
            self.results.say("FLOPs are not counted: without torch.compile a step may not fit into the GPU's memory")
            return
        try:
            self._counted.open()
        except ImportError as error:
            self.results.say(f"FLOPs are not counted: {error}")

    def _begin_step(self) -> None:
        if self._open:
            self.sampler.mark()
            self._step = self.ranges.start("step")
            if self._clock:
                self._clock.step_begins()

    def _end_step(self) -> None:
        self.ranges.end(self._step)
        self._step = None
        self.modules.forget()
        if self._clock:
            self._clock.step_ends()

    # --- the capture range

    @harmless
    def own_window_opens(self) -> None:
        """The program opens a capture range itself: that is the one that counts, if no step was recorded yet."""
        if self._closed or (self._recorded and not self._own_window):
            return
        self._counted.close(well=False)
        self._waits.close()
        self._own_window = True
        if self._open:
            self._end_step()
        else:
            self._opened()
        self.sampler.mark()
        if self.training:
            self._begin_step()

    @harmless
    def own_window_closes(self) -> None:
        """The program closes its capture range."""
        if self._own_window and self._open:
            self._shut()

    def _opened(self) -> None:
        self._open = True
        self.sampler.open()
        self.sampler.mark()
        self.modules.active = self.modules.written = self.settings.modules and self.settings.results is None
        if self.settings.results is not None:
            self._take_turns()
            self._clock = Clock(self.torch)
            self.results.is_measured = True

    def _take_turns(self) -> None:
        """Lets the other program go on, where two take turns, and waits for it; what loads data waits, too."""
        turn = int(os.environ.get(_TURN, "-1"))
        if turn < 0 or not self.settings.block or self._recorded >= self.settings.steps:
            return
        if self.torch.cuda.is_available() and self.torch.cuda.is_initialized():
            self.torch.cuda.synchronize()
        loaders = [child.pid for child in multiprocessing.active_children() if child.pid]
        for pid in loaders:
            os.kill(pid, signal.SIGSTOP)
        os.write(turn, b".")
        os.read(turn, 1)
        for pid in loaders:
            os.kill(pid, signal.SIGCONT)

    def _close_window(self, *, stops: bool = False) -> None:
        self._switch_profiler(self.ranges.close_window)
        self._shut(stops=stops)

    def _shut(self, *, stops: bool = False) -> None:
        self._open, self._closed = False, True
        self.sampler.close()
        self.results.is_measured = False
        self.modules.active = self.modules.written = False
        if self._clock is None:
            return
        steps = {"steps": self._recorded, "warmup_steps": self.steps - self._recorded}
        values = {
            **self._clock.machine(),
            **steps,
            **self._counted.manifest,
            "waits": self._waits.found or None,
            "lines": {name: line for name, line in self._lines.known.items() if line} if self._lines else None,
            "times_ms": self._clock.times_ms(),
        }
        if self._work:
            # JSON has no infinity and no NaN.
            losses = [loss if math.isfinite(loss) else str(loss) for loss in self._work.losses]
            values |= {"losses": losses, "rows": self._work.rows}
        if stops:
            values["stopped_after"] = self.steps
        if "flops" in values and has_compiled():
            values["peak_memory_bytes"] = None  # it is that of the step that ran uncompiled
        self.results.write(self._recorded, values)

    def _switch_profiler(self, switch: Callable[[], object]) -> None:
        """Opens or closes the capture range, where one is wanted, once the GPU has done what came before.

        Without a GPU only a recorder that replaced the function hears it.
        """
        on_gpu = self.torch.cuda.is_available()
        if on_gpu and self.torch.cuda.is_initialized():
            self.torch.cuda.synchronize()
        if self.settings.results is None:
            try:
                switch()
            except (AssertionError, RuntimeError):
                if on_gpu:
                    raise

    @harmless
    def at_exit(self) -> None:
        """The program ends: what lies in an open capture range is kept, and why there is none is said."""
        if self._open and not self._own_window:
            self._close_window()
        elif self.steps and not (self._closed or self._own_window):
            steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
            few = f"the program ended after {steps}, and the first {self.settings.warmup_steps} are not recorded"
            self.results.say(f"{few}: give --warmup {min(1, self.steps - 1)}")
        self.sampler.close()
        self.results.write_notes()

    def _find_own_window(self) -> None:
        """Looks on the first phase whether the program opens the capture range itself."""
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        if main and self.settings.window:
            with contextlib.suppress(OSError):  # a program out of an archive
                self._own_window = bool(_OWN_WINDOW.search(Path(main).read_text(encoding="utf-8", errors="replace")))
        if self._own_window and self.settings.results is None:
            self._opened()  # ranges are wanted wherever the profiler records

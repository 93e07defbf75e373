"""Tracks the steps of a program: decides which steps are warm-up, which are recorded, and how long each takes.

A training step lies between the ends of two optimizer steps. If there are several optimizers, the one that steps least
often ends the training step. Without an optimizer, a step is a call of a model or of ``generate``.
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
from .operators import OperatorStep
from .ranges import Clock, Ranges, Results, Work
from .stacks import Lines, Sampler, Waits

#: The environment variable with the file descriptor through which two programs take turns (``verify.side_by_side``).
_TURN_VARIABLE = "NSYS_ANALYZE_TURN"
#: The source text of a program that opens the capture range by itself.
_OWN_WINDOW = re.compile(r"cudaProfilerStart|cuda\.profiler|from torch\.cuda import .*\bprofiler\b")
#: Steps to wait for an optimizer that has not stepped yet. That optimizer may be the one that ends a training step.
_STEPS_TO_WAIT_FOR_OPTIMIZER = 20
#: The index of the step whose FLOPs are counted. The first step also does one-time work.
_COUNTED_STEP = 1
#: Steps are steady if the longest of the last three is at most 1.25 times as long as the shortest.
_STEADY_STEPS, _STEADY_RATIO = 3, 1.25
#: An ID that no thread has, which marks that the annotation has ended.
_NO_THREAD = -1
#: Phases that contain the calls of modules. A call inside them is not a phase itself.
_CONTAINING_PHASES = ("forward", "loss", "evaluation", "data", "zero_grad")


Method = TypeVar("Method", bound=Callable[..., Any])


def harmless(method: Method) -> Method:
    """Returns a method that raises no error into the program. An error is printed, and ends the annotation."""

    @functools.wraps(method)
    def guarded(session: Session, *arguments: Any, **keywords: Any) -> Any:
        """Runs the method, and ends the annotation after an error."""
        begun = session.results.cost_begins()
        try:
            return method(session, *arguments, **keywords)
        except Exception as error:  # noqa: BLE001 - an error of the hooks must not reach the program
            session.give_up()
            session.results.say(f"the annotation ended: {type(error).__name__}: {error}")
            return None
        finally:
            session.results.cost_ends(begun)

    return cast(Method, guarded)


def has_compiled() -> bool:
    """Returns whether torch.compile has compiled anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = utils.counters if utils is not None else {}
    kinds = (("frames", "total"), ("stats", "unique_graphs"))
    return any(counters[kind][name] for kind, name in kinds if kind in counters)


class Phase:
    """A phase that is active: its name, whether it has a range, and its start if it is timed."""

    __slots__ = ("begun", "name", "pushed")

    def __init__(self, name: str) -> None:
        self.name = name
        self.pushed = False
        self.begun: Any = None


class Session:
    """The steps of this process on its stepping thread, which is the first thread that calls a model.

    Attributes:
        results: the results for the report.
        thread: the ID of the stepping thread, or None before the first call of a model.
        ranges: writes the NVTX ranges.
        sampler: samples the stack of the stepping thread while it is recorded.
        steps: the number of steps that have ended.
        training: whether there is an optimizer.
        holds_calls: whether the program is inside a phase that contains the calls of modules.
        modules: tracks which module the program is in.
        passes: the number of forward passes of the active ``generate``, or None if there is none.
        root_classes: the classes of the modules that the program calls directly.
        on_settled: is called once, when no new root class appears before the capture range opens.
        on_operator_step: is called when the step begins in which each operator has a range.
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
        self.on_operator_step: Callable[[], None] | None = None
        self._root_classes_before = 0
        self._counted_step = CountedStep(torch, self.modules, self.is_active)
        self._operator_step = OperatorStep(
            torch, self.modules, self.ranges, settings.operators, self._counted_step.find_phase
        )
        self._work = Work(torch) if settings.steps_per_turn else None
        self._ends: deque[float] = deque(maxlen=_STEADY_STEPS + 1)
        self._active: dict[str, Phase] = {}
        self._optimizers: dict[int, int] = {}
        self._clock: Clock | None = None
        self._step: Any = None
        self._inferring = self._open = self._closed = False
        self._own_window = not settings.opens_window
        self._recorded = 0

    def give_up(self) -> None:
        """Ends the annotation. The program then runs as it would without it."""
        self.thread = _NO_THREAD
        self._counted_step.close(well=False)
        self._operator_step.close(well=False)
        self._waits.close()
        self.modules.active = False

    @harmless
    def forked(self) -> None:
        """Ends the annotation in a child of ``os.fork()`` if the parent has made steps."""
        if self.thread is not None:
            self.give_up()
            self._open, self._closed = False, True
            self.results = Results(None)

    # --- phases

    @harmless
    def is_here(self) -> bool:
        """Returns whether this thread is the stepping thread."""
        if self.thread is None:
            self.thread = threading.get_ident()
            self._find_own_window()
        return self.thread == threading.get_ident()

    @harmless
    def enter(self, name: str, *, begins: bool = True) -> Phase | None:
        """Enters a phase, and starts it unless ``begins`` is false; then ``resume`` starts it.

        Returns:
            The phase, or None inside another phase of the same name and on other threads.
        """
        loads_ahead = name == "data" and self.thread is None  # another thread may load the data
        if loads_ahead or not self.is_here() or name in self._active:
            return None
        phase = self._active[name] = Phase(name)
        if self._lines:
            self._lines.add_call(name)
        if begins:
            self.resume(phase)
        self._update_holds_calls()
        self._counted_step.begin_phase(name)
        self._operator_step.begin_phase(name)
        return phase

    @harmless
    def leave(self, phase: Phase | None) -> None:
        """Leaves a phase and ends its range."""
        if phase is None or self._active.pop(phase.name, None) is None:
            return
        self.pause(phase)
        self._update_holds_calls()

    @harmless
    def resume(self, phase: Phase) -> None:
        """Opens or continues the range of a phase, and starts or continues its timing."""
        phase.begun = self._clock.begin() if self._clock and self._open else None
        phase.pushed = self.ranges.push(phase.name)

    @harmless
    def pause(self, phase: Phase) -> None:
        """Interrupts the range and the timing of a phase until ``resume`` is called."""
        if phase.begun is not None and self._clock:
            self._clock.end(phase.name, phase.begun)
        if phase.pushed:
            self.ranges.pop()
        phase.begun, phase.pushed = None, False

    @harmless
    def backward_begins(self, roots: list[Any], *, some: bool, creates_graph: bool) -> Callable[[], None] | None:
        """Notes the start of a backward pass, which may lie inside another one. Module calls in it are recomputations.

        Args:
            roots: the tensors from which the graph starts.
            some: whether the pass runs only some nodes of the graph.
            creates_graph: whether the pass records gradients.

        Returns:
            The function to call at the end of the pass, or None if another thread of the program runs it.
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

    def _backward_passes(self, change: int, *, creates_graph: bool) -> None:
        self._backward += change
        self._counted_step.begin_backward(change, creates_graph=creates_graph)
        self._update_holds_calls()

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager that counts the FLOPs of its block during the counted step."""
        try:
            return self._counted_step.counting()
        except Exception as error:  # noqa: BLE001 - an error of PyTorch's counter must not reach the program
            self._counted_step.close(well=False)
            self.results.say(f"FLOPs are not counted: {type(error).__name__}: {error}")
            return contextlib.nullcontext()

    def is_active(self, name: str) -> bool:
        """Returns whether a phase is active."""
        return name in self._active

    def _update_holds_calls(self) -> None:
        self.holds_calls = self._backward > 0 or not self._active.keys().isdisjoint(_CONTAINING_PHASES)

    # --- modules

    @harmless
    def root_called(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Notes that the program calls a module directly."""
        if self._lines and type(module) not in self.root_classes:
            self._lines.add_classes(module)
        self.root_classes.add(type(module))
        self._counted_step.call_model(module, arguments, keywords)
        if self._work and self.steps < self.settings.warmup_steps:
            self._work.call_model((*arguments, *keywords.values()))

    @harmless
    def pass_begins(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Opens the range of a forward pass of ``generate``. The first forward pass is prefill.

        Returns:
            Whether a range was opened that has to be closed.
        """
        inputs = (keywords.get(name) for name in ("decoder_input_ids", "input_ids", "inputs_embeds"))
        shapes: list[Any] = [
            shape for tensor in (*inputs, *arguments[:1]) if len(shape := getattr(tensor, "shape", ())) > 1
        ]
        if not shapes or self.passes is None:
            return False
        batch, new = shapes[0][:2]
        kind = "decode" if self.passes and new == 1 else "prefill"
        self.passes += 1
        # The mask contains all positions to which each sequence attends.
        mask: Any = getattr(keywords.get("attention_mask"), "shape", ())
        positions = f" sk={batch * mask[1]}" if len(mask) == 2 else ""
        return self.ranges.push(f"{kind} (inferred) bs={batch} toks={batch * new}{positions}")

    @harmless
    def batch_begins(self, processor: Any) -> bool:
        """Opens the range of a step of continuous batching, and returns whether it has to be closed."""
        inputs = getattr(processor, "inputs_and_outputs", None)
        if inputs is None:  # older versions store their inputs elsewhere
            return False
        if pairs := getattr(inputs, "io_pairs", ()):  # asynchronous batching has two pairs of inputs and outputs
            inputs = pairs[inputs.current_pair].host_io
        new = [request.query_length for request in inputs.requests_in_batch]
        positions = sum(request.state.position_offset for request in inputs.requests_in_batch)
        kinds = {"decode" if tokens == 1 else "prefill" for tokens in new}
        kind = "mixed" if len(kinds) > 1 else "".join(kinds)
        return bool(kind) and self.ranges.push(f"{kind} bs={len(new)} toks={sum(new)} sk={positions}")

    @harmless
    def module_called(self, module: Any) -> bool:
        """Notes the call of a module, and returns True, so that ``module_returned`` is called at its end."""
        self.modules.enter(module)
        return True

    @harmless
    def module_returned(self) -> None:
        """Notes the end of the innermost call of a module."""
        self.modules.leave()

    # --- steps

    @harmless
    def optimizer_made(self, optimizer: object) -> None:
        """Notes a new optimizer. The program trains, so earlier calls of the model were not steps."""
        if not self.training:
            self.training, self.steps = True, 0
        self._optimizers[id(optimizer)] = 0

    @harmless
    def optimizer_stepped(self, optimizer: object) -> None:
        """Notes the step of an optimizer, which may end a training step."""
        counts = self._optimizers
        counts[id(optimizer)] = own_steps = counts.get(id(optimizer), 0) + 1
        if 0 in counts.values() and max(counts.values()) <= _STEPS_TO_WAIT_FOR_OPTIMIZER:
            return
        if own_steps == min(count for count in counts.values() if count):
            self._step_ended()

    @harmless
    def call_begins(self) -> bool:
        """Notes a call of a model or of ``generate``, and returns whether it is a step of inference."""
        if self.training or self._inferring:
            return False
        self._inferring = True
        self._between_steps()
        self._begin_step()
        return True

    @harmless
    def call_ended(self, *, well: bool) -> None:
        """Notes the end of a step of inference. A call that raised an error does not count as a step."""
        self._inferring = False
        if well:
            self._step_ended()
        else:
            self._counted_step.close(well=False)
            self._operator_step.close(well=False)
            self._end_step()

    def _step_ended(self) -> None:
        if self._work and self.steps < self.settings.warmup_steps:
            self._work.end_step()
        self.steps += 1
        self._ends.append(time.perf_counter())
        self._counted_step.close()
        self._waits.close()
        if self._operator_step.is_open:
            self._operator_step.close()
            self._finish_recording()
        elif self._open:
            self._end_step()
            self._recorded += 1
            if self.settings.steps_per_turn and not self._recorded % self.settings.steps_per_turn:
                self._take_turns()
            if self._has_recorded_all() and self._operator_step.is_done:
                self._finish_recording()
        elif self.training:
            self._between_steps()
        if self.training:
            self._begin_step()

    def _has_recorded_all(self) -> bool:
        """Returns whether the capture range contains all steps that it should contain."""
        return not self._own_window and self._recorded >= self.settings.steps

    def _finish_recording(self) -> None:
        """Closes the capture range after its last step, and ends the program unless it should run to its end."""
        # Only the main thread can end the program.
        stops = not self.settings.run_to_end and threading.current_thread() is threading.main_thread()
        self._close_window(stops=stops)
        if stops:
            raise SystemExit(0)  # like sys.exit(0)

    def _between_steps(self) -> None:
        """Prepares the next step: counts FLOPs, looks for waits, or opens the capture range after the warm-up."""
        if self._open or self._closed:
            return
        warmup, roots, roots_before = self.settings.warmup_steps, len(self.root_classes), self._root_classes_before
        self._root_classes_before = roots
        if self.on_settled and self.steps > _COUNTED_STEP and roots == roots_before and not self.settings.modules:
            self.on_settled()
            self.on_settled = None
        counts_flops = self.settings.results is not None and not self._work
        if counts_flops and self.steps == _COUNTED_STEP < warmup:
            self._count_flops()
        # Waits for the GPU are looked for in the step after the counted step, which is like the recorded steps. A
        # program without a GPU has no such waits.
        looks = self.settings.stacks and self.settings.results is not None and self.torch.cuda.is_initialized()
        if looks and self.steps == _COUNTED_STEP + 1 < warmup:
            self._waits.open()
        if self._own_window or self.steps < warmup:
            return
        durations_s = [end - before for before, end in pairwise(self._ends)]
        is_steady = len(durations_s) == _STEADY_STEPS and max(durations_s) <= _STEADY_RATIO * min(durations_s)
        if is_steady or not self.settings.waits_for_steady_steps or self.steps >= 2 * warmup:
            self._switch_profiler(self.ranges.open_window)
            self._start_recording()

    def _count_flops(self) -> None:
        """Starts to count the FLOPs of the next step, unless the step may not fit into memory without torch.compile."""
        cuda, is_full = self.torch.cuda, False
        if has_compiled() and cuda.is_available() and cuda.is_initialized():
            total_bytes = cuda.get_device_properties(cuda.current_device()).total_memory
            is_full = 2 * cuda.max_memory_reserved() > total_bytes
        if is_full:
            self.results.say("FLOPs are not counted: without torch.compile a step may not fit into the GPU's memory")
            return
        try:
            self._counted_step.open()
        except ImportError as error:  # an old PyTorch has no counter of FLOPs
            self.results.say(f"FLOPs are not counted: {error}")

    def _begin_step(self) -> None:
        if self._open and self._has_recorded_all():
            self._open_operator_step()
        elif self._open:
            self.sampler.mark()
            self._step = self.ranges.start("step")
            if self._clock:
                self._clock.step_begins()

    def _open_operator_step(self) -> None:
        """Opens the step in which each operator has a range, or closes the capture range if that is not possible."""
        self.sampler.close()
        if self.on_operator_step:
            self.on_operator_step()
        try:
            self._operator_step.open()
        except Exception as error:  # noqa: BLE001 - the measured steps are complete without this step
            self._operator_step.close(well=False)
            self.results.say(f"operators are not recorded: {type(error).__name__}: {error}")
            self._finish_recording()

    def _end_step(self) -> None:
        self.ranges.end(self._step)
        self._step = None
        self.modules.forget()
        if self._clock:
            self._clock.step_ends()

    # --- the capture range

    @harmless
    def own_window_opens(self) -> None:
        """Notes that the program opens its own capture range. It replaces the hooks' unless a step was recorded."""
        if self._closed or (self._recorded and not self._own_window):
            return
        self._counted_step.close(well=False)
        self._waits.close()
        self._own_window = True
        if self._open:
            self._end_step()
        else:
            self._start_recording()
        self.sampler.mark()
        if self.training:
            self._begin_step()

    @harmless
    def own_window_closes(self) -> None:
        """Notes that the program closes its own capture range."""
        if self._own_window and self._open:
            self._end_recording()

    def _start_recording(self) -> None:
        self._open = True
        self.sampler.open()
        self.sampler.mark()
        self.modules.active = self.modules.written = self.settings.modules and self.settings.results is None
        if self.settings.results is not None:
            self._take_turns()
            self._clock = Clock(self.torch)
            self.results.is_measured = True

    def _take_turns(self) -> None:
        """Waits for the other program if two programs take turns. The data loader's processes pause as well."""
        turn = int(os.environ.get(_TURN_VARIABLE, "-1"))
        if turn < 0 or not self.settings.steps_per_turn or self._recorded >= self.settings.steps:
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
        self._end_recording(stops=stops)

    def _end_recording(self, *, stops: bool = False) -> None:
        self._open, self._closed = False, True
        self._operator_step.close(well=False)
        self.sampler.close()
        self.results.is_measured = False
        self.modules.active = self.modules.written = False
        if self._clock is None:
            return
        steps = {"steps": self._recorded, "warmup_steps": self.steps - self._recorded}
        values = {
            **self._clock.machine(),
            **steps,
            **self._counted_step.manifest,
            "waits": self._waits.counts or None,
            "lines": {name: line for name, line in self._lines.places.items() if line} if self._lines else None,
            "times_ms": self._clock.times_ms(),
        }
        if self._work:
            # JSON has neither infinity nor NaN.
            losses = [loss if math.isfinite(loss) else str(loss) for loss in self._work.losses]
            values |= {"losses": losses, "rows": self._work.rows}
        if stops:
            values["stopped_after"] = self.steps
        if "flops" in values and has_compiled():
            values["peak_memory_bytes"] = None  # the peak belongs to the step that ran without torch.compile
        self.results.write(self._recorded, values)

    def _switch_profiler(self, switch: Callable[[], object]) -> None:
        """Opens or closes the capture range of a profiled run, after the GPU has finished earlier work.

        Without a GPU, the call only reaches a recorder that replaced the function.
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
        """Closes an open capture range at the end of the program, or prints why no capture range was opened."""
        if self._open and not self._own_window:
            self._close_window()
        elif self.steps and not (self._closed or self._own_window):
            steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
            too_few = f"the program ended after {steps}, and the first {self.settings.warmup_steps} are not recorded"
            self.results.say(f"{too_few}: give --warmup {min(1, self.steps - 1)}")
        self.sampler.close()
        self.results.write_notes()

    def _find_own_window(self) -> None:
        """Checks in the program's source whether it opens the capture range itself."""
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        if main and self.settings.opens_window:
            with contextlib.suppress(OSError):  # a program in an archive has no such file
                self._own_window = bool(_OWN_WINDOW.search(Path(main).read_text(encoding="utf-8", errors="replace")))
        if self._own_window and self.settings.results is None:
            self._start_recording()  # ranges are needed wherever the profiler records

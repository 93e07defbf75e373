"""Tracks the steps of a program: which steps are warm-up, which steps are recorded, and how long each step takes.

A training step lies between the ends of two optimizer steps. If there are several optimizers, the optimizer that steps
least often ends the training step. Without an optimizer, a step is a call of a model or of ``generate``.
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

from .compiled import CompiledCode, has_compiled
from .energy_steps import EnergySteps, observe_steps
from .flops import CountedStep
from .memory import MemoryHistory
from .modules import Backward, Modules
from .operators import OperatorStep
from .ranges import Clock, Ranges, Results, WarmupWork
from .stacks import Sampler, SourceLines, Waits

#: The environment variable with the file descriptor of the socket through which ``verify.side_by_side`` lets two
#: programs run in turns.
_TURN_VARIABLE = "NSYS_ANALYZE_TURN"
#: Matches source text of a program that opens the capture range itself.
_OWN_WINDOW = re.compile(r"cudaProfilerStart|cuda\.profiler|from torch\.cuda import .*\bprofiler\b")
#: Steps to wait for an optimizer that has not stepped yet, because it may be the optimizer that ends a training step.
_STEPS_TO_WAIT_FOR_OPTIMIZER = 20
#: The index of the step whose FLOPs are counted. Step 0 also does one-time work.
_COUNTED_STEP = 1
#: Steps are steady if the longest of the last three is at most 1.25 times as long as the shortest.
_STEADY_STEPS, _STEADY_RATIO = 3, 1.25
#: A thread ID that no thread has. As the ID of the stepping thread, it marks that the annotation has ended.
_NO_THREAD = -1
#: Phases that contain calls of modules. A call of a module inside such a phase is not a phase itself.
_CONTAINING_PHASES = ("forward", "loss", "evaluation", "data", "zero_grad")


Method = TypeVar("Method", bound=Callable[..., Any])


def harmless(method: Method) -> Method:
    """Wraps a method so that its errors do not reach the program. An error is printed, and ends the annotation."""

    @functools.wraps(method)
    def guarded(session: Session, *arguments: Any, **keywords: Any) -> Any:
        """Runs the method, and ends the annotation after an error."""
        start_ns = session.results.begin_hook_time()
        try:
            return method(session, *arguments, **keywords)
        except Exception as error:  # noqa: BLE001 - an error of the hooks must not reach the program
            session.stop_annotation()
            session.results.note_message(f"the annotation ended: {type(error).__name__}: {error}")
            return None
        finally:
            session.results.end_hook_time(start_ns)

    return cast(Method, guarded)


class Phase:
    """A phase that is active: its name, whether the hooks opened a range for it, and its start times if it is timed."""

    __slots__ = ("energy_start", "has_range", "name", "start", "start_ns")

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_range = False
        self.start: Any = None
        self.energy_start: Any = None
        self.start_ns = 0


class Session:
    """Tracks the steps of this process on its stepping thread, which is the first thread that calls a model.

    Attributes:
        results: the results for the report.
        thread: the ID of the stepping thread, or None before the first call of a model.
        ranges: writes the NVTX ranges.
        sampler: samples the stack of the stepping thread during the recording.
        steps: the number of steps that have ended.
        training: whether the program has made an optimizer.
        phase_contains_calls: whether the program is inside a phase that contains calls of modules.
        modules: tracks which module the program is in.
        generate_passes: the number of forward passes of the running ``generate``, or None outside of ``generate``.
        root_classes: the classes of the modules that the program calls directly.
        on_root_classes_settled: is called once, after a step of the warm-up in which no new root class appeared.
        on_operator_step_begins: is called when the step begins in which each operator has a range.
        on_recording_ended: is called after the recording, so that the hooks of that step do not slow later steps down.
    """

    def __init__(self, settings: Any, torch: Any) -> None:
        self.settings, self.torch = settings, torch
        self.results = Results(settings.results)
        self.thread: int | None = None
        self.steps = self._open_backward_passes = 0
        self.phase_contains_calls = False
        self.training = False
        self.ranges = Ranges(torch, settings.spellings, self.note_own_window_opened, self.note_own_window_closed)
        self.sampler, self._waits = Sampler(settings.samples, self.ranges), Waits(torch)
        self._compiled_code = CompiledCode()
        self._lines = SourceLines() if settings.stacks and settings.results else None
        self.modules = Modules(torch, self.ranges)
        self.root_classes: set[type] = set()
        self.generate_passes: int | None = None
        self.on_root_classes_settled: Callable[[], None] | None = None
        self.on_operator_step_begins: Callable[[], None] | None = None
        self.on_recording_ended: Callable[[], None] | None = None
        self._root_classes_before = 0
        self._counted_step = CountedStep(torch, self.modules, self.is_active)
        self._operator_step = OperatorStep(
            torch, self.modules, self.ranges, settings.operators, self._counted_step.find_phase
        )
        self._memory = MemoryHistory(torch)
        self._work = WarmupWork(torch) if settings.steps_per_turn else None
        self._step_times, self._ends_after_timed_steps = observe_steps(torch), False
        self._step_end_times_s: deque[float] = deque(maxlen=_STEADY_STEPS + 1)
        self._active_phases: dict[str, Phase] = {}
        self._optimizers: dict[int, int] = {}
        self._clock: Clock | None = None
        self._step_range: Any = None
        self._in_inference_step = self._window_is_open = self._window_was_closed = False
        self._program_opens_window = not settings.opens_window
        self._recorded_steps = 0

    def stop_annotation(self) -> None:
        """Ends the annotation. The program then runs as without the hooks."""
        self.thread = _NO_THREAD
        self._counted_step.close(succeeded=False)
        self._operator_step.close(succeeded=False)
        self._waits.close()
        self._step_times.stop()
        self.modules.is_tracking = False

    @harmless
    def stop_in_forked_child(self) -> None:
        """Ends the annotation in a child of ``os.fork()`` if the parent has made steps."""
        if self.thread is not None:
            self.stop_annotation()
            self._window_is_open, self._window_was_closed = False, True
            self.results = Results(None)

    # --- phases

    @harmless
    def is_on_stepping_thread(self) -> bool:
        """Returns whether this thread is the stepping thread."""
        if self.thread is None:
            self.thread = threading.get_ident()
            self._find_own_window()
        return self.thread == threading.get_ident()

    @harmless
    def enter_phase(self, name: str, *, starts_now: bool = True) -> Phase | None:
        """Enters a phase. If ``starts_now`` is false, its range and its timing start when ``resume_phase`` is called.

        Returns:
            The phase, or None inside another phase of the same name and on other threads.
        """
        # Data that is loaded before the first call of a model may be loaded by another thread than the stepping thread.
        if (name == "data" and self.thread is None) or not self.is_on_stepping_thread() or name in self._active_phases:
            return None
        phase = self._active_phases[name] = Phase(name)
        if self._lines:
            self._lines.note_phase_call(name)
        if starts_now:
            self.resume_phase(phase)
        self._update_phase_contains_calls()
        self._counted_step.count_phase(name)
        self._operator_step.count_phase(name)
        return phase

    @harmless
    def leave_phase(self, phase: Phase | None) -> None:
        """Leaves a phase and ends its range."""
        if phase is None or self._active_phases.pop(phase.name, None) is None:
            return
        self.pause_phase(phase)
        self._update_phase_contains_calls()

    @harmless
    def resume_phase(self, phase: Phase) -> None:
        """Opens or continues the range of a phase, and starts or continues its timing."""
        phase.start = self._clock.mark_time() if self._clock and self._window_is_open else None
        if isinstance(self._step_times, EnergySteps):
            phase.energy_start = self._step_times.mark_phase_start()
        phase.start_ns = time.time_ns()
        phase.has_range = self.ranges.push(phase.name)

    @harmless
    def pause_phase(self, phase: Phase) -> None:
        """Interrupts the range and the timing of a phase until ``resume_phase`` is called."""
        if phase.start is not None and self._clock:
            self._clock.add_span(phase.name, phase.start)
        if isinstance(self._step_times, EnergySteps):
            self._step_times.note_phase(phase.name, phase.energy_start)
        if phase.start_ns:
            self._memory.add_phase(phase.name, phase.start_ns)
        if phase.has_range:
            self.ranges.pop()
        phase.start, phase.energy_start, phase.start_ns, phase.has_range = None, None, 0, False

    @harmless
    def begin_backward_pass(
        self, roots: list[Any], *, runs_some_nodes: bool, creates_graph: bool
    ) -> Callable[[], None] | None:
        """Notes the start of a backward pass, which may lie inside another one. Module calls in it are recomputations.

        Args:
            roots: the tensors from which the graph starts.
            runs_some_nodes: whether the pass runs only some nodes of the graph.
            creates_graph: whether autograd records the pass itself, for gradients of gradients.

        Returns:
            The function to call at the end of the pass, or None if another thread of the program runs it.
        """
        if not (self._open_backward_passes or self.is_on_stepping_thread()):
            return None
        if self._work and not self._open_backward_passes and self.steps < self.settings.warmup_steps:
            self._work.note_loss(roots[0])
        hooks = None
        if self.modules.is_tracking:
            hooks = self.modules.hook_backward_graph(roots, runs_some_nodes=runs_some_nodes)
        self._count_backward_passes(+1, creates_graph=creates_graph)
        return functools.partial(self._end_backward_pass, hooks, creates_graph=creates_graph)

    @harmless
    def _end_backward_pass(self, hooks: Backward | None, *, creates_graph: bool) -> None:
        self._count_backward_passes(-1, creates_graph=creates_graph)
        if hooks is not None:
            self.modules.unhook_backward_graph(hooks, outermost=not self._open_backward_passes)

    def _count_backward_passes(self, change: int, *, creates_graph: bool) -> None:
        self._open_backward_passes += change
        self._counted_step.change_backward_depth(change, creates_graph=creates_graph)
        self._operator_step.note_backward_pass(begins=change > 0)
        self._update_phase_contains_calls()

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager that counts the FLOPs of its block during the counted step."""
        try:
            return self._counted_step.counting()
        except Exception as error:  # noqa: BLE001 - an error of PyTorch's counter must not reach the program
            self._counted_step.close(succeeded=False)
            self.results.note_message(f"FLOPs are not counted: {type(error).__name__}: {error}")
            return contextlib.nullcontext()

    def is_active(self, name: str) -> bool:
        """Returns whether a phase is active."""
        return name in self._active_phases

    def _update_phase_contains_calls(self) -> None:
        containing = self._active_phases.keys() & _CONTAINING_PHASES
        self.phase_contains_calls = self._open_backward_passes > 0 or bool(containing)

    # --- modules

    @harmless
    def note_root_call(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Notes that the program calls a module directly."""
        if self._lines and type(module) not in self.root_classes:
            self._lines.note_classes(module)
        self.root_classes.add(type(module))
        self._counted_step.read_dimensions(module, arguments, keywords)
        self._operator_step.note_model_call(module, arguments, keywords)
        if self._work and self.steps < self.settings.warmup_steps:
            self._work.note_model_call((*arguments, *keywords.values()))

    @harmless
    def open_forward_pass_range(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Opens the range of a forward pass of ``generate``. The first forward pass is prefill.

        Returns:
            Whether a range was opened, which the caller has to close.
        """
        inputs = (keywords.get(name) for name in ("decoder_input_ids", "input_ids", "inputs_embeds"))
        shapes: list[Any] = [
            shape for tensor in (*inputs, *arguments[:1]) if len(shape := getattr(tensor, "shape", ())) > 1
        ]
        if not shapes or self.generate_passes is None:
            return False
        batch, new = shapes[0][:2]
        kind = "decode" if self.generate_passes and new == 1 else "prefill"
        self.generate_passes += 1
        # The second dimension of the mask is the number of positions to which each sequence attends.
        mask: Any = getattr(keywords.get("attention_mask"), "shape", ())
        positions = f" sk={batch * mask[1]}" if len(mask) == 2 else ""
        return self.ranges.push(f"{kind} (inferred) bs={batch} toks={batch * new}{positions}")

    @harmless
    def open_batch_range(self, processor: Any) -> bool:
        """Opens the range of a step of continuous batching. Returns whether it did, and the caller has to close it."""
        inputs = getattr(processor, "inputs_and_outputs", None)
        if inputs is None:  # older versions of transformers have no such attribute
            return False
        if pairs := getattr(inputs, "io_pairs", ()):  # asynchronous batching has two pairs of inputs and outputs
            inputs = pairs[inputs.current_pair].host_io
        new = [request.query_length for request in inputs.requests_in_batch]
        positions = sum(request.state.position_offset for request in inputs.requests_in_batch)
        kinds = {"decode" if tokens == 1 else "prefill" for tokens in new}
        kind = "mixed" if len(kinds) > 1 else "".join(kinds)
        return bool(kind) and self.ranges.push(f"{kind} bs={len(new)} toks={sum(new)} sk={positions}")

    @harmless
    def enter_module(self, module: Any) -> bool:
        """Notes the call of a module, and returns True, so that ``leave_module`` is called at its end."""
        self.modules.enter(module)
        return True

    @harmless
    def leave_module(self) -> None:
        """Notes the end of the innermost call of a module."""
        self.modules.leave()

    # --- steps

    @harmless
    def note_optimizer(self, optimizer: object) -> None:
        """Notes a new optimizer. It shows that the program trains, so earlier calls of the model were not steps."""
        if not self.training:
            self.training, self.steps, self._step_times = True, 0, observe_steps(self.torch)
        self._optimizers[id(optimizer)] = 0

    @harmless
    def note_optimizer_step(self, optimizer: object) -> None:
        """Notes the step of an optimizer, which may end a training step."""
        counts = self._optimizers
        counts[id(optimizer)] = own_steps = counts.get(id(optimizer), 0) + 1
        if 0 in counts.values() and max(counts.values()) <= _STEPS_TO_WAIT_FOR_OPTIMIZER:
            return
        if own_steps == min(count for count in counts.values() if count):
            self._finish_step()

    @harmless
    def begin_inference_step(self) -> bool:
        """Notes a call of a model or of ``generate``, and returns whether it is a step of inference."""
        if self.training or self._in_inference_step:
            return False
        self._in_inference_step = True
        self._prepare_next_step()
        self._open_step_range()
        return True

    @harmless
    def end_inference_step(self, *, succeeded: bool) -> None:
        """Notes the end of a call of a model or of ``generate``, which counts as a step unless it raised an error."""
        self._in_inference_step = False
        if succeeded:
            self._finish_step()
        else:
            self._counted_step.close(succeeded=False)
            self._operator_step.close(succeeded=False)
            self._close_step_range()

    def _finish_step(self) -> None:
        if self._work and self.steps < self.settings.warmup_steps:
            self._work.finish_step()
        self.steps += 1
        self._memory.note_step_end()
        self._step_end_times_s.append(time.perf_counter())
        if self._step_times.note_step_end() and self._ends_after_timed_steps:
            raise SystemExit(0)
        self._counted_step.close()
        self._waits.close()
        if self._operator_step.is_open:
            self._close_operator_step()
            self._finish_recording()
        elif self._window_is_open:
            self._close_step_range()
            self._recorded_steps += 1
            if self.settings.steps_per_turn and not self._recorded_steps % self.settings.steps_per_turn:
                self._wait_for_turn()
            if self.has_recorded_all() and self._operator_step.is_done:
                self._finish_recording()
        elif self.training:
            self._prepare_next_step()
        if self.training:
            self._open_step_range()

    def has_recorded_all(self) -> bool:
        """Returns whether the capture range contains all steps that it should contain."""
        return not self._program_opens_window and self._recorded_steps >= self.settings.steps

    def _finish_recording(self) -> None:
        """Closes the capture range after its last step, and ends the program unless it should run to its end.

        The program ends later if steps after the capture range are measured.
        """
        # Only the main thread can end the program.
        stops = not self.settings.run_to_end and threading.current_thread() is threading.main_thread()
        self._close_window(stops=stops)
        self._ends_after_timed_steps = stops
        if stops and not self._step_times.is_measuring:
            raise SystemExit(0)

    def _prepare_next_step(self) -> None:
        """Prepares the next step: counts its FLOPs, observes its waits, or opens the capture range before it."""
        if self._window_is_open or self._window_was_closed:
            return
        warmup, roots, roots_before = self.settings.warmup_steps, len(self.root_classes), self._root_classes_before
        self._root_classes_before = roots
        settled = self.steps > _COUNTED_STEP and roots == roots_before and not self.settings.modules
        if settled and self.on_root_classes_settled:
            self.on_root_classes_settled()
            self.on_root_classes_settled = None
        is_timed = self.settings.results is not None
        if is_timed and not self._work and self.steps == _COUNTED_STEP < warmup:
            self._count_flops()
        # Waits for the GPU are observed in the step after the counted step, because that step is like the recorded
        # steps. A program without a GPU has no such waits.
        observes_waits = is_timed and self.settings.stacks and self.torch.cuda.is_initialized()
        if observes_waits and self.steps == _COUNTED_STEP + 1 < warmup:
            self._waits.open()
        if self._program_opens_window or self.steps < warmup:
            return
        durations_s = [end - before for before, end in pairwise(self._step_end_times_s)]
        is_steady = len(durations_s) == _STEADY_STEPS and max(durations_s) <= _STEADY_RATIO * min(durations_s)
        if is_steady or not self.settings.waits_for_steady_steps or self.steps >= 2 * warmup:
            self._step_times.finish()
            self._switch_profiler(self.ranges.open_window)
            self._start_recording()

    def _count_flops(self) -> None:
        """Starts to count the FLOPs of the next step, which then runs without torch.compile.

        If this step could run out of GPU memory, its FLOPs are not counted.
        """
        cuda, is_full = self.torch.cuda, False
        if has_compiled() and cuda.is_available() and cuda.is_initialized():
            total_bytes = cuda.get_device_properties(cuda.current_device()).total_memory
            is_full = 2 * cuda.max_memory_reserved() > total_bytes
        if is_full:
            reason = "without torch.compile a step may not fit into the GPU's memory"
            self.results.note_message(f"FLOPs are not counted: {reason}")
            return
        try:
            self._counted_step.open()
        except ImportError as error:  # an old PyTorch has no counter of FLOPs
            self.results.note_message(f"FLOPs are not counted: {error}")

    def _open_step_range(self) -> None:
        if self._window_is_open and self.has_recorded_all():
            if self._operator_step.is_done:  # a call of the model failed during the step
                self._finish_recording()
            else:
                self._open_operator_step()
        elif self._window_is_open:
            self.sampler.mark_clock()
            self._step_range = self.ranges.start("step")
            if self._clock:
                self._clock.begin_step()

    def _open_operator_step(self) -> None:
        """Opens the step in which each operator has a range, or closes the capture range if that is not possible."""
        if self.on_operator_step_begins:
            self.on_operator_step_begins()
        try:
            self._operator_step.open()
            self.sampler.close()  # inside the step, because it takes time
        except Exception as error:  # noqa: BLE001 - the measured steps are complete without this step
            self._note_missing_operators(error)
            self._finish_recording()

    def _close_operator_step(self) -> None:
        try:
            self._operator_step.close()
        except Exception as error:  # noqa: BLE001 - the measured steps are complete without this step
            self._note_missing_operators(error)

    def _note_missing_operators(self, error: Exception) -> None:
        self.results.note_message(f"operators are not recorded: {type(error).__name__}: {error}")

    def _close_step_range(self) -> None:
        self.ranges.end(self._step_range)
        self._step_range = None
        self.modules.forget_sequence_numbers()
        if self._clock:
            self._clock.end_step()

    # --- the capture range

    @harmless
    def note_own_window_opened(self) -> None:
        """Notes that the program opens its own capture range, which replaces the hooks' if no step was recorded yet."""
        if self._window_was_closed or (self._recorded_steps and not self._program_opens_window):
            return
        self._counted_step.close(succeeded=False)
        self._waits.close()
        self._program_opens_window = True
        self._step_times.finish()
        if self._window_is_open:
            self._close_step_range()
        else:
            self._start_recording()
        self.sampler.mark_clock()
        if self.training:
            self._open_step_range()

    @harmless
    def note_own_window_closed(self) -> None:
        """Notes that the program closes its own capture range."""
        if self._program_opens_window and self._window_is_open:
            self._end_recording()
            self._step_times.note_range_closed()

    def _start_recording(self) -> None:
        self._window_is_open = True
        self.sampler.open()
        self.sampler.mark_clock()
        self.modules.is_tracking = self.modules.writes_ranges = self.settings.modules and self.settings.results is None
        if self.settings.results is not None:
            self._wait_for_turn()
            self._compiled_code.start()
            self._clock = Clock(self.torch)
            self.results.is_measured = True

    def _wait_for_turn(self) -> None:
        """Waits until the other program has run its steps, if two programs run in turns. Data loaders pause as well."""
        turn = int(os.environ.get(_TURN_VARIABLE, "-1"))
        if turn < 0 or not self.settings.steps_per_turn or self._recorded_steps >= self.settings.steps:
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
        self._step_times.note_range_closed()

    def _end_recording(self, *, stops: bool = False) -> None:
        self._window_is_open, self._window_was_closed = False, True
        self._memory.finish()
        self._operator_step.close(succeeded=False)
        if self.on_recording_ended and not self.settings.modules:
            self.on_recording_ended()
        self.sampler.close()
        self.results.is_measured = False
        self.modules.is_tracking = self.modules.writes_ranges = False
        if self._clock is None:
            return
        steps = {"steps": self._recorded_steps, "warmup_steps": self.steps - self._recorded_steps}
        values = {
            **self._clock.read_machine(),
            **steps,
            **self._counted_step.manifest,
            "compiled": self._compiled_code.describe(),
            "waits": self._waits.counts_by_line or None,
            "lines": {name: line for name, line in self._lines.line_of_name.items() if line} if self._lines else None,
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
        self.results.write(self._recorded_steps, values)

    def _switch_profiler(self, switch: Callable[[], object]) -> None:
        """Opens or closes the capture range of a profiled run, after the GPU has finished its earlier work.

        Without a GPU, only a recorder that replaced the function is called, and PyTorch's own function raises an error.
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
        if self._window_is_open and not self._program_opens_window:
            if self.has_recorded_all() and self.settings.operators:
                self.results.note_message("operators are not recorded: the program ended after the measured steps")
            self._close_window()
        elif self.steps and not (self._window_was_closed or self._program_opens_window):
            steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
            too_few = f"the program ended after {steps}, and the first {self.settings.warmup_steps} are not recorded"
            self.results.note_message(f"{too_few}: give --warmup {min(1, self.steps - 1)}")
        self._step_times.finish()
        self.sampler.close()
        self.results.write_notes()

    def _find_own_window(self) -> None:
        """Finds out from the source text of the program whether the program opens the capture range itself."""
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        if main and self.settings.opens_window:
            with contextlib.suppress(OSError):  # the source of a program in an archive is no file
                text = Path(main).read_text(encoding="utf-8", errors="replace")
                self._program_opens_window = bool(_OWN_WINDOW.search(text))
        if self._program_opens_window and self.settings.results is None:
            self._start_recording()  # the hooks write ranges from now on, because the profiler may start at any time

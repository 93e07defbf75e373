"""Records one more step of a target after its measured steps, in which each call of an operator has a range.

``nsys-analyze run`` names the file for the operators in an environment variable. The capture hooks record the same step
in programs of the user, and this module uses their code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from nsys_analyzer.capture.hooks.compiled import has_compiled
from nsys_analyzer.capture.hooks.modules import Modules
from nsys_analyzer.capture.hooks.operators import FILE_VARIABLE, OperatorStep
from profiling_targets.harness import Phases, range_functions


def record_operators(phases: Phases) -> None:
    """Runs one more step, and writes the file that describes its operators, if the environment names this file.

    An error is printed, because the measured steps are complete without this step.
    """
    path, active_phase = os.environ.get(FILE_VARIABLE), "other"
    ranges: Any = SimpleNamespace(**dict(zip(("push", "pop", "start", "end"), range_functions(), strict=True)))
    modules = Modules(torch, ranges)
    step = OperatorStep(torch, modules, ranges, path, lambda: active_phase)
    if step.is_done:  # no file is wanted
        return
    try:
        with ExitStack() as stack:
            if not has_compiled():  # hooks would make torch.compile compile the model again
                _track_modules(modules, stack.callback)
            stack.callback(step.close, succeeded=False)
            step.open()
            for active_phase, run in phases.items():
                step.count_phase(active_phase)
                is_backward = active_phase == "backward"
                if is_backward:
                    step.note_backward_pass(begins=True)
                run()
                if is_backward:
                    step.note_backward_pass(begins=False)
            step.close()
    except Exception as error:  # noqa: BLE001 - the error of the additional step is no result
        print(f"operators are not recorded: {type(error).__name__}: {error}", file=sys.stderr)


def _track_modules(modules: Modules, add_hook: Callable[..., object]) -> None:
    """Tells ``modules`` of each call of a module until the end."""
    enter = register_module_forward_pre_hook(lambda module, _: modules.enter(module))
    leave = register_module_forward_hook(lambda *_: modules.leave(), always_call=True)
    add_hook(enter.remove)
    add_hook(leave.remove)

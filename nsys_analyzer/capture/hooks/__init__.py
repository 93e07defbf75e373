"""Hooks calls of modules, backward passes, optimizers, data loaders and ``generate`` in the process of a program.

``injected/sitecustomize.py`` loads the hooks as the package ``_nsys_analyze_hooks``. Their settings are a JSON object
in an environment variable, which child processes inherit. The object contains the attributes of
``capture.targets.Annotation``, the file ``results`` for the times of steps and phases (None in a profiled run), the
file ``samples`` for sampled stacks, and ``spellings``: for each phase, the possible names of the program's own ranges.

torch.compile must not trace the hooks. So each hook does nothing while torch.compile traces code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from .compiled import has_compiled
from .session import Phase, Session

Function = Callable[..., Any]

#: The environment variable that contains the settings.
VARIABLE = "NSYS_ANALYZE_ANNOTATION"
#: Phases whose FLOPs are counted.
_COUNTED_PHASES = ("forward", "evaluation", "loss", "backward")


def hook_module(name: str) -> None:
    """Hooks a module that the program has just imported: PyTorch, or a module of transformers with ``generate``."""
    session, torch = _get_session(), sys.modules["torch"]
    if name.endswith("continuous_api"):
        # Each step of transformers' continuous batching gets a range, also if the step is the replay of a CUDA graph.
        processor = sys.modules[name].ContinuousBatchProcessor
        generation_step = processor._generation_step

        def stepping(self: Any, *arguments: Any, **keywords: Any) -> Any:
            """Runs a step of continuous batching inside its range."""
            has_range = session.open_batch_range(self)
            try:
                return generation_step(self, *arguments, **keywords)
            finally:
                if has_range:
                    session.ranges.pop()

        _replace(processor, "_generation_step", stepping)
        return
    if name != "torch":
        # Each call of transformers' ``generate`` is one step of inference, with a forward pass for each token.
        mixin = sys.modules[name].GenerationMixin
        generate = mixin.generate

        def generating(self: Any, *arguments: Any, **keywords: Any) -> Any:
            """Runs ``generate`` as one step of inference."""
            passes_before, session.generate_passes = session.generate_passes, 0
            try:
                return _call_as_step(session, generate, (self, *arguments), keywords)
            finally:
                session.generate_passes = passes_before

        _replace(mixin, "generate", generating)
        return
    from torch.utils.data._utils import worker
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    _replace(worker, "_worker_loop", _sample_loader_process(session, worker._worker_loop))
    _hook_calls(session, torch.nn.Module)
    for backward in ("backward", "grad"):
        _replace(torch.autograd, backward, _make_backward_hook(session, getattr(torch.autograd, backward)))
    _hook_optimizers(session, torch.optim.Optimizer)
    _replace(_BaseDataLoaderIter, "__next__", _run_as_phase(session, "data", _BaseDataLoaderIter.__next__))


def wrap_range_functions() -> None:
    """Wraps the functions for ranges again, after a recorder has replaced the wrapped functions."""
    _get_session().ranges.wrap_range_functions()


def has_recorded_all() -> bool:
    """Returns whether the capture range contains all steps that it should contain, whatever the program does next."""
    return bool(_get_session.cache_info().currsize) and _get_session().has_recorded_all()


@functools.cache
def _get_session() -> Session:
    session = Session(SimpleNamespace(**json.loads(os.environ[VARIABLE])), sys.modules["torch"])
    atexit.register(session.at_exit)
    os.register_at_fork(after_in_child=session.stop_in_forked_child)
    return session


def _replace(owner: Any, name: str, function: Function) -> None:
    """Replaces a function of a class or module. The new function gets the old function's name and documentation."""
    setattr(owner, name, functools.wraps(getattr(owner, name))(function))


def _run_as_phase(session: Session, name: str, function: Function) -> Function:
    """Wraps a function so that each of its calls is a phase."""
    is_compiling = session.torch.compiler.is_compiling

    def in_a_phase(*arguments: Any, **keywords: Any) -> Any:
        """Runs the function as a phase, and counts its FLOPs during the counted step."""
        if is_compiling():
            return function(*arguments, **keywords)
        phase = session.enter_phase(name)
        try:
            if phase and name in _COUNTED_PHASES:
                with session.counting():
                    return function(*arguments, **keywords)
            return function(*arguments, **keywords)
        finally:
            session.leave_phase(phase)

    return in_a_phase


def _sample_loader_process(session: Session, loop: Function) -> Function:
    """Wraps the loop of a data loader's process, so that the stack of each loader's first process is sampled."""
    signature = inspect.signature(loop)

    def loading(*arguments: Any, **keywords: Any) -> Any:
        """Runs the loop, and samples the stack if this is the first process of a data loader."""
        if signature.bind_partial(*arguments, **keywords).arguments.get("worker_id"):
            return loop(*arguments, **keywords)
        sampler = session.sampler.make_loader_sampler(loading.__code__)
        sampler.open()
        try:
            return loop(*arguments, **keywords)
        finally:
            sampler.close()

    return loading


def _call_as_step(session: Session, function: Function, arguments: Any, keywords: Any) -> Any:
    """Calls a function, and returns its result. If the program does not train, the call counts as a step."""
    if not session.is_on_stepping_thread() or not session.begin_inference_step():
        return function(*arguments, **keywords)
    try:
        result = function(*arguments, **keywords)
    except BaseException:
        session.end_inference_step(succeeded=False)
        raise
    session.end_inference_step(succeeded=True)
    return result


def _hook_calls(session: Session, module: Any) -> None:
    """Hooks the calls of all modules. Once the root classes are known, only the calls of root classes stay hooked."""
    original = module.__call__
    _replace(module, "__call__", _make_call_hook(session, original))
    patched = module.__call__

    def narrow() -> None:
        """Limits the hooks to the calls of root classes."""
        classes = session.root_classes
        overridden = any(root.__call__ is not patched for root in classes)
        if not overridden and not has_compiled():  # compiled code may contain a guard on the method of the class
            for root in classes:
                setattr(root, "__call__", patched)  # noqa: B010 - a class has no such attribute for a type checker
            setattr(module, "__call__", original)  # noqa: B010

    def widen() -> None:
        """Hooks the calls of all modules again."""
        setattr(module, "__call__", patched)  # noqa: B010

    session.on_root_classes_settled = session.on_recording_ended = narrow
    session.on_operator_step_begins = widen


def _make_call_hook(session: Session, original: Function) -> Function:
    """Wraps the ``__call__`` of modules. A call that the program makes directly is a forward pass or a loss."""
    torch, modules = session.torch, session.modules
    is_compiling, wants_gradients = torch.compiler.is_compiling, torch.is_grad_enabled
    loss = torch.nn.modules.loss._Loss

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        """Runs a call of a module, and notes the module if modules are tracked."""
        called = modules.is_tracking and session.enter_module(self)
        try:
            return original(self, *arguments, **keywords)
        finally:
            if called:
                session.leave_module()

    def root(self: Any, *arguments: Any, **keywords: Any) -> Any:
        """Runs a call that the program makes directly."""
        session.note_root_call(self, arguments, keywords)
        has_range = session.generate_passes is not None and session.open_forward_pass_range(arguments, keywords)
        try:
            return call(self, *arguments, **keywords)
        finally:
            if has_range:
                session.ranges.pop()

    forward, evaluation = (_run_as_phase(session, name, root) for name in ("forward", "evaluation"))
    in_loss = _run_as_phase(session, "loss", call)

    def __call__(self: Any, *arguments: Any, **keywords: Any) -> Any:  # noqa: N807
        if is_compiling():
            return original(self, *arguments, **keywords)
        if session.phase_contains_calls or not session.is_on_stepping_thread():
            return (call if modules.is_tracking else original)(self, *arguments, **keywords)
        if isinstance(self, loss):
            session.root_classes.add(type(self))
            return in_loss(self, *arguments, **keywords)
        if next(self.parameters(), None) is None:  # the module is a transform of data, or a metric
            return call(self, *arguments, **keywords)
        if session.training and not wants_gradients():
            return evaluation(self, *arguments, **keywords)
        return _call_as_step(session, forward, (self, *arguments), keywords)

    return __call__


def _make_backward_hook(session: Session, function: Function) -> Function:
    """Wraps a function that runs a backward pass, so that it is a phase. Module calls inside it are recomputations."""
    in_a_phase, is_compiling = _run_as_phase(session, "backward", function), session.torch.compiler.is_compiling
    signature = inspect.signature(function)

    def backward(*arguments: Any, **keywords: Any) -> Any:
        """Runs a backward pass as a phase, unless another thread than the stepping thread runs it."""
        if is_compiling():
            return function(*arguments, **keywords)
        options = signature.bind_partial(*arguments, **keywords).arguments
        roots = options.get("tensors", options.get("outputs"))
        end = session.begin_backward_pass(
            list(roots) if isinstance(roots, (tuple, list)) else [roots],
            runs_some_nodes=options.get("inputs") is not None,
            creates_graph=bool(options.get("create_graph")),
        )
        if end is None:
            return function(*arguments, **keywords)
        try:
            return in_a_phase(*arguments, **keywords)
        finally:
            end()

    return backward


def _hook_optimizers(session: Session, optimizer: Any) -> None:
    """Hooks the constructor, ``step`` and ``zero_grad`` of all optimizers."""
    original_init, original_hook = optimizer.__init__, optimizer.profile_hook_step
    is_compiling = session.torch.compiler.is_compiling

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:  # noqa: N807
        session.note_optimizer(self)
        original_init(self, *arguments, **keywords)

    def profile_hook_step(function: Function) -> Function:
        """Wraps the ``step`` of an optimizer's class. PyTorch calls this function for each class of optimizers."""
        hooked_step = original_hook(function)

        @functools.wraps(function)
        def step(self: Any, *arguments: Any, **keywords: Any) -> Any:
            """Runs the optimizer's step as a phase."""
            if is_compiling() or session.is_active("optimizer"):
                return hooked_step(self, *arguments, **keywords)
            closure = arguments[0] if arguments else keywords.get("closure")
            phase = session.enter_phase("optimizer", starts_now=not callable(closure))
            if phase and callable(closure):
                closure = _wrap_closure(session, phase, closure)
                if arguments:
                    arguments = (closure, *arguments[1:])
                else:
                    keywords = {**keywords, "closure": closure}
            try:
                with session.counting() if phase else contextlib.nullcontext():
                    result = hooked_step(self, *arguments, **keywords)
            finally:
                session.leave_phase(phase)
            if phase:
                session.note_optimizer_step(self)
            return result

        return step

    _replace(optimizer, "__init__", __init__)
    _replace(optimizer, "zero_grad", _run_as_phase(session, "zero_grad", optimizer.zero_grad))
    optimizer.profile_hook_step = staticmethod(profile_hook_step)


def _wrap_closure(session: Session, phase: Phase, function: Function) -> Function:
    """Wraps an optimizer's closure, so that its forward and backward passes are not timed as the optimizer's."""

    def closure(*arguments: Any, **keywords: Any) -> Any:
        """Runs the closure outside of the optimizer's phase."""
        session.pause_phase(phase)
        try:
            return function(*arguments, **keywords)
        finally:
            session.resume_phase(phase)

    return closure

"""Hooks into the program's process: calls of modules, backward passes, optimizers, data loaders, and ``generate``.

``injected/sitecustomize.py`` loads the hooks under a name of its own. Their settings are one JSON object in the
environment, which worker processes and launchers inherit. The object contains the attributes of
``capture.targets.Annotation``, the file ``results`` for the times of steps and phases (None in a profiled run), and
``spellings``, the names that ranges of each phase may have.

Code that torch.compile traces must not see the hooks, so each hook first checks for that and then does nothing.
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

from .session import Phase, Session, has_compiled

Function = Callable[..., Any]

#: The environment variable that contains the settings.
VARIABLE = "NSYS_ANALYZE_ANNOTATION"
#: Phases whose FLOPs are counted.
_COUNTED_PHASES = ("forward", "evaluation", "loss", "backward")


def hook(name: str) -> None:
    """Hooks a module that this process has imported: PyTorch, or a module of transformers with ``generate``."""
    session, torch = _session(), sys.modules["torch"]
    if name.endswith("continuous_api"):
        # Each step of transformers' continuous batching has a range, including the replays of CUDA graphs.
        processor = sys.modules[name].ContinuousBatchProcessor
        generation_step = processor._generation_step

        def stepping(self: Any, *arguments: Any, **keywords: Any) -> Any:
            """Runs a step of continuous batching inside its range."""
            is_marked = session.batch_begins(self)
            try:
                return generation_step(self, *arguments, **keywords)
            finally:
                if is_marked:
                    session.ranges.pop()

        _replace(processor, "_generation_step", stepping)
        return
    if name != "torch":
        # Each call of transformers' ``generate`` is one step of inference, with a forward pass for each token.
        mixin = sys.modules[name].GenerationMixin
        generate = mixin.generate

        def generating(self: Any, *arguments: Any, **keywords: Any) -> Any:
            """Runs ``generate`` as one step of inference."""
            before, session.passes = session.passes, 0
            try:
                return _as_step(session, generate, (self, *arguments), keywords)
            finally:
                session.passes = before

        _replace(mixin, "generate", generating)
        return
    from torch.utils.data._utils import worker
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    _replace(worker, "_worker_loop", _loading(session, worker._worker_loop))
    _patch_calls(session, torch.nn.Module)
    for backward in ("backward", "grad"):
        _replace(torch.autograd, backward, _backward(session, getattr(torch.autograd, backward)))
    _patch_optimizers(session, torch.optim.Optimizer)
    _replace(_BaseDataLoaderIter, "__next__", _phase(session, "data", _BaseDataLoaderIter.__next__))


def watch() -> None:
    """Wraps the functions for ranges once more, because a recorder has replaced the wrapped functions."""
    _session().ranges.watch()


@functools.cache
def _session() -> Session:
    session = Session(SimpleNamespace(**json.loads(os.environ[VARIABLE])), sys.modules["torch"])
    atexit.register(session.at_exit)
    os.register_at_fork(after_in_child=session.forked)
    return session


def _replace(owner: Any, name: str, function: Function) -> None:
    """Replaces a function by another one, which keeps its name and documentation."""
    setattr(owner, name, functools.wraps(getattr(owner, name))(function))


def _phase(session: Session, name: str, function: Function) -> Function:
    """Returns a function that runs ``function`` as a phase."""
    is_compiling = session.torch.compiler.is_compiling

    def in_a_phase(*arguments: Any, **keywords: Any) -> Any:
        """Runs the function as a phase, and counts its FLOPs in the counted step."""
        if is_compiling():
            return function(*arguments, **keywords)
        phase = session.enter(name)
        try:
            if phase and name in _COUNTED_PHASES:
                with session.counting():
                    return function(*arguments, **keywords)
            return function(*arguments, **keywords)
        finally:
            session.leave(phase)

    return in_a_phase


def _loading(session: Session, loop: Function) -> Function:
    """Returns the loop of a data loader's process with a sampler, which runs only in the first process of a loader."""
    signature = inspect.signature(loop)

    def loading(*arguments: Any, **keywords: Any) -> Any:
        """Runs the loop of a data loader's process, and samples the first process."""
        if signature.bind_partial(*arguments, **keywords).arguments.get("worker_id"):
            return loop(*arguments, **keywords)
        sampler = session.sampler.of_loader(loading.__code__)
        sampler.open()
        try:
            return loop(*arguments, **keywords)
        finally:
            sampler.close()

    return loading


def _as_step(session: Session, function: Function, arguments: Any, keywords: Any) -> Any:
    """Runs a function and returns its result. If the program does not train, the call counts as a step."""
    if not session.is_here() or not session.call_begins():
        return function(*arguments, **keywords)
    try:
        result = function(*arguments, **keywords)
    except BaseException:
        session.call_ended(well=False)
        raise
    session.call_ended(well=True)
    return result


def _patch_calls(session: Session, module: Any) -> None:
    """Hooks all calls of modules. Once the root classes are known, only their calls stay hooked."""
    original = module.__call__
    _replace(module, "__call__", _call(session, original))
    patched = module.__call__

    def narrow() -> None:
        """Hooks only the calls of the root classes from now on."""
        classes = session.root_classes
        overridden = any(root.__call__ is not patched for root in classes)
        if not overridden and not has_compiled():  # compiled code may depend on the class's method
            for root in classes:
                setattr(root, "__call__", patched)  # noqa: B010 - a class has no such attribute for a type checker
            setattr(module, "__call__", original)  # noqa: B010

    def widen() -> None:
        """Hooks the calls of all modules again."""
        setattr(module, "__call__", patched)  # noqa: B010

    session.on_settled, session.on_operator_step = narrow, widen


def _call(session: Session, original: Function) -> Function:
    """Returns the hooked ``__call__`` of modules. The outermost call of a model is a forward pass, or a loss."""
    torch, modules = session.torch, session.modules
    is_compiling, wants_gradients = torch.compiler.is_compiling, torch.is_grad_enabled
    loss = torch.nn.modules.loss._Loss

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        """Runs a call of a module, and tracks the module if modules are active."""
        called = modules.active and session.module_called(self)
        try:
            return original(self, *arguments, **keywords)
        finally:
            if called:
                session.module_returned()

    def root(self: Any, *arguments: Any, **keywords: Any) -> Any:
        """Runs a call that the program makes directly."""
        session.root_called(self, arguments, keywords)
        is_marked = session.passes is not None and session.pass_begins(arguments, keywords)
        try:
            return call(self, *arguments, **keywords)
        finally:
            if is_marked:
                session.ranges.pop()

    forward, evaluation = (_phase(session, name, root) for name in ("forward", "evaluation"))
    in_loss = _phase(session, "loss", call)

    def __call__(self: Any, *arguments: Any, **keywords: Any) -> Any:  # noqa: N807
        if is_compiling():
            return original(self, *arguments, **keywords)
        if session.holds_calls or not session.is_here():
            return (call if modules.active else original)(self, *arguments, **keywords)
        if isinstance(self, loss):
            session.root_classes.add(type(self))
            return in_loss(self, *arguments, **keywords)
        if next(self.parameters(), None) is None:  # this is a transform of the data, or a metric
            return call(self, *arguments, **keywords)
        if session.training and not wants_gradients():
            return evaluation(self, *arguments, **keywords)
        return _as_step(session, forward, (self, *arguments), keywords)

    return __call__


def _backward(session: Session, function: Function) -> Function:
    """Returns a function that runs a backward pass as a phase. Module calls inside it are recomputations."""
    in_a_phase, is_compiling = _phase(session, "backward", function), session.torch.compiler.is_compiling
    signature = inspect.signature(function)

    def backward(*arguments: Any, **keywords: Any) -> Any:
        """Runs a backward pass as a phase, unless it belongs to another thread."""
        if is_compiling():
            return function(*arguments, **keywords)
        options = signature.bind_partial(*arguments, **keywords).arguments
        roots = options.get("tensors", options.get("outputs"))
        end = session.backward_begins(
            list(roots) if isinstance(roots, (tuple, list)) else [roots],
            some=options.get("inputs") is not None,
            creates_graph=bool(options.get("create_graph")),
        )
        if end is None:
            return function(*arguments, **keywords)
        try:
            return in_a_phase(*arguments, **keywords)
        finally:
            end()

    return backward


def _patch_optimizers(session: Session, optimizer: Any) -> None:
    """Hooks the creation, the step and the zero_grad of all optimizers."""
    original_init, original_hook = optimizer.__init__, optimizer.profile_hook_step
    is_compiling = session.torch.compiler.is_compiling

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:  # noqa: N807
        session.optimizer_made(self)
        original_init(self, *arguments, **keywords)

    def profile_hook_step(function: Function) -> Function:
        """Wraps the step of an optimizer's class, as PyTorch does with its own hooks."""
        hooked_step = original_hook(function)

        @functools.wraps(function)
        def step(self: Any, *arguments: Any, **keywords: Any) -> Any:
            """Runs the optimizer's step as a phase."""
            if is_compiling() or session.is_active("optimizer"):
                return hooked_step(self, *arguments, **keywords)
            closure = arguments[0] if arguments else keywords.get("closure")
            phase = session.enter("optimizer", begins=not callable(closure))
            if phase and callable(closure):
                closure = _closure(session, phase, closure)
                if arguments:
                    arguments = (closure, *arguments[1:])
                else:
                    keywords = {**keywords, "closure": closure}
            try:
                with session.counting() if phase else contextlib.nullcontext():
                    result = hooked_step(self, *arguments, **keywords)
            finally:
                session.leave(phase)
            if phase:
                session.optimizer_stepped(self)
            return result

        return step

    _replace(optimizer, "__init__", __init__)
    _replace(optimizer, "zero_grad", _phase(session, "zero_grad", optimizer.zero_grad))
    optimizer.profile_hook_step = staticmethod(profile_hook_step)


def _closure(session: Session, phase: Phase, function: Function) -> Function:
    """Wraps an optimizer's closure, so that its forward and backward passes are not timed as the optimizer's."""

    def closure(*arguments: Any, **keywords: Any) -> Any:
        """Runs the closure outside of the optimizer's phase."""
        session.pause(phase)
        try:
            return function(*arguments, **keywords)
        finally:
            session.resume(phase)

    return closure

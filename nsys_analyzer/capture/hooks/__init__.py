"""The hooks in the program's process: calls of modules, backward passes, optimizers, loaders, and ``generate``.

Loaded by ``injected/sitecustomize.py`` under a name of its own. What they are asked to do is one JSON object in the
environment, which worker processes and launchers inherit: the attributes of ``capture.targets.Annotation``;
``results``, the file for the times of steps and phases, or None under a profiler; and ``spellings``, how
the names of phases are written, for ranges of the program's own.

Code that torch.compile traces must not see the hooks: each asks for that first, and does nothing then.
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

#: The variable of the environment that holds it.
VARIABLE = "NSYS_ANALYZE_ANNOTATION"
#: Phases whose FLOPs are counted.
_COMPUTING = ("forward", "evaluation", "loss", "backward")


def hook(name: str) -> None:
    """Hooks a module that this process has imported: PyTorch, or one of transformers that generates."""
    session, torch = _session(), sys.modules["torch"]
    if name.endswith("continuous_api"):
        _patch_continuous_batching(session, sys.modules[name].ContinuousBatchProcessor)
        return
    if name != "torch":
        _patch_generation(session, sys.modules[name].GenerationMixin)
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
    """Looks at the program's ranges again: a recorder has taken the place of the functions that write them."""
    _session().ranges.watch()


@functools.cache
def _session() -> Session:
    session = Session(SimpleNamespace(**json.loads(os.environ[VARIABLE])), sys.modules["torch"])
    atexit.register(session.at_exit)
    os.register_at_fork(after_in_child=session.forked)
    return session


def _patch_generation(session: Session, mixin: Any) -> None:
    """``generate`` of transformers: it is one step of inference, with a forward pass for each token."""
    generate = mixin.generate

    def generating(self: Any, *arguments: Any, **keywords: Any) -> Any:
        before, session.passes = session.passes, 0
        try:
            return _as_step(session, generate, (self, *arguments), keywords)
        finally:
            session.passes = before

    _replace(mixin, "generate", generating)


def _patch_continuous_batching(session: Session, processor: Any) -> None:
    """Marks each step of transformers' continuous batching as its scheduler made it, the replay of a graph, too."""
    generation_step = processor._generation_step

    def stepping(self: Any, *arguments: Any, **keywords: Any) -> Any:
        is_marked = session.batch_begins(self)
        try:
            return generation_step(self, *arguments, **keywords)
        finally:
            if is_marked:
                session.ranges.pop()

    _replace(processor, "_generation_step", stepping)


def _replace(owner: Any, name: str, function: Function) -> None:
    """Puts a function in the place of another, with its name and documentation."""
    setattr(owner, name, functools.wraps(getattr(owner, name))(function))


def _phase(session: Session, name: str, function: Function) -> Function:
    """The function as a phase."""
    is_compiling = session.torch.compiler.is_compiling

    def in_a_phase(*arguments: Any, **keywords: Any) -> Any:
        if is_compiling():
            return function(*arguments, **keywords)
        phase = session.enter(name)
        try:
            if phase and name in _COMPUTING:
                with session.counting():
                    return function(*arguments, **keywords)
            return function(*arguments, **keywords)
        finally:
            session.leave(phase)

    return in_a_phase


def _loading(session: Session, loop: Function) -> Function:
    """What each process of a data loader runs; the first one of each loader stands for all of them."""
    signature = inspect.signature(loop)

    def loading(*arguments: Any, **keywords: Any) -> Any:
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
    """The function's result; where nothing trains, its call is a step."""
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
    """Every call of a module; those of the classes alone that the program calls itself, once these are known."""
    original = module.__call__
    _replace(module, "__call__", _call(session, original))
    patched = module.__call__

    def narrow() -> None:
        classes = session.root_classes
        overridden = any(root.__call__ is not patched for root in classes)
        if not overridden and not has_compiled():  # compiled code may rest on what a call is
            for root in classes:
                setattr(root, "__call__", patched)  # noqa: B010 - a class has no such attribute for a type checker
            setattr(module, "__call__", original)  # noqa: B010

    session.on_settled = narrow


def _call(session: Session, original: Function) -> Function:
    """The outermost call of a model is a forward pass, that of a loss is a loss; what they call is part of it."""
    torch, modules = session.torch, session.modules
    is_compiling, wants_gradients = torch.compiler.is_compiling, torch.is_grad_enabled
    loss = torch.nn.modules.loss._Loss

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        called = modules.active and session.module_called(self)
        try:
            return original(self, *arguments, **keywords)
        finally:
            if called:
                session.module_returned()

    def root(self: Any, *arguments: Any, **keywords: Any) -> Any:
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
        if next(self.parameters(), None) is None:  # a transform of the data, a metric
            return call(self, *arguments, **keywords)
        if session.training and not wants_gradients():
            return evaluation(self, *arguments, **keywords)
        return _as_step(session, forward, (self, *arguments), keywords)

    return __call__


def _backward(session: Session, function: Function) -> Function:
    """A backward pass: modules that are called inside compute again what they did."""
    in_a_phase, is_compiling = _phase(session, "backward", function), session.torch.compiler.is_compiling
    signature = inspect.signature(function)

    def backward(*arguments: Any, **keywords: Any) -> Any:
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
    """Every optimizer's step and zero_grad, and that there is one."""
    made, hooked = optimizer.__init__, optimizer.profile_hook_step
    is_compiling = session.torch.compiler.is_compiling

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:  # noqa: N807
        session.optimizer_made(self)
        made(self, *arguments, **keywords)

    def profile_hook_step(function: Function) -> Function:
        """As PyTorch puts its own hooks around the step of each class of optimizers."""
        hooked_step = hooked(function)

        @functools.wraps(function)
        def step(self: Any, *arguments: Any, **keywords: Any) -> Any:
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
    """What an optimizer calls for the loss: its forward and backward passes are no part of the optimizer's phase."""

    def closure(*arguments: Any, **keywords: Any) -> Any:
        session.pause(phase)
        try:
            return function(*arguments, **keywords)
        finally:
            session.resume(phase)

    return closure

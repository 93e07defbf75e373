"""Makes single changes to the code of the analysis, and counts how many of them its own tests notice.

A change is one of a comparison, an operator, a number or a boolean. A mutated module is compiled in a process of its
own, which runs the tests of that module alone; no file is changed. (mutmut leaves out properties and constants, which
are half of this code, cosmic-ray starts Python anew for each change, and neither draws a sample.)

    python -m tests.mutants                       # a sample of all modules, always the same one
    python -m tests.mutants intervals --sample 0  # every change to the modules whose path holds "intervals"
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pandas as pd  # noqa: F401  loaded once, before the processes part
import pytest

PACKAGE = Path("nsys_analyzer/analysis")
#: The tests of each module, those that find a change soonest first.
_TRACE = ("attribution", "instances", "causality", "summary", "kernels")
TESTS: dict[str, tuple[str, ...]] = {
    "attribution/attribution": (*_TRACE, "paths", "attention_summary"),
    "attribution/launches": ("attribution", "instances", "causality", "kineto_file"),
    "attribution/processes": ("processes", "ranks"),
    "findings/diagnosis": ("findings", "diagnosis_of_programs"),
    "findings/kernels": ("findings",),
    "findings/kernels_without_operators": ("findings",),
    "findings/waits": ("findings", "faults"),
    "intervals": ("axis", "timeline", "intervals", "steps_anatomy"),
    "kernels/classes": ("class_operators", "classes", "precision", "kernels", "nccl_calls", "share_names"),
    "ranges/inference": ("inference",),
    "ranges/instances": (*_TRACE, "whole_capture", "attention_summary", "inference"),
    "ranks/collectives": ("nccl_calls", "ranks", "parallel_runs"),
    "ranks/findings": ("parallel_runs",),
    "ranks/join": ("ranks", "parallel_runs", "ranks_by_the_nanosecond"),
    "ranks/matching": ("ranks", "parallel_runs", "ranks_by_the_nanosecond"),
    "steps/member": ("ranks", "parallel_runs", "ranks_by_the_nanosecond"),
    "steps/anatomy": ("steps_anatomy", "steps_summary"),
    "steps/process": ("steps_idle", "steps_summary", "steps_anatomy"),
    "steps/repetition": ("steps_windows",),
    "steps/replay": ("replay", "findings"),
    "steps/study": ("replay", "findings", "steps_summary"),
    "steps/study_steps": ("replay", "findings", "steps_summary"),
    "steps/summarize": ("steps_summary", "steps_idle"),
    "steps/dependencies": ("replay", "findings", "steps_summary"),
    "steps/boundaries": ("steps_windows", "steps_summary"),
    "steps/groups": ("steps_windows", "steps_summary"),
    "steps/windows": ("steps_windows", "steps_summary"),
    "statistics": ("summary",),
    "summary/kernel_tables": ("summary", "kernels", "whole_capture"),
    "summary/summarize": ("summary", "instances", "whole_capture", "causality", "inference"),
}
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
#: Annotations, decorators and ``zip``'s ``strict`` change no figure.
_PASSED_OVER = ("annotation", "returns", "format_spec", "decorator_list")
_LARGE = 100
#: Seconds of CPU time that a change may take: it may loop for ever.
_LIMIT_S = 120
#: The number of the change that changes nothing.
_NOTHING = -1
_FORK = multiprocessing.get_context("fork")


class Mutant(NamedTuple):
    """One change: the module (a key of ``TESTS``), the change's number in it, its line, and what it changes."""

    module: str
    number: int
    line: int
    change: str


class _Mutator(ast.NodeTransformer):
    """Lists the changes to a module's tree, and makes one of them."""

    def __init__(self, module: str, chosen: int | None = None) -> None:
        self.module, self.chosen = module, chosen
        self.found: list[Mutant] = []
        self.tree = self.visit(ast.parse(_path(module).read_text()))

    def visit(self, node: Any) -> Any:
        """Visits a node, then what lies in it."""
        result = node
        for changed in _changes(node):
            if len(self.found) == self.chosen:
                result = ast.copy_location(changed, node)
            change = f"{ast.unparse(node)}  →  {ast.unparse(changed)}"
            self.found.append(Mutant(self.module, len(self.found), node.lineno, change))
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return node
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and name not in _PASSED_OVER:
                value[:] = [self.visit(one) if isinstance(one, ast.AST) else one for one in value]
            elif isinstance(value, ast.AST) and name not in _PASSED_OVER:
                setattr(node, name, self.visit(value))
        return result


def _changes(node: Any) -> Iterator[ast.expr]:
    """The changes to one node itself."""
    if isinstance(node, ast.Compare):
        for i, one in enumerate(node.ops):
            yield ast.Compare(node.left, [*node.ops[:i], _SWAPPED[type(one)](), *node.ops[i + 1 :]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        yield ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(_SWAPPED[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value * 2 if node.value > _LARGE else node.value + 1)


def _path(module: str) -> Path:
    return Path(__file__).parent.parent / PACKAGE / f"{module}.py"


def _run_tests(mutant: Mutant) -> None:
    """Ends this process with 0 where the tests of a module pass with the change in place."""
    resource.setrlimit(resource.RLIMIT_CPU, (_LIMIT_S, _LIMIT_S))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    path = _path(mutant.module)
    spec = spec_from_file_location(".".join((PACKAGE / mutant.module).parts), path)
    assert spec
    sys.modules[spec.name] = changed = module_from_spec(spec)
    tree = ast.fix_missing_locations(_Mutator(mutant.module, mutant.number).tree)
    exec(compile(tree, path, "exec"), changed.__dict__)
    # A failure need not be made smaller.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", deadline=None, phases=phases)
    files = [str(Path(__file__).parent / f"test_{name}.py") for name in TESTS[mutant.module]]
    options = ["-xq", "--assert=plain", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", "--hypothesis-seed=0"]
    os._exit(pytest.main([*options, *files]))


def _survivors(mutants: Sequence[Mutant], jobs: int) -> Iterator[Mutant]:
    """The changes that no test notices; ``jobs`` processes at a time."""
    waiting, running = list(reversed(mutants)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            process = _FORK.Process(target=_run_tests, args=(mutant,))
            process.start()
            running[process.sentinel] = process, mutant
        for ended in multiprocessing.connection.wait(list(running)):
            process, mutant = running.pop(ended)
            process.join()
            if process.exitcode == 0:
                yield mutant


def main() -> None:
    """Prints the survivors and the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of the paths of modules")
    parser.add_argument("--sample", type=int, default=240, help="how many changes to try, 0 for all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    modules = [module for module in TESTS if not options.only or any(part in module for part in options.only)]
    every = [mutant for module in modules for mutant in _Mutator(module).found]
    chosen = sorted(random.Random(0).sample(every, min(options.sample or len(every), len(every))))
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        unchanged = [Mutant(module, _NOTHING, 0, "") for module in modules]
        failing = {one.module for one in unchanged} - {one.module for one in _survivors(unchanged, options.jobs)}
        if failing:
            sys.exit(f"Without any change there are failing tests: {[TESTS[module] for module in failing]}")
        for mutant in _survivors(chosen, options.jobs):
            survivors += 1
            print(f"{PACKAGE}/{mutant.module}.py:{mutant.line}: {mutant.change}", flush=True)
    noticed = len(chosen) - survivors
    print(f"{noticed} of {len(chosen)} changes noticed: {noticed / len(chosen):.1%} ({len(every)} in all)")


if __name__ == "__main__":
    main()

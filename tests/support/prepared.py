"""Runs programs as ``python program.py`` does, in copies of one process that has imported PyTorch already.

PyTorch's import takes seconds, and where programs are annotated its hooks come right behind it: so they do here.
"""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nsys_analyzer.capture import hooks

LONGEST_S = 240
_SERVER = """
import importlib.util, json, os, signal, sys, types
import torch, torch._dynamo, torch.utils.checkpoint, torch.utils.data, torch.utils.flop_counter  # as steps and hooks do

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)

signal.alarm(job["seconds"])
os.chdir(job["folder"])
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
os.environ.clear()
os.environ.update(job["environment"])
sys.argv, sys.path[0] = [job["program"]], job["folder"]
if "NSYS_ANALYZE_ANNOTATION" in os.environ:
    spec = importlib.util.spec_from_file_location("sitecustomize", job["sitecustomize"])
    sitecustomize = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sitecustomize)
    sitecustomize._hook_module("torch")
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__file__ = job["program"]
exec(compile(open(main.__file__).read(), main.__file__, "exec"), main.__dict__)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


def run_prepared(program: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in its folder, with these variables and no others, to its end."""
    server, folder = _server(), program.parent.resolve()
    job = {
        "program": str(program), "folder": str(folder), "environment": dict(environment), "seconds": LONGEST_S,
        "sitecustomize": str(Path(hooks.__file__).with_name("injected") / "sitecustomize.py"),
    }  # fmt: skip
    assert server.stdin
    assert server.stdout
    print(json.dumps(job), file=server.stdin, flush=True)
    code = int(server.stdout.readline())
    output, errors = ((folder / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess([str(program)], code, output, errors)

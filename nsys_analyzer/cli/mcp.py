"""``nsys-analyze mcp``: the commands as the tools of an agent, over standard input and output."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import click

from nsys_analyzer import __version__
from nsys_analyzer.cli.help import RUNNING, command, option
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.report.screen import data_stream

_HOW = """Ask before you change anything, and measure after it. explain says what a step's time is spent on and what
each finding saves; ask gives one figure, figures their names; check proves a text. An answer without a value has
cannot_answer, with the command that would tell: run that, or say that it is not known."""
#: Characters of a program's output that an agent reads.
_LAST = 2000
_JSON = ("--format", "json")
_place = click.Path(exists=True, file_okay=False, path_type=Path)


@command(epilog="Example: nsys-analyze mcp runs --allow-run")
@click.argument("folders", nargs=-1, type=_place, metavar="[FOLDER...]")
@option(RUNNING, "--allow-run", is_flag=True, help="Let the agent run programs, to record them: it can run any.")
def mcp(folders: tuple[Path, ...], allow_run: bool) -> None:
    """Serve captures to an agent by the Model Context Protocol, over standard input and output.

    Files are read below FOLDER alone, by default the working folder. Needs the extra: pip install
    'nsys-analyze[agent]'. docs/SKILL.md tells an agent how to go about it.
    """
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError as error:
        raise ConfigurationError("The package mcp is not installed", "pip install 'nsys-analyze[agent]'") from error
    server = MCPServer("nsys-analyze", instructions=_HOW, version=__version__, log_level="WARNING")
    for tool in _tools([folder.resolve() for folder in folders or (Path(),)], ToolError, allow_run=allow_run):
        server.add_tool(tool, structured_output=False)
    sys.stdout = data_stream()  # the protocol writes bytes
    server.run("stdio")


def _tools(folders: list[Path], refused: type[Exception], *, allow_run: bool) -> tuple[Callable[..., str], ...]:
    """The tools, each a command in a process of its own; a new command is a function here."""

    def below(path: str | Path) -> str:
        place = Path(path).resolve()
        if not any(place.is_relative_to(folder) for folder in folders):
            raise refused(f"{path} lies outside of {', '.join(map(str, folders))}")
        return str(place)

    def read(path: str) -> str:
        """The path of captures; nothing that is read with them leads elsewhere."""
        place = Path(below(path))
        inside = chain(place.glob("*"), place.glob("*/*")) if place.is_dir() else place.parent.glob("*")
        for one in chain(inside, place.parent.parent.glob("timings.csv")):
            below(one)
        return str(place)

    def command_of(program: list[str]) -> list[str]:
        if not program:
            raise refused('There is no program: give its words, such as ["python", "train.py"]')
        return ["--", *program]

    def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "nsys_analyzer", *words]
        return subprocess.run(line, input=text, capture_output=True, encoding="utf-8", errors="replace", check=False)

    def answer(*words: str, text: str = "") -> str:
        done = run(*words, text=text)
        if not done.stdout:
            raise refused(done.stderr)
        return done.stdout

    def explain(path: str, budget: int = 2000) -> str:
        """Why a step of a capture or a folder of them takes so long, and what would save time, in so many bytes."""
        return answer("explain", read(path), *_JSON, f"--budget={budget}")

    def ask(path: str, questions: list[str]) -> str:
        """Figures by their names, such as "gpu_busy_ms phase=forward", each with what it rests on."""
        return answer("ask", read(path), *_JSON, "--", *questions)

    def figures() -> str:
        """The figures that can be asked for: name and words, unit and meaning."""
        return answer("ask", "--list")

    def check(path: str, text: str) -> str:
        """Whether a capture holds each figure of a text: true, false with the right one, or not to be told."""
        return answer("check", read(path), "-", *_JSON, text=text)

    def kernels(path: str, phase: str = "", kernel_class: str = "", top: int = 10) -> str:
        """The kernels with the most time, of a phase or the whole capture, of one class or all."""
        words = [*([f"--phase={phase}"] if phase else []), *([f"--class={kernel_class}"] if kernel_class else [])]
        return answer("kernels", read(path), *_JSON, f"--top={top}", *words)

    def modules(path: str) -> str:
        """The modules with the most time, forward and backward; layers of one kind are one."""
        return answer("modules", read(path), "--format=markdown")

    def compare(before: str, after: str) -> str:
        """What changed between two captures or folders of runs, whether beyond chance, and what explains it."""
        return answer("compare", read(before), read(after), "--format=markdown")

    def what_if(
        path: str, classes: dict[str, float] | None = None, ranges: dict[str, float] | None = None,
        launches: float | None = None,
    ) -> str:  # fmt: skip
        """What a step would take if kernel classes, ranges or launches took so many times their time; 0: gone."""
        words = [f"--class={name}={factor}" for name, factor in (classes or {}).items()]
        words += [f"--range={name}={factor}" for name, factor in (ranges or {}).items()]
        words += [] if launches is None else [f"--launches={launches}"]
        return answer("what-if", read(path), *_JSON, *words)

    def capture(program: list[str], output_dir: str, modules: bool = False, timeout_s: float = 1800) -> str:
        """Runs a program, such as ["python", "train.py"], times and records it into a folder, and reports."""
        words = [f"--output-dir={below(output_dir)}", f"--timeout={timeout_s}", "--rerun", *["--modules"] * modules]
        done = run("run", *words, *command_of(program))
        return f"Exit code {done.returncode}\n{(done.stdout + done.stderr)[-_LAST:]}"

    def verify(before: str, program: list[str], old: str = "", finding: str = "", time_limit_s: float = 600) -> str:
        """Whether a changed program is faster than that of a folder of capture, and a finding's prediction held."""
        words = [f"--before={old}"] * bool(old) + [f"--finding={finding}"] * bool(finding)
        done = run("verify", read(before), f"--time-limit={time_limit_s}", *words, *command_of(program))
        return f"Exit code {done.returncode}\n{(done.stdout + done.stderr)[-_LAST:]}"

    reading = (explain, ask, figures, check, kernels, modules, compare, what_if)
    return (*reading, capture, verify) if allow_run else reading

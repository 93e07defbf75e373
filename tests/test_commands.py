"""The group, ``kernels`` and ``info``; and that every command's example runs."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from nsys_analyzer import __version__
from nsys_analyzer.cli.help import GENERAL, GROUPS
from nsys_analyzer.cli.main import cli
from nsys_analyzer.verify.ledger import Entry, append_entry
from tests.conftest import Outcome
from tests.support.commands import make_command_test
from tests.support.export import ADD, AUTOGRAD, GEMM, SOFTMAX, Export, training_step
from tests.support.snapshot import Snapshot

RealCapture = Callable[[str], Path]
MS = 1_000_000


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)


def output(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def analyzed() -> Export:
    """A forward of 2 ms GEMM, 1 ms softmax; a backward of 3 ms GEMM, 2 ms ADD; and 1 ms of ADD outside."""
    export = Export().thread(AUTOGRAD, "pt_autograd_0").gpu()
    export.range("forward", 0, 10 * MS).kernel(GEMM, 1, 10, 10 + 2 * MS).kernel(SOFTMAX, 2, 3 * MS, 4 * MS)
    export.range("backward", 10 * MS, 20 * MS)
    export.kernel(GEMM, 11 * MS, 12 * MS, 15 * MS, AUTOGRAD).kernel(ADD, 11 * MS + 1, 15 * MS, 17 * MS, AUTOGRAD)
    return export.kernel(ADD, 21 * MS, 22 * MS, 23 * MS)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return analyzed().write(tmp_path / "trace.sqlite")


# --- kernels and info ---


def rows_of(ended: Outcome) -> list[tuple[str, str, float, float, float]]:
    """Name, class, launches, ms and share of each row, from JSON."""
    return [(row["name"], row["class"], row["launches"], row["ms"], row["share"]) for row in json.loads(ended.out)]


test_kernels_and_info = make_command_test("commands", builders={"analyzed": analyzed}, figures={
    "rows": rows_of,
    "launches": lambda ended: sum(row[2] for row in rows_of(ended)),
    "line_count": lambda ended: len(ended.out.splitlines()),
    "headings": lambda ended: [line for line in ended.out.splitlines() if not line.startswith(" ")],
    "captures": lambda ended: [line for line in ended.out.splitlines() if line.endswith(("sqlite:", "Capture:"))],
    "not_read": lambda ended: [line.strip() for line in ended.out.splitlines() if "(not read)" in line],
})  # fmt: skip


# --- report and explain ---


def test_report_and_explain_count_warnings_alike(
    real_capture: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the capture and one of its timings: each once in full, and two in every place."""
    monkeypatch.chdir(tmp_path)
    path = str(real_capture("graph_small256"))
    rows = "model,optimizer,phase,mean_ms\nsmall,adamw,forward,3.5\nsmall,sgd,nosuch,9\n"
    Path("t.csv").write_text(rows, encoding="utf-8")

    reported = output("report", path, "--csv", "t.csv", "-o", "r.md", "--no-figures")
    (count,) = re.findall(r"r\.md, with (\d+) warnings?\n", reported)
    assert re.findall(r"<summary>(\d+) warnings?<", Path("r.md").read_text(encoding="utf-8")) == [count]
    explained = output("explain", path, "--csv", "t.csv")
    assert re.findall(r"\n(\d+) warnings?, in full with --all\n", explained) == [count]
    everything = output("explain", path, "--csv", "t.csv", "--all")
    assert re.findall(r"\n(\d+) warnings?\n", everything) == [count]
    in_full = everything.partition(f"\n{count} warnings\n")[2].partition("\n\nHow this report was made")[0]
    assert len(re.findall(r"^- graph_small256:", in_full, re.MULTILINE)) == int(count)


# --- help ---

CONTEXT = click.Context(cli)
COMMANDS = [cli.get_command(CONTEXT, name) for name in cli.list_commands(CONTEXT)]


@pytest.mark.parametrize("command", COMMANDS, ids=cli.list_commands(CONTEXT))
def test_help(command: click.Command) -> None:
    text = output(command.name, "--help")
    assert "Example: nsys-analyze" in text
    groups = [getattr(one, "group", None) for one in command.params if isinstance(one, click.Option)]
    assert text.count("\n  -h, --help") == 1
    if not isinstance(command, click.Group):
        assert text.partition("General:\n")[2].startswith("  -h, --help")
        shown = [line[:-1] for line in text.splitlines() if line[:-1] in GROUPS]
        assert shown == [group for group in GROUPS if group in {*groups, GENERAL}]
    assert output(command.name, "-h") == text
    assert [one.name for one in command.params if isinstance(one, click.Option) and not one.help] == []


@pytest.mark.parametrize("command", [cli, *COMMANDS], ids=["group", *cli.list_commands(CONTEXT)])
def test_the_example_runs(command: click.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that holds what the examples name; the experiment's is only planned, for others run it."""
    monkeypatch.chdir(tmp_path)
    export = Export().thread(AUTOGRAD, "pt_autograd_0").gpu()
    for path in ("capture.sqlite", "small_ctx128.sqlite", "small_ctx256.sqlite", "before.sqlite", "after.sqlite"):
        training_step(export).write(tmp_path / path)
    Snapshot().alloc(0x1000, 512).write(tmp_path / "snapshot.pickle")
    (tmp_path / "claims.txt").write_text("kernels phase=forward = 2 count", encoding="utf-8")
    append_entry(Entry("faster", "2026-01-02T03:04:05+00:00", "a", "b", 10.0, 9.0, -1.0, -1.5, -0.5, 4, "0.2.0"))
    # A server goes on until it is left, and two programs take turns for a minute.
    asked = {"mcp": ["--help"], "verify": ["--help"]}.get(str(command.name), [])
    more = ["--dry-run"] if command.name == "bench" else []
    found = re.fullmatch(r"Example: nsys-analyze (.+)", command.epilog or "")
    assert found, command.epilog
    name, *words = shlex.split(found[1])
    assert output(name, *asked, *words, *more)


def test_group_help() -> None:
    text = output("--help")
    groups = [block.splitlines() for block in text.split("\n\n") if re.match(r"(Record|Read|Compare|Exchange):", block)]
    assert [(block[0], [line.split()[0] for line in block[1:]]) for block in groups] == [
        ("Record:", ["doctor", "run", "bench"]),
        (
            "Read:",
            ["report", "explain", "what-if", "kernels", "modules", "operators", "memory", "info", "ask", "check"],
        ),
        ("Compare:", ["compare", "verify", "history", "baseline"]),
        ("Exchange:", ["export", "share", "mcp"]),
    ]


#: What an option takes, where commands may differ: what captures may say, and what can be recorded; one, and several.
FORMS = {
    "--class": {"CLASS", "CLASS=FACTOR"},
    "--format": {"text", "markdown", "html", "json", "csv", "perfetto", "parquet", "sqlite"},
    "--precision": {"fp32", "tf32", "bf16", "fp16"},
    "--profiler": {"nsys", "torch", "none"},
    "--mode": {"forward", "forward-backward", "train"},
    "--implementation": {"naive", "blocked", "fused", "tiled", "flash", "unfused", "sdpa", "sdpa_flash"},
}


def test_an_option_has_one_name_and_one_form() -> None:
    """Each option of all commands and benches: its names, and what it takes; a list of values where one is taken."""
    bench = cli.get_command(CONTEXT, "bench")
    assert isinstance(bench, click.Group)
    names, forms = defaultdict(set), defaultdict(set)
    for command in (*COMMANDS, *(bench.get_command(CONTEXT, name) for name in bench.list_commands(CONTEXT))):
        for one in command.params if command else ():
            if isinstance(one, click.Option):
                names[one.name].add((*one.opts, *one.secondary_opts))
                form = one.make_metavar(CONTEXT).removesuffix("[,...]") if not one.is_flag else ""
                forms[one.opts[-1]].add(form)
    several_names = {name: spellings for name, spellings in names.items() if len(spellings) > 1}
    assert several_names == {}
    words = {flag: {word for form in kinds for word in form.strip("[]").split("|")} for flag, kinds in forms.items()}
    assert {flag: words[flag] for flag, kinds in forms.items() if len(kinds) > 1 and flag not in FORMS} == {
        "--compile": {"", "off", "on"},  # of a bench it takes both, and alone it is on, as everywhere
    }
    assert {flag: words[flag] for flag in FORMS} == FORMS


def test_version() -> None:
    assert output("--version") == f"nsys-analyze, version {__version__}\n"


def test_an_unknown_command() -> None:
    result = invoke("reprot")
    assert result.exit_code == 2
    assert "No such command 'reprot'. Did you mean 'report'?" in result.stderr
    assert invoke("zzz").stderr.endswith("No such command 'zzz'.\n")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("bench atention", "attention"),
        ("report t.sqlite --outptu a.md", "--output"),
    ],
)
def test_what_was_meant(words: str, meant: str) -> None:
    assert re.search(f"Did you mean '?{meant}'?\\?", invoke(*words.split()).stderr)


def test_the_shell_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the installed command does where the shell asks, with the words so far."""
    for words, completed in (
        ("nsys-analyze re", ["report"]),
        ("nsys-analyze report --ph", ["--phase-name"]),
        ("nsys-analyze report --format m", ["markdown"]),
    ):
        monkeypatch.setenv("_NSYS_ANALYZE_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        program = Path(sys.executable).parent / "nsys-analyze"
        done = subprocess.run([program], stdout=subprocess.PIPE, encoding="utf-8", check=True)
        assert done.stdout.splitlines() == [f"plain,{word}" for word in completed]


def test_a_switch_of_a_bench_alone_is_on() -> None:
    lines = output("bench", "attention", "--device", "cpu", "--dry-run", "--compile", "--d-head", "8")
    assert "compile on" in lines
    assert "compile off" not in lines


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], encoding="utf-8", **{"stdout": subprocess.PIPE, **options},
        stderr=subprocess.PIPE,
    )  # fmt: skip


#: Calls the command line once for each list of words, and says which of some modules have been imported then.
CALLS = """
import json, sys
from nsys_analyzer.cli.help import GROUPS, GENERAL
from nsys_analyzer.cli.main import cli
for words in json.loads(sys.argv[1]):
    cli(words, standalone_mode=False)
print([name for name in json.loads(sys.argv[2]) if name in sys.modules], file=sys.stderr)
"""
HEAVY = ("numpy", "pandas", "matplotlib", "pyarrow", "torch", "sqlite_utils", "rich")
#: Of the list of commands no command is imported, nor what they share.
NO_COMMAND = (*HEAVY, "msgspec", "nsys_analyzer.cli.options", "nsys_analyzer.cli.run")


@pytest.mark.parametrize(
    ("calls", "unused"),
    [
        ([["--help"]], NO_COMMAND),
        ([["--version"], *([name, "--help"] for name in cli.list_commands(CONTEXT))], HEAVY),
    ],
)
def test_help_starts_at_once(calls: list[list[str]], unused: Sequence[str]) -> None:
    """Help imports none of what an analysis needs."""
    assert python("-c", CALLS, json.dumps(calls), json.dumps(unused)).stderr == "[]\n"


#: What a report needs for tables of timings, for several ranks, for a cluster, for a DataFrame and for figures alone.
UNUSED = (
    "nsys_analyzer.inputs.unprofiled_times",
    "nsys_analyzer.analysis.ranks.run",
    "distributed",
    "pandas",
    "matplotlib",
)


def test_a_report_of_one_rank_starts_without_what_others_need(trace: Path) -> None:
    calls = [["report", str(trace), "--format", "json"]]
    assert python("-c", CALLS, json.dumps(calls), json.dumps(UNUSED)).stderr == "[]\n"


def test_the_package_is_lazy_too() -> None:
    code = (
        "import sys, nsys_analyzer; print('numpy' in sys.modules, nsys_analyzer.Trace.__name__); nsys_analyzer.Tracer"
    )
    done = python("-c", code)
    assert done.stdout == "False Trace\n"
    assert "no attribute 'Tracer'" in done.stderr


def test_as_a_module(trace: Path) -> None:
    done = python("-m", "nsys_analyzer", "kernels", trace, "--format", "csv")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith(f",{GEMM},matmul,2.0,5.0,")


def test_a_closed_pipe_is_no_error(trace: Path) -> None:
    """As in `nsys-analyze info … | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = python("-m", "nsys_analyzer", "info", trace, stdout=writer)
    os.close(writer)
    assert done.stderr == ""

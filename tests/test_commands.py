"""The group, ``kernels`` and ``info``; and that every command's example runs."""

import csv
import io
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
from tests.conftest import Main
from tests.support.export import ADD, AUTOGRAD, GEMM, SOFTMAX, Export, training_step
from tests.support.kineto import Kineto

RealCapture = Callable[[str], Path]
MS = 1_000_000


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)


def output(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def fails(run_main: Main) -> Callable[..., str]:
    """Runs the program as it is installed and returns the one line it ends with."""

    def run(*arguments: object) -> str:
        code, out, err = run_main(*arguments)
        assert (code, out, err.count("\n"), err[:7]) == (1, "", 1, "Error: ")
        return err

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A forward of 2 ms GEMM, 1 ms softmax; a backward of 3 ms GEMM, 2 ms ADD; and 1 ms of ADD outside."""
    export = Export().thread(AUTOGRAD, "pt_autograd_0").gpu()
    export.range("forward", 0, 10 * MS).kernel(GEMM, 1, 10, 10 + 2 * MS).kernel(SOFTMAX, 2, 3 * MS, 4 * MS)
    export.range("backward", 10 * MS, 20 * MS)
    export.kernel(GEMM, 11 * MS, 12 * MS, 15 * MS, AUTOGRAD).kernel(ADD, 11 * MS + 1, 15 * MS, 17 * MS, AUTOGRAD)
    export.kernel(ADD, 21 * MS, 22 * MS, 23 * MS)
    return export.write(tmp_path / "trace.sqlite")


# --- kernels ---


def rows_of(*arguments: object) -> list[tuple[str, str, float, float, float]]:
    """Name, class, launches, ms and share of each row, from JSON."""
    rows = json.loads(output("kernels", *arguments, "--format", "json"))
    return [
        (row["name"], row["class"], row["launches"], round(row["ms"], 6), round(row["share"], 6)) for row in rows
    ]  # fmt: skip


#: Of 5 ms GEMM, 3 ms ADD and 1 ms softmax.
FIRST_TWO = [(GEMM, "matmul", 2, 5, 0.555556), (ADD, "elementwise", 2, 3, 0.333333)]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ("", [*FIRST_TWO, (SOFTMAX, "softmax", 1, 1, 0.111111)]),
        ("--top 2", FIRST_TWO),
        ("--class softmax", [(SOFTMAX, "softmax", 1, 1, 0.111111)]),
        ("--phase backward", [(GEMM, "matmul", 1, 3, 0.6), (ADD, "elementwise", 1, 2, 0.4)]),
        ("--phase backward --class elementwise", [(ADD, "elementwise", 1, 2, 0.4)]),
    ],
)  # fmt: skip
def test_kernels_of_a_capture_a_phase_a_class_and_the_top(options: str, rows: list[Any], trace: Path) -> None:
    assert rows_of(trace, *options.split()) == rows


def test_kernels_per_instance(tmp_path: Path) -> None:
    """Two steps: the kernels of a phase are those of one of its instances."""
    path = training_step(training_step(Export().gpu()), at=2000).write(tmp_path / "t.sqlite")
    assert [row[2] for row in rows_of(path, "--phase", "forward")] == [1, 1]
    assert [row[2] for row in rows_of(path)] == [4, 6]


def test_kernels_of_a_phase_by_name(tmp_path: Path) -> None:
    path = Export().gpu().range("tokens", 0, 10).kernel(GEMM, 1, 2, 5).write(tmp_path / "t.sqlite")
    assert [row[0] for row in rows_of(path, "--phase", "data", "--phase-name", "data=tokens")] == [GEMM]


def test_kernels_as_a_table(trace: Path) -> None:
    lines = output("kernels", trace).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert lines[0].split() == ["kernel", "class", "launches", "ms", "avg", "µs", "share"]
    assert lines[1].split() == [GEMM, "matmul", "2", "5.000", "2,500.0", "55.6", "%"]
    assert len(lines) == 4


def test_a_folder_is_each_of_its_captures(tmp_path: Path, run_main: Main) -> None:
    """Two captures of one kernel each, in a folder and below it; a third one cannot be read."""
    (tmp_path / "below").mkdir()
    for name, ns in (("a.sqlite", 5), ("below/b.sqlite", 7)):
        Export().gpu().range("forward", 0, 10).kernel(GEMM, 1, 2, 2 + ns).write(tmp_path / name)
    rows = json.loads(run_main("kernels", tmp_path, "--format", "json").out)
    assert [(row["capture"], row["ms"]) for row in rows] == [("a.sqlite", 5e-6), ("below/b.sqlite", 7e-6)]
    assert run_main("kernels", tmp_path, "--format", "csv").out.splitlines()[1].startswith("a.sqlite,,")
    assert "capture" not in json.loads(run_main("kernels", tmp_path / "below", "--format", "json").out)[0]
    (tmp_path / "c.sqlite").write_text("no database")
    for command in ("kernels", "info"):
        ended = run_main(command, tmp_path)
        assert (ended.code, f"{tmp_path / 'c.sqlite'}" in ended.err) == (0, True)
    lines = ended.out.splitlines()
    assert [line for line in lines if line.startswith("/")] == [
        f"{tmp_path / name}:" for name in ("a.sqlite", "below/b.sqlite")
    ]
    assert lines.count("Capture:") == 2
    (tmp_path / "none").mkdir()
    assert "holds no trace" in run_main("info", tmp_path / "none").err


def test_kernels_as_csv(trace: Path) -> None:
    text = output("kernels", trace, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == ["process", "name", "class", "launches", "ms", "avg_us", "share"]
    assert [row["name"] for row in rows] == [GEMM, ADD, SOFTMAX]  # a name with commas is one cell
    assert (float(rows[0]["ms"]), float(rows[0]["avg_us"])) == (5.0, 2500.0)
    odd = Export().gpu().kernel("=SUM(A1:A9)", 1, 2, 5).write(trace.with_name("odd.sqlite"))
    assert output("kernels", odd, "--format", "csv").splitlines()[1].startswith(",'=SUM(A1:A9),")  # no formula


def test_kernels_of_two_processes(tmp_path: Path) -> None:
    export = Export().gpu().kernel(GEMM, 1, 2, 5, pid=100).kernel(ADD, 1, 2, 9, pid=200)
    path = export.write(tmp_path / "t.sqlite")
    rows = list(csv.DictReader(io.StringIO(output("kernels", path, "--format", "csv"))))
    assert [(row["process"], row["name"]) for row in rows] == [("pid 100", GEMM), ("pid 200", ADD)]
    assert output("kernels", path).splitlines()[0].split()[:3] == ["kernel", "class", "process"]


def test_kernels_of_a_real_capture(real_capture: RealCapture) -> None:
    rows = rows_of(real_capture("train_small256"), "--phase", "forward", "--class", "matmul")
    assert sum(row[2] for row in rows) == 121  # 109 products, 12 of them in two launches


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--phase optimizer", r"'optimizer'.* It has: backward, forward\. To name one: --phase-name optimizer="),
        ("--class gemm", r"'gemm'.* elementwise, matmul, softmax"),
        ("--phase-name forward", "PHASE=RANGE"),
    ],
)
def test_kernels_that_are_not_there(options: str, line: str, trace: Path, fails: Callable[..., str]) -> None:
    assert re.search(line, fails("kernels", trace, *options.split()))


def test_kernels_of_files_without(tmp_path: Path, fails: Callable[..., str]) -> None:
    path = Export().range("forward", 0, 10).write(tmp_path / "ranges.sqlite")
    assert "holds no kernels. nsys-analyze run -- python train.py" in fails("kernels", path)
    assert "No such file" in fails("kernels", tmp_path / "absent.sqlite")


# --- info ---


def test_info(trace: Path) -> None:
    text = output("info", trace)
    lines = text.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "Capture:", "Tables (rows):", "Processes:", "Ranges (count, total ms):",
        "Messages of the profiler:", "Warnings:",
    ]  # fmt: skip
    for line in (
        "  nsys 2025.3.2.0, schema 3.20.3",
        "  GPU 0: NVIDIA H200, 150.0\N{NO-BREAK SPACE}GiB, 132 SMs",
        "  CUPTI_ACTIVITY_KIND_KERNEL: 5",
        "  pid 100: device 0; 5 kernel",
        "  backward: 1, 10.000",
    ):
        assert line in lines


def test_info_without_anything_optional(tmp_path: Path) -> None:
    path = training_step(Export(("ThreadNames", "META_DATA_EXPORT", "NVTX_EVENTS"))).write(tmp_path / "t.sqlite")
    text = output("info", path)
    assert "nsys unknown, schema unknown" in text
    assert "no NVTX table" in text


def test_info_of_ranges_without_a_name_or_an_end(tmp_path: Path) -> None:
    export = Export().range("", 0, 10).range("forward", 20, None)
    for i in range(50):
        export.range(f"layer{i}", 100, 101)
    text = output("info", export.write(tmp_path / "t.sqlite"))
    assert "(unnamed): 1, 0.000" in text
    assert "forward: 1 without an end" in text
    assert "and 11 more names" in text


def test_info_of_real_captures(real_capture: RealCapture) -> None:
    text = output("info", real_capture("ddp2_small256"))
    assert "(device 0)" in text
    assert "(device 1)" in text
    text = output("info", real_capture("graph_small256"))
    assert "CUDA graph replays are opaque" in text


def test_tables_that_are_not_read_are_named(tmp_path: Path) -> None:
    export = training_step(Export())
    export.add("GPU_METRICS", rawTimestamp=1, timestamp=2, typeId=3, metricId=4, value=5)
    export.add("NET_NIC_METRIC", start=1, end=2, globalId=3, value=4).add("OSRT_API", start=1, end=2, nameId=3)
    export.add("TARGET_INFO_NIC_INFO", guid=1, name="mlx5_0")  # of no moment: nothing that could be read
    path = export.write(tmp_path / "t.sqlite")
    lines = output("info", path).splitlines()
    for name in ("GPU_METRICS", "NET_NIC_METRIC", "OSRT_API"):
        assert f"  {name}: 1 (not read)" in lines
    assert [line for line in lines if "(not read)" in line and "NVTX" in line] == []
    assert "  TARGET_INFO_NIC_INFO: 1" in lines
    assert "Tables in the captures that are not read: `GPU_METRICS`, `NET_NIC_METRIC`, `OSRT_API`." in output(
        "report", path, "-o", "-"
    )
    said = output("share", path, "-o", tmp_path / "copy.sqlite")
    assert "Tables that the copy lacks: GPU_METRICS, NET_NIC_METRIC, TARGET_INFO_NIC_INFO" in said


def test_info_of_a_trace_of_pytorch_says_so(tmp_path: Path) -> None:
    on_cpu = Kineto(torch_version="2.13.0").operator("aten::mm", 0, 10).write(tmp_path / "cpu.json")
    lines = output("info", on_cpu).splitlines()
    said = "  a trace of PyTorch's profiler, PyTorch 2.13.0"
    assert lines[:3] == ["Capture:", said, "  no GPU: PyTorch's operators are treated as kernels"]
    on_gpu = Kineto().gpu().launch(1, 0).kernel(GEMM, 1, 5, 10).write(tmp_path / "gpu.json")
    lines = output("info", on_gpu).splitlines()
    assert lines[1:3] == ["  a trace of PyTorch's profiler", "  GPU 0: NVIDIA H100, 80.0\N{NO-BREAK SPACE}GiB, 132 SMs"]


def test_info_of_what_is_no_trace(tmp_path: Path, fails: Callable[..., str]) -> None:
    assert "No such file" in fails("info", tmp_path / "absent.sqlite")
    assert "holds no trace" in fails("info", tmp_path)


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
        ("Read:", ["report", "explain", "what-if", "kernels", "modules", "info", "ask", "check"]),
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

"""Tests the stacks that are sampled while a program is recorded, and the source lines that they show."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.analysis.steps.lines import Line, StackSamples
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.steps.tracks import IdleTrack
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.capture.nsys import ProfileOptions
from nsys_analyzer.capture.profilers import make_hook_variables
from nsys_analyzer.capture.targets import Annotation
from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import NsysAnalyzerError, TraceError
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.finding_texts import write_finding
from nsys_analyzer.report.sections.findings import describe_line
from nsys_analyzer.system.machine import Nsys
from nsys_analyzer.text import plain
from nsys_analyzer.trace.nsys_report import ensure_export
from nsys_analyzer.trace.stacks import StackFrame, Stacks, find_stack_files
from tests.support.export import PID
from tests.support.packed import unpack_fault
from tests.support.prepared import run_prepared
from tests.support.program import FREE, SYNC, Program
from tests.test_real_nsys import profiled

MS, US = 1_000_000, 1_000
#: Samples of the pause of ``waiting``, in load().
LOADING = [(at, at, (2, 0)) for at in range(225, 400, 50)]
#: What the monotonic clock says at the capture's moment 0.
AHEAD = 5_000_000_000
SOURCE = {"train.py": {29: "def log():", 30: "    print(loss.item())", 31: "    return"}}
#: A sample: when it was asked for and taken, µs of the capture, and its frames by their places, the innermost first.
Sample = tuple[float, float, Sequence[int]]


def write_stacks(
    folder: Path, samples: Sequence[Sample], *, pid: int = PID, drift: float = 0.0, loader: int | None = None
) -> None:
    """The stacks beside ``t.sqlite``, on a monotonic clock that runs so much faster than the capture's."""
    frames = [("train.py", 9, "<module>"), ("train.py", 30, "log"), ("data.py", 5, "load"), ("train.py", 7, "free")]

    def monotonic(us: float) -> int:
        return round(us * US * (1 + drift)) + AHEAD

    values = {
        "pid": pid, "loads": loader is not None, "period_ns": 100 * US,
        "asked_ns": [monotonic(asked) for asked, _, _ in samples],
        "taken_ns": [monotonic(taken) for _, taken, _ in samples],
        "stack": list(range(len(samples))), "stacks": [list(stack) for _, _, stack in samples],
        "frames": frames, "source": SOURCE,
    }  # fmt: skip
    name = "t.stacks.gz" if loader is None else f"t_loader{loader}.stacks.gz"
    (folder / name).write_bytes(gzip.compress(json.dumps(values).encode()))


def clocked(program: Program, *at: float, pid: int = PID, drift: float = 0.0) -> Program:
    """The program, whose hooks say the clock at some moments, µs."""
    for us in at:
        program.open(f"nsys-analyze clock {pid} {round(us * US * (1 + drift)) + AHEAD}", us, us + 0.5)
    return program


def waiting(launch: tuple[int, int] = (-10, -6)) -> Program:
    """A step [0, 1000) µs: a kernel, a wait for it to 210, nothing to 400, memory is freed to 600, another kernel."""
    made = Program().step(0, 1000).work(launch, (launch[1] + 6, 200))
    made.api(SYNC, 20, 210)
    made.api(FREE, 400, 600)
    made.work((700, 704), (706, 1000))
    return made


def step_of(program: Program, folder: Path) -> StepSummary:
    (summary,) = summarize(Trace.load(program.write(folder / "t.sqlite")), "t")
    assert summary.step is not None
    return summary.step


def named(step: StepSummary, cause: str) -> list[tuple[str, str, float]]:
    """The lines of a cause of idle time: place, the caller's, and share."""
    rows = [row for row in step.idle_by_cause if row.cause == cause]
    return [(line.place, line.called_from, round(line.share, 4)) for line in rows[0].lines]


def test_the_samples_inside_a_wait_a_pause_and_the_allocator_name_their_lines(tmp_path: Path) -> None:
    # Every 50 µs: 20 to 210 waits in log(), 210 to 400 pauses in load(), 400 to 600 frees.
    moments: list[Sample] = [(at, at, (1, 0)) for at in range(25, 210, 50)]
    moments += [*LOADING, *((at, at, (3, 0)) for at in range(425, 600, 50)), (800, 800, (0,))]
    write_stacks(tmp_path, moments)
    step = step_of(clocked(waiting(), -20, 900), tmp_path)
    assert named(step, "host") == [("data.py:5", "train.py:9", 1.0)]
    assert named(step, "allocator") == [("train.py:7", "train.py:9", 1.0)]
    # The GPU idles after the wait for 10 µs, but the line is that of the wait itself.
    assert named(step, "sync") == [("train.py:30", "train.py:9", 1.0)]
    # 13 samples: 4 of each, and one in the main program, which no line of the program calls.
    assert [(line.place, round(line.share * 13), line.called_from) for line in step.lines] == [
        ("train.py:30", 4, "train.py:9"), ("data.py:5", 4, "train.py:9"), ("train.py:7", 4, "train.py:9"),
    ]  # fmt: skip
    assert step.lines[0].source == ("    29 def log():", ">   30     print(loss.item())", "    31     return")
    assert not step.lines[1].source


def test_each_gap_of_a_timeline_has_the_stack_that_was_sampled_most_in_it(tmp_path: Path) -> None:
    # The pause from 210 to 400 has two samples in load() and one in the main program, what is freed until 600 none.
    write_stacks(tmp_path, [(225, 225, (0,)), (275, 275, (2, 0)), (325, 325, (2, 0)), (650, 650, ())])
    program = clocked(waiting(), -20)
    (summary,) = summarize(Trace.load(program.write(tmp_path / "t.sqlite")), "t", tracked=1_000)
    assert summary.tracks
    idle = next(track for track in summary.tracks.tracks if isinstance(track, IdleTrack))
    found = {
        start / US: summary.tracks.stacks[code]
        for start, code in zip(idle.start.tolist(), idle.stack.tolist(), strict=True)
    }
    assert found[210] == ("data.py:5 in load", "train.py:9 in <module>")
    assert found[400] == ()
    # A sample lasts until the next one, and no longer than a period of 100 µs behind it; a line inside its caller's.
    (lines,) = (track for track in summary.tracks.tracks if track.kind == "lines")
    named_lines = [summary.tracks.names[code].partition(" ")[0] for code in lines.name.tolist()]
    boxes = zip(
        named_lines, (lines.start / US).tolist(), (lines.duration / US).tolist(), lines.depth.tolist(), strict=True
    )
    assert list(boxes) == [("train.py:9", 225, 200, 0), ("data.py:5", 275, 150, 1)]


def test_a_sample_counts_for_as_long_as_it_was_waited_for(tmp_path: Path) -> None:
    # Python's lock was held from 220 to 390: 170 µs and a period of 100; two others count for a period each.
    write_stacks(tmp_path, [(215, 215, (0,)), (220, 390, (2, 0)), (395, 395, (0,))])
    step = step_of(clocked(waiting(), -20), tmp_path)
    assert named(step, "host") == [
        ("data.py:5", "train.py:9", round(270 / 470, 4)),
        ("train.py:9", "", round(200 / 470, 4)),
    ]


def test_processes_of_the_loader_have_lines_of_their_own(tmp_path: Path) -> None:
    # Two of them, one after the other: 6 samples at a line, and 2 in which they wait for something to do.
    write_stacks(tmp_path, [(at, at, (0,)) for at in range(225, 400, 50)])
    write_stacks(tmp_path, [(at, at, (2,)) for at in (100, 200, 300)], loader=7)
    write_stacks(
        tmp_path,
        [(at, at, stack) for at, stack in ((500, (2,)), (600, ()), (700, ()), (800, (2,)), (900, (2,)))],
        loader=8,
    )
    step = step_of(clocked(waiting(), -20).open("next batch", 230, 380), tmp_path)
    for lines in (step.lines, next(row.lines for row in step.idle_by_cause if row.cause == "data")):
        assert [(line.place, line.loads, round(line.share, 4)) for line in lines] == [
            ("train.py:9", False, 1.0), ("data.py:5", True, 0.75),
        ]  # fmt: skip
    assert plain(describe_line(step.lines[-1])).endswith(" · 75\xa0% of the time of a data-loading process")


def test_clocks_that_drift_apart_are_aligned(tmp_path: Path) -> None:
    # By the first mark alone the samples would be 0.3 % of 100 ms late: 300 µs, in the time that frees.
    write_stacks(tmp_path, LOADING, drift=0.003)
    step = step_of(clocked(waiting(), -100_000, 900, drift=0.003), tmp_path)
    assert named(step, "host") == [("data.py:5", "train.py:9", 1.0)]
    assert named(step, "allocator") == []


def test_the_quickest_mark_of_a_row_is_believed(tmp_path: Path) -> None:
    # The thread lost its core for 300 µs between the clock and the range, twice of three times.
    write_stacks(tmp_path, LOADING)
    late = clocked(waiting(), 1)
    for moment in (0, 2):
        late.open(f"nsys-analyze clock {PID} {AHEAD + moment * US}", 300 + moment, 301 + moment)
    assert named(step_of(late, tmp_path), "host") == [("data.py:5", "train.py:9", 1.0)]


def test_marks_of_the_clock_are_no_ranges_of_the_program(tmp_path: Path) -> None:
    trace = Trace.load(clocked(waiting(), 5, 300).write(tmp_path / "t.sqlite"))
    assert [trace.ranges.names[code] for code in trace.ranges.name] == ["step"]
    assert not trace.stacks


@pytest.mark.parametrize("clock", [(), (0.0,)])
def test_stacks_of_another_process_or_without_a_clock_are_left_alone(tmp_path: Path, clock: Sequence[float]) -> None:
    write_stacks(tmp_path, LOADING, pid=PID + bool(clock))
    step = step_of(clocked(waiting(), *clock), tmp_path)
    assert not step.lines


@pytest.mark.parametrize("content", [b"no stacks", gzip.compress(b"{}", mtime=0), gzip.compress(b'{"pid": 1', mtime=0)])
def test_damaged_stacks_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.stacks.gz").write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.stacks\.gz cannot be read"):
        Trace.load(clocked(waiting(), 0).write(tmp_path / "t.sqlite"))


def test_a_pipe_in_place_of_stacks_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.stacks.gz")
    with pytest.raises(NsysAnalyzerError, match=r"t\.stacks\.gz is a pipe or a device, not a file"):
        Trace.load(clocked(waiting(), 0).write(tmp_path / "t.sqlite"))


def test_the_files_of_stacks_that_belong_to_a_capture(tmp_path: Path) -> None:
    for name in ("", "_loader7", "_rank1", "_rank1_loader9", "_rank10", "_other"):
        (tmp_path / f"capture{name}.stacks.gz").touch()
    own = ["capture.stacks.gz", "capture_loader7.stacks.gz"]
    first = ["capture_rank1.stacks.gz", "capture_rank1_loader9.stacks.gz"]
    # One capture may hold all ranks.
    of_all = {path.name for path in find_stack_files(tmp_path / "capture.sqlite")}
    assert of_all == {*own, *first, "capture_rank10.stacks.gz"}
    assert [path.name for path in find_stack_files(tmp_path / "capture_rank1.json.gz")] == first


def test_two_samples_tell_nothing(tmp_path: Path) -> None:
    write_stacks(tmp_path, [(at, at, (2, 0)) for at in (225, 275)])
    assert not step_of(clocked(waiting(), 0), tmp_path).lines


def test_a_line_in_words() -> None:
    # 9.8 ms are 97 % of 10.1 ms.
    line = Line("train.py", 212, "log_norms", "train.py:140", 9.8 / 10.1, 9.8)
    assert (
        plain(describe_line(line))
        == "train.py:212 in log_norms, called from train.py:140 · 9.8 of 10.1\xa0ms (97\xa0%)"
    )
    share = Line("train.py", 3, "<module>", "", 0.5)
    assert plain(describe_line(share)) == "train.py:3 in <module> · 50\xa0% of the samples"


def test_a_line_has_the_work_that_its_calls_launch() -> None:
    """Two steps of 10 calls: eight of forward launch 10 ns each, two of the loss 60 each. 160 of 400 ns are forward's.

    The samples of both steps are looked at as one: at the places 0, 3, 5 and 6 is forward, at 8 the loss; the other
    call of the loss is nearest to that one, whose sample counts no less for being one of five.
    """
    forward, loss = (StackFrame("model.py", 3, "forward"),), (StackFrame("train.py", 9, "loss"),)
    nothing = np.zeros(0, np.int64)
    stacks = Stacks(nothing, nothing, 100, nothing, (forward, loss), {})
    call_samples = StackSamples(np.array([0, 5, 13, 16, 18]), np.array([0, 0, 0, 0, 1]), np.full(5, 100.0), stacks)
    work_ns = np.tile([10.0] * 8 + [60.0] * 2, 2)
    lines = call_samples.lines_of(work_ns, np.arange(20) % 10, steps=2)
    assert [(line.place, line.share, line.ms) for line in lines] == [
        ("train.py:9", pytest.approx(240 / 400), pytest.approx(120e-6)),
        ("model.py:3", pytest.approx(160 / 400), pytest.approx(80e-6)),
    ]
    assert (
        call_samples.lines_of(np.where(np.arange(20) == 18, 60.0, 0.0), np.arange(20) % 10, steps=2) == ()
    )  # one sample


def test_findings_and_the_idle_table_name_lines(tmp_path: Path) -> None:
    write_stacks(tmp_path, LOADING)
    clocked(waiting(), 0).write(tmp_path / "t.sqlite")
    shown = CliRunner().invoke(cli, ["report", str(tmp_path / "t.sqlite"), "-o", str(tmp_path / "t.md")])
    assert shown.exit_code == 0, shown.output
    row = next(line for line in (tmp_path / "t.md").read_text().splitlines() if "other CPU work" in line)
    assert "`data.py:5`" in row


def test_share_leaves_the_stacks_out_but_where_they_are_asked_for(tmp_path: Path) -> None:
    write_stacks(tmp_path, LOADING)
    export = clocked(waiting(), 0).write(tmp_path / "t.sqlite")
    (tmp_path / "t.manifest.json").write_text(json.dumps({"lines": {"Net": "train.py:3"}, "waits": {"train.py:4": 1}}))
    assert CliRunner().invoke(cli, ["share", str(export), "-o", str(tmp_path / "small.sqlite")]).exit_code == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("small")] == ["small.sqlite"]
    with closing(sqlite3.connect(tmp_path / "small.sqlite")) as copy:
        assert not any("train.py" in str(row) for row in copy.execute("SELECT value FROM StringIds"))
    kept = CliRunner().invoke(cli, ["share", str(export), "-o", str(tmp_path / "own.sqlite"), "--keep-source"])
    assert kept.exit_code == 0, kept.output
    (summary,) = gather([tmp_path / "own.sqlite"]).captures
    assert summary.step
    assert named(summary.step, "host") == [("data.py:5", "train.py:9", 1.0)]


def test_share_replaces_no_stacks_unasked_and_writes_through_no_link(tmp_path: Path) -> None:
    write_stacks(tmp_path, [(225, 225, (2, 0))])
    export = clocked(waiting(), 0).write(tmp_path / "t.sqlite")
    mine, copy = tmp_path / "mine.txt", tmp_path / "own.stacks.gz"
    for place in (copy, mine):
        place.write_text("mine")
    words = ["share", str(export), "-o", str(tmp_path / "own.sqlite"), "--keep-source"]
    refused = CliRunner().invoke(cli, words)
    assert f"{copy} exists already" in str(refused.exception)
    assert (copy.read_text(), (tmp_path / "own.sqlite").exists()) == ("mine", False)
    copy.unlink()
    for target in (mine, tmp_path / "nothing"):
        copy.symlink_to(target)
        assert "exists already" in str(CliRunner().invoke(cli, [*words, "--force"]).exception)
        copy.unlink()
    assert (mine.read_text(), (tmp_path / "nothing").exists()) == ("mine", False)
    (tmp_path / "own.sqlite").symlink_to(tmp_path / "nothing")
    assert "own.sqlite exists already" in str(CliRunner().invoke(cli, words).exception)
    (tmp_path / "own.sqlite").unlink()
    copy.write_text("mine")
    assert CliRunner().invoke(cli, [*words, "--force"]).exit_code == 0
    assert copy.read_bytes() == (tmp_path / "t.stacks.gz").read_bytes()


# --- programs that are sampled

TRAINING = """
import gc, time, torch
from torch import nn
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step(batch):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""
#: A data set whose samples take their time.
_IMAGES = """
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return transform(torch.ones(8))
def transform(image):
    time.sleep(0.004)  # planted
    return image
"""
#: Each program loses its time at the line that is marked.
PLANTED = {
    "loader": """
class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return torch.tensor([tokenize(str(index) * 40000)] * 8, dtype=torch.float)
def tokenize(text):
    return [sum(int(letter) for letter in text)]  # planted
texts = Texts()
for batch in torch.utils.data.DataLoader(texts, batch_size=8):
    step(torch.ones(8, 8))
""",
    "transform": _IMAGES
    + """
for batch in torch.utils.data.DataLoader(Images(), batch_size=8):
    step(batch)
""",
    "transform in a process": _IMAGES
    + """
loader = torch.utils.data.DataLoader(Images(), batch_size=8, num_workers=1)
for batch in loader:
    step(batch)
""",
    "collection": """
heap = [{"index": index, "spans": [index]} for index in range(300_000)]
for _ in range(40):
    step(torch.ones(8, 8))
    gc.collect()  # planted
""",
    "loop": """
def norm(values):
    total = 0.0
    for value in values:
        total += value * value  # planted
    return total
for _ in range(40):
    step(torch.ones(8, 8))
    norm([1.0] * 400_000)
""",
}
RECORDED = """
import sys
from nsys_analyzer.capture import recorder
sys.exit(recorder.main(["--output", "t.json.gz", "--", "train.py"]))
"""
ASKED = Annotation(warmup_steps=3, steps=6)


def run_annotated(program: Path, text: str, **hooks: str) -> str:
    """Runs a program under the hooks, and returns what it wrote to standard error."""
    program.write_text(text)
    ended = run_prepared(program, {**os.environ, **hooks})
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def record(folder: Path, text: str, asked: Annotation = ASKED) -> None:
    """Records a program with the hooks."""
    (folder / "train.py").write_text(text)
    run_annotated(folder / "program.py", RECORDED, **make_hook_variables(asked, stacks=folder / "t.stacks.gz"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_the_line_that_plants_a_fault_is_named_first(tmp_path: Path, fault: str) -> None:
    text = TRAINING + PLANTED[fault]
    record(tmp_path, text)
    planted = next(number for number, line in enumerate(text.splitlines(), 1) if "# planted" in line)
    (summary,) = gather([tmp_path / "t.json.gz"]).captures
    step: Any = summary.step
    in_process = "process" in fault
    for lines in (step.lines, step.idle_by_cause[0].lines):
        lines = [line for line in lines if line.loads == in_process]
        assert lines[0].place == f"train.py:{planted}", lines
        assert any("# planted" in line for line in lines[0].source)
        assert lines[0].share > 0.5


#: A PyTorch of a CPU that warns as one of a GPU does.
WAITING = """
import warnings
mode = "default"
def set_mode(new):
    global mode
    mode = new
number = 0
torch.cuda.is_initialized = lambda: number < 3
torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode = lambda: mode, set_mode
def item(loss):
    if mode == "warn":
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)")
    return loss
def log(loss):
    print("loss", item(loss))
for number in range(20):
    step(torch.ones(8, 8))
    log(1.0)
    log(2.0)
    warnings.warn(f"something else in step {number}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("stacks", [True, False])
def test_what_waits_in_a_step_by_the_warnings_of_pytorch(tmp_path: Path, stacks: bool) -> None:
    asked = Annotation(warmup_steps=4, steps=4, stacks=stacks)
    text = TRAINING + WAITING
    errors = run_annotated(tmp_path / "program.py", text, **make_hook_variables(asked, tmp_path / "results.json"))
    at = {words: number for number, line in enumerate(text.splitlines(), 1) if (words := line.strip())}
    warned = at['warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)")']
    found = json.loads((tmp_path / "results.json").read_text())["waits"]
    # The step that is looked at ends with an optimizer's step: both calls lie behind the step before it.
    called = at['print("loss", item(loss))']
    line = f"program.py:{warned} in item, called from program.py:{called}"
    assert found == ({line: 2} if stacks else None)
    assert "synchronizing" not in errors
    assert errors.count("Warning: something else") == 7  # the program is stopped in its 8th step


MODEL = """
import torch
from torch import nn
def noted(forward):
    @__import__("functools").wraps(forward)
    def noting(*arguments):
        return forward(*arguments)
    return noting
class Layer(nn.Linear):
    @noted  # Layer.forward
    def forward(self, batch):
        return super().forward(batch)
def block():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(8, 8)
        def forward(self, batch):
            return self.layer(batch)
    return Block()
def other():
    class Block(nn.Module):
        def forward(self, batch):
            return batch
    return Block()
model, loss = nn.Sequential(block(), other(), Layer(8, 1)), nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(20):
    optimizer.zero_grad()
    found = model(torch.ones(8, 8))  # forward
    loss(found, torch.ones(8, 1)).backward()  # loss
    optimizer.step()  # optimizer
"""


@pytest.mark.slow
@pytest.mark.parametrize("stacks", [True, False])
def test_the_lines_of_modules_and_of_what_calls_the_phases(tmp_path: Path, stacks: bool) -> None:
    """Each class by its ``forward``; not those of PyTorch, and not two classes of one name."""
    asked = Annotation(warmup_steps=4, steps=4, stacks=stacks)
    run_annotated(tmp_path / "model.py", MODEL, **make_hook_variables(asked, tmp_path / "results.json"))
    at = {line.rpartition("# ")[2]: f"model.py:{number}" for number, line in enumerate(MODEL.splitlines(), 1)}
    found = json.loads((tmp_path / "results.json").read_text())["lines"]
    if not stacks:
        assert found is None
        return
    assert found.pop("Layer") == at["Layer.forward"]
    assert {found[phase] for phase in ("loss", "backward")} == {at["loss"]}
    assert (found["forward"], found["optimizer"]) == (at["forward"], at["optimizer"])
    assert set(found) == {"forward", "loss", "backward", "optimizer", "zero_grad"}


@pytest.mark.slow
def test_no_stacks_are_sampled_where_none_are_wanted(tmp_path: Path) -> None:
    record(tmp_path, TRAINING + PLANTED["loop"], Annotation(warmup_steps=3, steps=6, stacks=False))
    assert not (tmp_path / "t.stacks.gz").exists()
    assert not Trace.load(tmp_path / "t.json.gz").stacks


@pytest.mark.nsys
@pytest.mark.slow
def test_a_real_nsys_keeps_the_clock(nsys: Nsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of the time inside a range of NVTX name the line that sleeps there, and no other line does."""
    pytest.importorskip("nvtx", reason="no NVTX for this Python: pip install 'nvtx==0.2.11'")
    text = TRAINING + "import nvtx\nfor _ in range(12):\n    step(torch.ones(8, 8))\n    with nvtx.annotate('nap'):\n"
    (tmp_path / "train.py").write_text(f"{text}        time.sleep(0.05)\n")
    asked = make_hook_variables(
        Annotation(warmup_steps=3, steps=6, opens_window=False), stacks=tmp_path / "run" / "capture.stacks.gz"
    )
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    report = profiled(nsys, [sys.executable, "train.py"], ProfileOptions(capture_range=False), tmp_path / "run")
    trace = Trace.load(ensure_export(report))
    (stacks,) = trace.stacks.values()
    ranges = trace.ranges.select(trace.ranges.name == trace.ranges.names.index("nap"))
    line = len(text.splitlines()) + 1
    asleep = np.array([bool(frames) and frames[0].line == line for frames in stacks.stacks])[stacks.stack]
    place = np.searchsorted(ranges.start, stacks.sampled) - 1
    inside = (place >= 0) & (stacks.sampled < ranges.end[place])
    edges = np.concatenate([ranges.start, ranges.end])
    near = (np.abs(stacks.sampled[:, None] - edges) < MS).any(axis=1)
    assert asleep.sum() > 30  # 12 × 50 ms hold 120 samples; a busy machine takes fewer
    assert (asleep == inside)[~near].all()


#: Where each fault of the real captures lies: its finding, and the range in which the program is meanwhile.
PLACES = {
    "loader": ("data_loading", "data"), "item": ("host_sync", "log"), "pageable": ("pageable_copy", "data"),
    "foreach": ("unfused_optimizer", "optimizer"), "empty_cache": ("allocator", "step"),
    "collector": ("host_stall", "step"), "checkpoint": ("device_to_host_copy", "checkpoint"),
    # The backward pass launches most of these; what the forward pass does has a line of its own. No kernel of this
    # attention is of the class softmax.
    "attention": ("unfused_attention", "forward"),
    "casts": ("layout_copies", "forward"), "eager": ("unfused_elementwise", "forward"),
}  # fmt: skip
RANGES = ("step", "data", "forward", "loss", "backward", "log", "optimizer", "checkpoint")


def with_stacks_of_ranges(fault: str, folder: Path) -> Path:
    """A real capture with a sample every 5 ms whose line is the place of the program's innermost range in RANGES."""
    export = unpack_fault(fault, folder).rename(folder / "t.sqlite")
    ranges = Trace.load(export).ranges
    program = ranges.select(np.isin(ranges.name, [ranges.names.index(one) for one in RANGES if one in ranges.names]))
    program = program.select(np.argsort(program.start, kind="stable"))
    thread, begun, ended = int(program.thread[0]), int(program.start.min()), int(program.end.max())
    moments = np.arange(begun, ended, 5 * MS)
    inside = (program.start <= moments[:, None]) & (moments[:, None] < program.end)
    innermost = np.where(inside.any(axis=1), inside.shape[1] - 1 - inside[:, ::-1].argmax(axis=1), 0)
    stack = [RANGES.index(program.names[program.name[one]]) for one in innermost.tolist()]
    clock = [{"start": at, "text": f"nsys-analyze clock {PID} {at - begun}"} for at in (begun, ended)]
    with closing(sqlite3.connect(export)) as file, file:
        columns = "(start, end, eventType, globalTid, text) VALUES (:start, :start + 1, 59, :thread, :text)"
        file.executemany(f"INSERT INTO NVTX_EVENTS {columns}", [{**one, "thread": thread} for one in clock])
    times = (moments - begun).tolist()
    values = {
        "pid": PID, "loads": False, "period_ns": 5 * MS, "asked_ns": times, "taken_ns": times, "stack": stack,
        "stacks": [[place] for place in range(len(RANGES))],
        "frames": [("train.py", place, name) for place, name in enumerate(RANGES)], "source": {},
    }  # fmt: skip
    (folder / "t.stacks.gz").write_bytes(gzip.compress(json.dumps(values).encode()))
    return export


@pytest.mark.parametrize("fault", PLACES)
def test_a_finding_of_a_real_capture_names_the_line_at_which_the_program_is(tmp_path: Path, fault: str) -> None:
    export = with_stacks_of_ranges(fault, tmp_path)
    waits = {"train.py:5 in log": 222, "train.py:7 in checkpoint": 1}
    (tmp_path / "t.manifest.json").write_text(json.dumps({"waits": waits}))
    (capture,) = gather([export]).captures
    name, place = PLACES[fault]
    finding = next(one for one in capture.findings or () if one.id == name)
    assert finding.lines[0].function == place, finding.lines
    lines = "`train.py:5 in log` 222×, `train.py:7 in checkpoint` 1×."
    said = f"PyTorch warns that the program waits for the GPU at these lines (waits per step): {lines}"
    assert (said in [plain(one, "`") for one in write_finding(finding).evidence]) == (name == "host_sync")

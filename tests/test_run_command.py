"""``nsys-analyze run`` at the level of the command line, and every fault that can end a configuration."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsys_analyzer.capture import plan as run_plan
from nsys_analyzer.inputs.manifest import configuration_of, read_manifest
from tests.conftest import Main, Outcome
from tests.support.commands import make_command_test
from tests.support.sweeping import Desk, let_time_pass, make_recording_nsys, wait_for
from tests.test_nsys import make_command
from tests.test_process import gone

FORWARD = ("--mode", "forward", "--context-length", "16")
SMALL, MEDIUM, LARGE = (f"{model}_ctx16_forward_fp32" for model in ("small", "medium", "large"))


Run = Callable[..., Outcome]


@pytest.fixture
def run(run_main: Main) -> Run:
    """Runs the command as it is installed, in this process."""
    return lambda *arguments: run_main("run", *arguments)


def error_of(ended: Outcome) -> str:
    """The one line of an error."""
    line = ended.err.splitlines()[-1]
    assert (ended.code, line[:7]) == (1, "Error: "), ended.err
    assert "Traceback" not in ended.err
    return line


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No nsys or GPU of this machine counts, PyTorch is taken to be here, and the signals are as before."""
    monkeypatch.setattr(run_plan, "find_nsys", lambda: Path(os.environ["NSYS"]) if "NSYS" in os.environ else None)
    monkeypatch.setattr(run_plan, "count_gpus", lambda: 0)
    monkeypatch.setattr(run_plan, "torch_version", lambda: "2.13.0")
    monkeypatch.delenv("NSYS", raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk.make(tmp_path / "desk")
    monkeypatch.chdir(desk.folder)
    return desk


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Tells the fake target what to do, by model."""
    return lambda **code: monkeypatch.setenv("BEHAVIOUR", json.dumps(code))


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = make_recording_nsys(tmp_path)
    monkeypatch.setenv("NSYS", str(path))
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"mount cannot be run: {error}")
    if answer.returncode:
        pytest.skip(f"no right to mount a small file system: {answer.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


# --- what a sweep leaves ---


def test_timings_alone(desk: Desk, run: Run) -> None:
    ended = run("--model", "small,medium", *FORWARD, "--profiler", "none")
    assert ended.code == 0, ended.err
    assert desk.ran() == ["small timed", "medium timed"]
    assert desk.left() == {SMALL, MEDIUM, "timings.csv", "report.md", ".lock"}
    assert {path.name for path in (desk.runs / SMALL).iterdir()} == {"manifest.json", "target.log"}
    assert desk.timings() == [(name, phase, "ok") for name in (MEDIUM, SMALL) for phase in ("forward", "step")]
    report = (desk.runs / "report.md").read_text()
    row = next(line for line in report.splitlines() if line.startswith(f"| {SMALL}"))
    assert row.split("|")[2].strip() == "3.000"  # the mean step of 2 and 4 ms
    assert ended.out.splitlines()[-1] == "runs/report.md"


@pytest.mark.usefixtures("nsys")
def test_timings_and_a_trace(desk: Desk, run: Run) -> None:
    ended = run("--model", "small", *FORWARD, "--profiler", "nsys")
    assert ended.code == 0, ended.err
    assert desk.ran() == ["small timed", "small profiled"]
    assert {path.name for path in (desk.runs / SMALL).iterdir()} == {
        "capture.nsys-rep", "capture.sqlite", "manifest.json", "target.log",
    }  # fmt: skip
    said = read_manifest(desk.runs / SMALL / "manifest.json")
    assert (said.status, said.profiler, said.nsys) == ("ok", "nsys", "2022.4.2.1")
    configuration = configuration_of(said)
    assert configuration.model
    # FLOPs need no dimension typed: the target told its own, which are none of the model's that was asked for
    assert (configuration.model.d_model, configuration.model.num_layers, configuration.batch_size) == (64, 2, 4)
    assert "No GPU: nsys only records NVTX ranges" in ended.err
    assert "FLOP" in (desk.runs / "report.md").read_text()


@pytest.mark.usefixtures("nsys")
@pytest.mark.parametrize("name", ["ünï b'c%h", "./deep/er/"])
def test_output_folders_of_all_sorts(name: str, desk: Desk, run: Run) -> None:
    ended = run("--model", "2.7B", *FORWARD, "--profiler", "nsys", "--output-dir", name)
    assert ended.code == 0, ended.err
    place = desk.folder / name
    assert (place / "2.7B_ctx16_forward_fp32/capture.sqlite").is_file()
    assert ended.out.splitlines()[-1] == str(Path(name) / "report.md")


def test_an_output_folder_that_holds_other_things(desk: Desk, run: Run) -> None:
    mine = {
        "notes.txt": "mine",
        "app/manifest.json": '["an icon"]',
        "odd/manifest.json": '{"name": "an app"}',
    }
    for name, text in mine.items():
        (desk.runs / name).parent.mkdir(parents=True, exist_ok=True)
        (desk.runs / name).write_text(text)
    (desk.runs / ".lock").write_text("99999")  # of a sweep that was killed
    (desk.runs / f".{SMALL}.part").mkdir()
    (desk.runs / f".{SMALL}.part/manifest.json").write_text("{}")
    ended = run("--model", "small", *FORWARD, "--profiler", "none")
    assert {row[0] for row in desk.timings()} == {SMALL}
    assert {name: (desk.runs / name).read_text() for name in mine} == mine
    assert f".{SMALL}.part" not in desk.left()
    assert "Traceback" not in ended.err


def test_timings_of_the_users_own_are_not_replaced(desk: Desk, run: Run) -> None:
    desk.runs.mkdir()
    (desk.runs / "timings.csv").write_text("model,context_length,forward_ms\nsmall,16,2.5\n")
    error = error_of(run("--model", "small", *FORWARD, "--profiler", "none"))
    assert "runs/timings.csv was not written by a sweep" in error
    assert "2.5" in (desk.runs / "timings.csv").read_text()


# --- what is refused before anything runs ---

test_refused = make_command_test("run_errors")


def test_a_dry_run_writes_nothing(desk: Desk, run: Run, nsys: Path) -> None:
    ended = run("--model", "small,medium,small", *FORWARD, "--profiler", "nsys", "--dry-run", "--warmup", "0")
    assert ended.code == 0
    heads = [line for line in ended.out.splitlines() if line.startswith("# ")]
    assert heads == [f"# {SMALL}", f"# {MEDIUM}"]
    _, timed, profiled, *_ = ended.out.splitlines()
    assert timed.endswith("--model small --context-length 16 --mode forward --precision fp32 "
                          "--device cpu --steps 2 --warmup 0")  # fmt: skip
    assert profiled == f"{nsys} profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --cuda-graph-trace=node " \
        f"--force-overwrite=true --output=runs/{SMALL}/capture {timed}"  # fmt: skip
    assert not desk.runs.exists()
    assert desk.ran() == []


def test_a_dry_run_of_a_program(desk: Desk, run: Run) -> None:
    ended = run("--dry-run", "--memory", "--", "python3", "-X", "dev", "-u", "src/train.py", "--lr", "1")
    assert ended.out.splitlines() == [
        "# train",
        "python3 -X dev -u src/train.py --lr 1",  # for its times
        "python3 -X dev -u -m nsys_analyzer.capture.recorder --output runs/train/capture.json.gz --memory "
        "-- src/train.py --lr 1",
    ]
    assert not desk.runs.exists()


# --- nsys ---


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "count_gpus", lambda: 1)
    monkeypatch.setattr(run_plan, "torch_version", lambda: "2.13.0+cu130")


def binary_nsys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nsys that is no script which knows where the real one is: a bash, which prints a version as nsys does."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    path = folder / "target-linux-x64/nsys"
    path.parent.mkdir()
    shutil.copy(bash, path)
    monkeypatch.setenv("NSYS", str(path))
    return path


def test_an_importer_that_is_missing(desk: Desk, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nsys = binary_nsys(tmp_path, monkeypatch)
    error = error_of(run("--profiler", "nsys"))
    assert all(word in error for word in ("QdstrmImporter", str(nsys), "nsys-analyze doctor", "--profiler torch"))
    on_a_gpu(monkeypatch)
    notice = run("--dry-run").err.splitlines()[0]
    assert all(word in notice for word in ("QdstrmImporter", str(nsys), "nsys-analyze doctor", "torch.profiler"))
    assert not desk.runs.exists()


def test_an_nsys_that_prints_no_version_is_not_needed_on_a_cpu(
    desk: Desk, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = make_command(tmp_path / "nsys", "echo 'cannot execute' >&2; exit 126")
    monkeypatch.setenv("NSYS", str(broken))
    assert run("--dry-run").code == 0
    assert f"{broken} --version" in error_of(run("--profiler", "nsys"))
    assert not desk.runs.exists()


def test_an_export_that_fails(desk: Desk, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nsys = make_recording_nsys(tmp_path, export="echo 'Exporter crashed' >&2; exit 5")
    monkeypatch.setenv("NSYS", str(nsys))
    ended = run("--model", "small", *FORWARD, "--profiler", "nsys")
    assert ended.code == 1
    said = desk.manifest(SMALL)
    assert (said["status"], said["timings"]["status"]) == ("failed", "ok")
    assert "Exporter crashed" in said["message"]
    assert f"nsys export --type sqlite runs/{SMALL}/capture.nsys-rep" in said["message"]
    assert "Exporter crashed" in (desk.runs / "report.md").read_text()


# --- how configurations end ---


def test_a_crash_at_import(desk: Desk, run: Run, behave: Callable[..., None]) -> None:
    behave(medium="import no_such_module")
    ended = run("--model", "small,medium,large", *FORWARD, "--profiler", "none")
    assert ended.code == 1
    assert desk.ran() == ["small timed", "medium timed", "large timed"]
    message = "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"
    (line,) = [line for line in ended.err.splitlines() if line.startswith(f"{MEDIUM}: failed")]
    assert line.endswith(message)
    assert desk.manifest(MEDIUM)["message"] == message
    assert {row for row in desk.timings() if row[1] == "step"} == {
        (SMALL, "step", "ok"), (MEDIUM, "step", "failed"), (LARGE, "step", "ok"),
    }  # fmt: skip
    assert "No module named 'no_such_module'" in (desk.runs / "report.md").read_text()


@pytest.mark.usefixtures("nsys")
def test_a_crash_in_the_middle_of_a_capture_keeps_what_was_recorded(
    desk: Desk, run: Run, behave: Callable[..., None]
) -> None:
    behave(small="timed or os.kill(os.getpid(), 11)")
    ended = run("--model", "small", *FORWARD, "--profiler", "nsys")
    assert ended.code == 1
    said = desk.manifest(SMALL)
    assert (said["status"], said["timings"]["status"]) == ("failed", "ok")
    assert (desk.runs / SMALL / "capture.sqlite").is_file()
    assert {row[2] for row in desk.timings()} == {"ok"}  # the times are of the run before
    assert "failed" in (desk.runs / "report.md").read_text()


OOM = "CUDA out of memory. Tried to allocate 216.00 MiB. " + "GPU 0 has a total capacity of 139.80 GiB. " * 20


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"results |= dict(status='oom', message={OOM!r}, times_ms={{}}); write(); sys.exit(3)", OOM),
        (f"raise RuntimeError({OOM!r})", f"RuntimeError: {OOM}".strip()),
        ("bytearray(1 << 60)", "MemoryError"),
    ],
)
def test_out_of_memory(code: str, message: str, desk: Desk, run: Run, behave: Callable[..., None]) -> None:
    behave(medium=code)
    ended = run("--model", "small,medium", *FORWARD, "--profiler", "none")
    assert ended.code == 0, ended.err  # it is an answer
    said = desk.manifest(MEDIUM)
    assert (said["status"], said["message"]) == ("oom", message)
    (line,) = [line for line in ended.err.splitlines() if line.startswith(f"{MEDIUM}: oom")]
    assert len(line) < 400  # a terminal's worth; the manifest has the rest
    assert desk.timings()[:2] == [(MEDIUM, "forward", "oom"), (MEDIUM, "step", "oom")]
    again = run("--model", "small,medium", *FORWARD, "--profiler", "none", "--resume")
    assert again.code == 0
    assert "2 of 2 configurations" in again.out
    # Out of a GPU's memory, the program runs once more without --results, to leave a snapshot.
    snapshot_runs = ["medium profiled"] if "CUDA" in message else []
    assert desk.ran() == ["small timed", "medium timed", *snapshot_runs]


def overdue(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a hundred seconds pass as soon as the small model hangs."""
    log = desk.runs / f".{SMALL}.part/target.log"
    let_time_pass(monkeypatch, lambda: 100.0 if log.is_file() and "hangs" in log.read_text() else 0.0)


def test_a_time_out_of_the_timing_run(
    desk: Desk, run: Run, behave: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    behave(small="print('hangs', flush=True); time.sleep(600)")
    overdue(desk, monkeypatch)
    ended = run("--model", "small,medium", *FORWARD, "--profiler", "none", "--timeout", "70.5")
    assert ended.code == 1
    assert [desk.manifest(name)["status"] for name in (SMALL, MEDIUM)] == ["timeout", "ok"]
    assert desk.manifest(SMALL)["message"] == "stopped after 70.5 s"
    assert all(gone(pid) for pid in desk.pids())


@pytest.mark.usefixtures("nsys")
def test_a_time_out_of_the_profiled_run(
    desk: Desk, run: Run, behave: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    behave(small="timed or (print('hangs', flush=True), time.sleep(600))")
    overdue(desk, monkeypatch)
    ended = run("--model", "small", *FORWARD, "--profiler", "nsys", "--timeout", "70.5")
    assert ended.code == 1
    said = desk.manifest(SMALL)
    assert (said["status"], said["timings"]["status"]) == ("timeout", "ok")
    assert {row[2] for row in desk.timings()} == {"ok"}
    assert all(gone(pid) for pid in desk.pids())


def test_what_failed_is_tried_again_and_what_ended_well_is_not(
    desk: Desk, run: Run, behave: Callable[..., None]
) -> None:
    behave(medium="sys.exit('no license')")
    words = ("--model", "small,medium", *FORWARD, "--profiler", "none")
    assert run(*words).code == 1
    assert "--resume" in error_of(run(*words))
    behave()
    assert run(*words, "--resume").code == 0
    assert desk.ran() == ["small timed", "medium timed", "medium timed"]
    assert {row[2] for row in desk.timings()} == {"ok"}
    assert run(*words, "--rerun").code == 0
    assert desk.ran()[3:] == ["small timed", "medium timed"]


@pytest.mark.usefixtures("nsys")
def test_a_resume_without_a_profiler_keeps_the_traces(desk: Desk, run: Run) -> None:
    words = ("--model", "small", *FORWARD)
    assert run(*words, "--profiler", "nsys").code == 0
    assert run(*words, "--profiler", "none", "--resume").code == 0
    assert desk.ran() == ["small timed", "small profiled"]
    assert (desk.runs / SMALL / "capture.sqlite").is_file()


@pytest.mark.usefixtures("nsys")
@pytest.mark.parametrize("other", [("--memory",), ("--steps", "7"), ("--nsys-option=-b none",)])
def test_a_resume_with_other_options(other: tuple[str, ...], desk: Desk, run: Run) -> None:
    words = ("--model", "small", *FORWARD, "--profiler", "nsys")
    assert run(*words).code == 0
    assert f"runs/{SMALL} was made with other options" in error_of(run(*words, *other, "--resume"))
    assert desk.ran() == ["small timed", "small profiled"]


# --- programs ---


@pytest.mark.usefixtures("nsys")
def test_a_program_described_by_options(desk: Desk, run: Run) -> None:
    (desk.folder / "train.py").write_text("import sys; print('lr', sys.argv[2])")
    words = ("--model", "medium", "--context-length", "512", "--batch-size", "2", "--mode", "forward-backward")
    ended = run(*words, "--precision", "bf16", "--profiler", "nsys", "--", sys.executable, "train.py", "--lr", "0.1")
    assert ended.code == 0, ended.err
    assert (desk.runs / "train/target.log").read_text() == "lr 0.1\n" * 2  # timed, then profiled
    nothing = "; no call of a PyTorch model was seen, so no step and no phase is known"
    said = f"The program ran twice, to be timed and then recorded{nothing}. Its output is in runs/train/target.log"
    assert said in ended.out.splitlines()
    configuration = configuration_of(read_manifest(desk.runs / "train/manifest.json"))
    assert configuration.model
    assert (configuration.model.name, configuration.context_length, configuration.batch_size) == ("medium", 512, 2)
    assert (configuration.mode, configuration.precision) == ("forward+backward", "bf16")
    assert desk.timings() == []


def test_the_screen_shows_the_run_that_was_just_made_and_names_the_others(desk: Desk, run: Run) -> None:
    alone = run("--model", "small", *FORWARD, "--profiler", "none")
    assert "holds other runs" not in alone.out
    second = run("--model", "medium", *FORWARD, "--profiler", "none")
    assert second.code == 0, second.err
    said = f"runs also contains other runs, which the report compares: {SMALL}"
    assert [line for line in second.out.splitlines() if SMALL in line] == [said]
    assert MEDIUM in second.out
    both = (desk.runs / "report.md").read_text()
    assert SMALL in both
    assert MEDIUM in both


def test_a_script_that_is_not_there_is_told_before_anything_runs(desk: Desk, run: Run) -> None:
    said = error_of(run("--profiler", "none", "--", sys.executable, "nosuch.py"))
    assert said == f"Error: There is no file nosuch.py in {desk.folder}. Name the program by its path"
    assert not desk.runs.exists()


def test_a_program_has_no_variable_of_arrows(desk: Desk, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    (desk.folder / "train.py").write_text("import os; print(os.environ.get('ARROW_DEFAULT_MEMORY_POOL'))")
    run("--profiler", "none", "--", sys.executable, "train.py")
    assert (desk.runs / "train/target.log").read_text() == "None\n"


def test_what_is_left_of_a_program_has_none_of_its_secrets(desk: Desk, run: Run) -> None:
    (desk.folder / "train.py").write_text("import sys; print(len(sys.argv[2]))")
    words = ("--profiler", "none", "--", sys.executable, "train.py", "--api-key", "hunter2")
    ended = run(*words)
    assert ended.code == 0, ended.err
    assert (desk.runs / "train/target.log").read_text() == "7\n"  # the program got it
    assert desk.manifest("train")["command"].endswith("train.py --api-key '…'")
    assert [path for path in desk.runs.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()] == []
    assert run(*words[:2], "--resume", *words[2:]).code == 0  # the same program


def test_a_program_that_is_not_there(desk: Desk, run: Run) -> None:
    ended = run("--profiler", "torch", "--", "./python9", "train.py")
    assert ended.code == 1
    assert "The program's output is in runs/train/target.log" in ended.out
    assert desk.manifest("train")["message"] == "./python9 cannot be run (No such file or directory)"
    assert "./python9 cannot be run" in (desk.runs / "report.md").read_text()


# --- places that cannot be written ---

FULL = "No space left on device"
#: Leaves not a page of the disk free.
FILL = """
with open({path!r}, "wb", buffering=0) as filler:
    try:
        while True: filler.write(bytes(4096))
    except OSError: pass
"""


def finished_first(run: Run, folder: Path) -> dict[str, bytes]:
    """A sweep's first configuration, whole, and what is in it."""
    assert run("--model", "small", *FORWARD, "--profiler", "none", "--output-dir", folder).code == 0
    files = [*(folder / SMALL).iterdir(), folder / "timings.csv"]
    return {str(path): path.read_bytes() for path in files}


def check_full(ended: Outcome, folder: Path, before: dict[str, bytes]) -> None:
    """One clear line; what was finished is whole, what was not has left nothing."""
    error = error_of(ended)
    assert FULL in error
    assert str(folder) in error
    assert "--resume" in error
    assert {path: Path(path).read_bytes() for path in before} == before


def test_a_disk_that_is_full_while_timing(desk: Desk, run: Run, small_disk: Path, behave: Callable[..., None]) -> None:
    before = finished_first(run, small_disk)
    behave(medium="sys.stdout.write('x' * (1 << 20)); sys.stdout.flush()")
    ended = run("--model", "small,medium", *FORWARD, "--profiler", "none", "--output-dir", small_disk, "--resume")
    check_full(ended, small_disk, before)
    assert {path.name for path in small_disk.iterdir()} >= {SMALL, "timings.csv", ".lock"}
    assert not [path for path in small_disk.iterdir() if "medium" in path.name]
    behave()
    ended = run("--model", "small,medium", *FORWARD, "--profiler", "none", "--output-dir", small_disk, "--resume")
    assert ended.code == 0, ended.err
    assert desk.ran() == ["small timed", "medium timed", "medium timed"]


@pytest.mark.parametrize("step", ["after", "export"])
def test_a_disk_that_is_full_while_profiling(
    step: str, desk: Desk, run: Run, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = finished_first(run, small_disk)
    big = {
        "after": 'head -c 2000000 /dev/zero > "$output.nsys-rep"; code=1',
        "export": 'head -c 2000000 /dev/zero > "$output"; exit 1',
    }
    monkeypatch.setenv("NSYS", str(make_recording_nsys(tmp_path, **{step: big[step]})))
    words = ("--model", "medium", *FORWARD, "--profiler", "nsys", "--output-dir", small_disk)
    ended = run(*words)
    # A half export goes away, and leaves room to say what happened; a half report stays until the end.
    if step == "export":
        assert ended.code == 1
        said = json.loads((small_disk / MEDIUM / "manifest.json").read_text())
        assert (said["status"], said["timings"]["status"]) == ("failed", "ok")
        assert not (small_disk / MEDIUM / "capture.sqlite").exists()
        assert (small_disk / SMALL / "manifest.json").read_bytes() == before[str(small_disk / SMALL / "manifest.json")]
    else:
        check_full(ended, small_disk, before)
        assert not [path for path in small_disk.iterdir() if "medium" in path.name]
    assert desk.ran() == ["small timed", "medium timed", "medium profiled"]


def test_a_disk_that_is_full_when_the_timings_are_written(
    run: Run, desk: Desk, small_disk: Path, behave: Callable[..., None]
) -> None:
    before = finished_first(run, small_disk)
    filler = small_disk / "filler"
    # the manifest takes the page that the results had
    behave(medium="write(); write = lambda: None\n" + FILL.format(path=str(filler)))
    words = ("--model", "small,medium", *FORWARD, "--profiler", "none", "--output-dir", small_disk)
    check_full(run(*words, "--resume"), small_disk, before)
    assert json.loads((small_disk / MEDIUM / "manifest.json").read_text())["status"] == "ok"
    assert not [path for path in small_disk.iterdir() if "timings-export" in path.name]
    filler.unlink()
    assert run(*words, "--resume").code == 0
    assert desk.ran() == ["small timed", "medium timed"]
    assert MEDIUM in (small_disk / "timings.csv").read_text()


@pytest.mark.parametrize("below", ["a file", "/proc", "a file system that is read-only"])
def test_an_output_folder_that_cannot_be_written(
    below: str, desk: Desk, run: Run, request: pytest.FixtureRequest
) -> None:
    if below == "a file":
        (desk.folder / "file").touch()
        folder, reason = Path("file/runs"), "Not a directory"
    elif below == "/proc":
        folder, reason = Path("/proc/runs"), "No such file or directory"
    else:
        folder, reason = request.getfixturevalue("small_disk"), "Read-only file system"
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    error = error_of(run("--model", "small", *FORWARD, "--profiler", "none", "--output-dir", folder))
    assert error.startswith(f"Error: {folder}")
    assert f"cannot be written ({reason})." in error
    assert desk.ran() == []


# --- interrupts, and two at once ---

WORDS = ("--model", "small,medium,large", *FORWARD, "--profiler", "none")
SLOW = json.dumps({"medium": "time.sleep(600)"})


def at_medium(desk: Desk) -> bool:
    log = desk.runs / f".{MEDIUM}.part/target.log"
    return log.is_file() and log.read_text() == "at work\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupt_in_the_middle(number: signal.Signals, desk: Desk, run: Run) -> None:
    sweep = desk.start(*WORDS, BEHAVIOUR=SLOW)
    wait_for(lambda: at_medium(desk))
    sweep.send_signal(number)
    out, err = sweep.communicate(timeout=120)
    assert (sweep.returncode, out) == (130, ""), err
    assert err.splitlines()[-1].startswith("Interrupted")
    assert "--resume" in err.splitlines()[-1]
    assert desk.left() == {SMALL, "timings.csv", ".lock"}
    assert all(gone(pid) for pid in desk.pids())
    assert {row[0] for row in desk.timings()} == {SMALL}
    resumed = run(*WORDS, "--resume")
    assert resumed.code == 0, resumed.err
    assert "1 of 3 configurations" in resumed.out
    assert desk.ran() == ["small timed", "medium timed", "medium timed", "large timed"]
    assert {row[0] for row in desk.timings()} == {SMALL, MEDIUM, LARGE}


def test_a_second_interrupt_kills_what_does_not_listen(desk: Desk) -> None:
    said = "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); print('deaf', flush=True)"
    deaf = f"import signal; {said}\nwhile True: time.sleep(1)"
    sweep = desk.start(*WORDS, BEHAVIOUR=json.dumps({"small": deaf}), GRACE_S="600")
    log = desk.runs / f".{SMALL}.part/target.log"
    wait_for(lambda: log.is_file() and "deaf" in log.read_text())
    sweep.send_signal(signal.SIGINT)
    wait_for(lambda: "asked" in log.read_text())
    assert sweep.poll() is None  # it waits for the target to end, for ten minutes here
    sweep.send_signal(signal.SIGINT)
    sweep.communicate(timeout=120)
    assert sweep.returncode == 130
    assert all(gone(pid) for pid in desk.pids())
    assert SMALL not in desk.left()


def test_killed_in_the_middle(desk: Desk, run: Run) -> None:
    sweep = desk.start(*WORDS, BEHAVIOUR=SLOW)
    wait_for(lambda: at_medium(desk))
    sweep.kill()
    sweep.communicate(timeout=120)
    assert gone(desk.pids()[-1])
    assert f".{MEDIUM}.part" in desk.left()
    assert run(*WORDS, "--resume").code == 0
    assert desk.left() == {SMALL, MEDIUM, LARGE, "timings.csv", "report.md", ".lock"}
    assert desk.ran() == ["small timed", "medium timed", "medium timed", "large timed"]


def test_a_lock_of_somebody_else(desk: Desk, run: Run) -> None:
    desk.runs.mkdir()
    (desk.runs / ".lock").write_text("12 34")
    assert "runs/.lock was not written by a sweep, and would be replaced" in error_of(run(*WORDS))
    assert (desk.runs / ".lock").read_text() == "12 34"
    (desk.runs / ".lock").unlink()
    (desk.runs / ".lock").symlink_to("/dev/null")
    assert "runs/.lock is a pipe or a device" in error_of(run(*WORDS))
    assert desk.ran() == []


@pytest.mark.usefixtures("nsys")
def test_an_output_folder_that_is_called_like_an_option(desk: Desk, run: Run) -> None:
    place = desk.folder / "--output=evil"
    ended = run("--model", "small", *FORWARD, "--profiler", "nsys", "--output-dir=--output=evil")
    assert ended.code == 0, ended.err
    assert (place / SMALL / "capture.sqlite").is_file()
    assert {path.name for path in desk.folder.iterdir()} == {"profiling_targets", "ran", place.name}
    error = error_of(run("--profiler", "nsys", "--", "--output=evil.nsys-rep"))
    assert "'--output=evil.nsys-rep' looks like an option" in error

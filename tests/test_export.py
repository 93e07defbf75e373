from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from nsys_analyzer.errors import ExportError, NoSpaceError
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.facts import say, say_all
from nsys_analyzer.text import plain
from nsys_analyzer.trace import nsys_report
from nsys_analyzer.trace.nsys_report import ensure_export
from tests.support.export import GEMM, Export

# Writes a line per call, then does as told; the export holds the report's own bytes, so that a test can tell
# which report it was made from.
FAKE_NSYS = """#!{python}
import os, sqlite3, sys
here = os.path.dirname(os.path.abspath(__file__))
if sys.argv[1:] == ["--version"]:
    print("NVIDIA Nsight Systems version 2022.4.2.1-df9881f")
    sys.exit()
assert sys.argv[1:6] == ["export", "--type", "sqlite", "--force-overwrite", "true"], sys.argv
assert sys.argv[6] == "--output", sys.argv
output, report = sys.argv[7:]
with open(os.path.join(here, "calls"), "a") as calls:
    calls.write(report + "\\n")
database = sqlite3.connect(output)
database.execute("CREATE TABLE made_from (report BLOB)")
database.execute("INSERT INTO made_from VALUES (?)", [open(report, "rb").read()])
database.commit()
database.close()
{behaviour}
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "captures" / "run.nsys-rep"
    path.parent.mkdir()
    path.write_bytes(b"first capture")
    return path


@pytest.fixture
def fake_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    def install(behaviour: str = "") -> Path:
        nsys = tmp_path / "fake" / "nsys"
        nsys.parent.mkdir(exist_ok=True)
        nsys.write_text(FAKE_NSYS.format(python=sys.executable, behaviour=behaviour))
        nsys.chmod(0o755)
        monkeypatch.setenv("NSYS", str(nsys))
        return nsys

    return install


def calls_of(nsys: Path) -> int:
    log = nsys.with_name("calls")
    return len(log.read_text().splitlines()) if log.exists() else 0


def made_from(sqlite: Path) -> bytes:
    with closing(sqlite3.connect(sqlite)) as database:
        (content,) = database.execute("SELECT report FROM made_from").fetchone()
    assert isinstance(content, bytes)
    return content


def has_ended(process: int) -> bool:
    """Whether it is gone, or only waits for its parent to ask; a moment later, where it is not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    time.sleep(0.05)
    return state in "ZX"


def age(path: Path, seconds: int) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - seconds * 10**9))


def test_exports_beside_the_report(report: Path, fake_nsys: Callable[..., Path]) -> None:
    nsys = fake_nsys()
    report = report.rename(report.with_name("run.v2.nsys-rep"))
    sqlite = report.with_name("run.v2.sqlite")
    assert ensure_export(report) == sqlite
    assert made_from(sqlite) == b"first capture"
    modified = report.stat().st_mtime_ns
    os.utime(sqlite, ns=(modified, modified))  # as old as the report: it is still its own
    assert ensure_export(report) == sqlite
    assert calls_of(nsys) == 1


def test_an_older_export_is_made_again(report: Path, fake_nsys: Callable[..., Path]) -> None:
    nsys = fake_nsys()
    sqlite = ensure_export(report)
    report.write_bytes(b"second capture")
    age(sqlite, seconds=3600)
    assert ensure_export(report) == sqlite
    assert made_from(sqlite) == b"second capture"
    assert calls_of(nsys) == 2


@pytest.mark.parametrize("content", [b"", b"SQLite form", b"no database at all"])
def test_a_file_that_is_no_database_is_made_again(content: bytes, report: Path, fake_nsys: Callable[..., Path]) -> None:
    fake_nsys()
    report.with_suffix(".sqlite").write_bytes(content)
    assert made_from(ensure_export(report)) == b"first capture"


def test_a_fresh_export_needs_no_nsys(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_report, "find_nsys", lambda: None)
    with closing(sqlite3.connect(report.with_suffix(".sqlite"))) as database:
        database.execute("CREATE TABLE anything (x)")
    assert ensure_export(report) == report.with_suffix(".sqlite")


def test_a_folder_that_cannot_be_written(
    report: Path, fake_nsys: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nsys()

    def refuse(**_: object) -> str:  # root writes where the mode forbids it
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(ExportError, match=r"cannot be written: .*Export it to another folder: nsys export"):
        ensure_export(report)


def test_no_nsys(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_report, "find_nsys", lambda: None)
    with pytest.raises(ExportError) as caught:
        ensure_export(report)
    assert caught.value.message == f"{report} must be exported to SQLite first, and there is no nsys here"
    assert caught.value.hint == (
        "Install Nsight Systems, or export on the machine that has it: nsys export --type sqlite run.nsys-rep"
    )


def test_no_nsys_and_an_old_export(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_report, "find_nsys", lambda: None)
    sqlite = report.with_suffix(".sqlite")
    with closing(sqlite3.connect(sqlite)) as database:
        database.execute("CREATE TABLE anything (x)")
    age(sqlite, seconds=3600)
    assert ensure_export(report) == sqlite


def test_a_capture_whose_report_is_newer_is_read_with_a_warning(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_report, "find_nsys", lambda: None)
    age(Export().kernel(GEMM, 0, 1_000, 5_000).write(report.with_suffix(".sqlite")), seconds=3600)
    for named in (report, report.parent):
        (capture,) = gather([named]).captures
        assert capture.status == "ok"
        assert plain(say(capture.warnings[0])).startswith("run.sqlite is older than run.nsys-rep, and there is no nsys")
    age(report, seconds=7200)  # now the export is the newer one
    (capture,) = gather([report]).captures
    assert not any("older" in plain(warning) for warning in say_all(capture.warnings))


FAILURES = {
    # As the real ones print it, progress bars included.
    "disk": (
        r'sys.stderr.write("\rExporting 93 events: [=6%  ]\rExporting 93 events: [=7%  ]\n'
        r'Exportation error: unable to open database file\n"); sys.exit(1)',
        "nsys export failed: Exportation error: unable to open database file. Run it yourself: nsys export",
    ),
    "silent": ("sys.exit(3)", "nsys export failed: exit status 3"),
    "stdout only": ('print("no licence"); sys.exit(1)', "nsys export failed: no licence"),
    "no output": ("os.remove(output)", "nsys export failed: exit status 0"),
    "other output": ('open(output, "w").write("text")', "nsys export failed: exit status 0"),
    "not a report": (
        'sys.exit("Exportation error: Version tag is not found in the stream.")',
        "is not an Nsight Systems report, or only a part of one: Exportation error: Version tag is not found",
    ),
    "signal": ("os.kill(os.getpid(), 9)", "nsys export failed: exit status -9"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_export_leaves_nothing(failure: str, report: Path, fake_nsys: Callable[..., Path]) -> None:
    behaviour, message = FAILURES[failure]
    fake_nsys(behaviour)
    with pytest.raises(ExportError) as caught:
        ensure_export(report)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in report.parent.iterdir()] == ["run.nsys-rep"]


def test_an_export_that_hangs_is_stopped_with_what_it_started(report: Path, fake_nsys: Callable[..., Path]) -> None:
    nsys = fake_nsys(
        'import subprocess; child = subprocess.Popen(["sleep", "60"])\n'
        'open(os.path.join(here, "child"), "w").write(str(child.pid)); child.wait()'
    )
    with pytest.raises(ExportError, match=r"nsys export of .*run\.nsys-rep was stopped after 1 s") as caught:
        ensure_export(report, timeout_s=1)
    assert f"nsys export --type sqlite {report}" in caught.value.hint
    assert calls_of(nsys) == 1
    assert [path.name for path in report.parent.iterdir()] == ["run.nsys-rep"]
    child = int(nsys.with_name("child").read_text())
    assert any(has_ended(child) for _ in range(100))


def test_a_report_newer_than_nsys(report: Path, fake_nsys: Callable[..., Path]) -> None:
    nsys = fake_nsys('sys.exit("Exportation error: Version number is invalid: 2023@4@4@54-234433681190v0")')
    report.write_bytes(b"NVIDIA Tegra Profiler Report 2023@4@4@54-234433681190v0.\n\x0bLocal (CLI)")
    with pytest.raises(ExportError) as caught:
        ensure_export(report)
    assert caught.value.message == (
        f"{report} was recorded with Nsight Systems 2023.4.4.54, and {nsys} is 2022.4.2.1: too old to read it"
    )
    assert caught.value.hint.endswith("nsys export --type sqlite run.nsys-rep")


def test_an_nsys_that_cannot_run(report: Path, fake_nsys: Callable[..., Path]) -> None:
    nsys = fake_nsys()
    nsys.write_text("#!/no/such/interpreter\n")
    with pytest.raises(ExportError, match="cannot be run"):
        ensure_export(report)


def test_an_empty_report(report: Path, fake_nsys: Callable[..., Path]) -> None:
    nsys = fake_nsys()
    report.write_bytes(b"")
    with pytest.raises(ExportError, match="is empty"):
        ensure_export(report)
    assert calls_of(nsys) == 0


@pytest.mark.parametrize("name", ["absent.nsys-rep", "folder.nsys-rep"])
def test_a_report_that_is_no_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.nsys-rep").mkdir()
    with pytest.raises(ExportError, match="does not exist or is not a file"):
        ensure_export(tmp_path / name)


@pytest.mark.parametrize("said", ["database or disk is full", ""])
def test_a_full_disk(said: str, report: Path, fake_nsys: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """nsys says so in words of its own, or in none."""
    fake_nsys(f"sys.exit({said!r} or 1)")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: usage)
    with pytest.raises(
        NoSpaceError, match=r"run\.sqlite cannot be written \(No space left on device\): 1,000\sB are free"
    ):
        ensure_export(report)
    assert [path.name for path in report.parent.iterdir()] == ["run.nsys-rep"]

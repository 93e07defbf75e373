from __future__ import annotations

from pathlib import Path

import pytest

from nsys_analyzer.capture.nsys import ProfileOptions, find_or_import_report, make_profile_command
from nsys_analyzer.errors import CaptureError, CountersRefusedError, NsysAnalyzerError
from nsys_analyzer.system.machine import Nsys
from tests.test_nsys import make_command

PROGRAM = ("python", "train.py", "--steps", "3")


IMPORTER = "host-linux-x64/QdstrmImporter"


def make_nsys(folder: Path, version: str = "2022.4.2.1") -> Nsys:
    """A fake that says its version."""
    script = f'echo "NVIDIA Nsight Systems version {version}-df9881f"'
    return Nsys(make_command(folder / "target-linux-x64/nsys", script), version)


def test_the_usual_command(tmp_path: Path) -> None:
    nsys = make_nsys(tmp_path)
    assert make_profile_command(nsys, tmp_path / "2.7B_ctx256.nsys-rep", PROGRAM, ProfileOptions()) == [
        str(nsys.path), "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--cuda-graph-trace=node",
        "--force-overwrite=true", f"--output={tmp_path}/2.7B_ctx256", *PROGRAM,
    ]  # fmt: skip


def test_everything_asked_for(tmp_path: Path) -> None:
    nsys = make_nsys(tmp_path)
    options = ProfileOptions(memory=True, extra=("--gpu-metrics-devices=all", "-b", "none"))
    command = make_profile_command(nsys, tmp_path / "capture.nsys-rep", PROGRAM, options)
    assert "--cuda-memory-usage=true" in command
    assert command[-7:] == ["--gpu-metrics-devices=all", "-b", "none", *PROGRAM]


def test_all_of_the_program_and_no_gpu(tmp_path: Path) -> None:
    options = ProfileOptions(capture_range=False, extra=("--trace=nvtx",))
    command = make_profile_command(make_nsys(tmp_path), tmp_path / "capture.nsys-rep", PROGRAM, options)
    assert not [word for word in command if word.startswith("--capture-range")]
    assert [word for word in command if word.startswith("--trace")] == ["--trace=nvtx"]


def test_an_option_of_the_user_takes_the_place_of_ours(tmp_path: Path) -> None:
    """The real nsys refuses an option that is given twice."""
    options = ProfileOptions(extra=("--capture-range=nvtx", "-s", "process-tree"))
    command = make_profile_command(make_nsys(tmp_path), tmp_path / "capture.nsys-rep", PROGRAM, options)
    assert "--sample=none" not in command
    assert "--capture-range=cudaProfilerApi" not in command
    assert "--capture-range-end=stop" in command


@pytest.mark.parametrize("option", ["-o", "--output=elsewhere"])
def test_the_output_is_ours(option: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="--output is set already"):
        make_profile_command(
            make_nsys(tmp_path), tmp_path / "capture.nsys-rep", PROGRAM, ProfileOptions(extra=(option,))
        )


# --- what a run left ---


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run, with its log."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "target.log").write_text("step 1\nstep 2\n")
    return folder


def finished(nsys: Nsys, run: Path) -> Path:
    return find_or_import_report(nsys, run / "capture.nsys-rep", run / "target.log")


def test_a_report(run: Path, tmp_path: Path) -> None:
    (run / "capture.nsys-rep").write_bytes(b"report")
    assert finished(make_nsys(tmp_path), run) == run / "capture.nsys-rep"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (  # what nsys prints before its usage
            "Illegal --gpu-metrics-devices argument: cuda-visible.\nInsufficient privilege, see "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM.\n\nusage: nsys profile [<args>]\n",
            "nsys may not sample the GPU's counters, because the driver allows this only to administrators",
        ),
        (
            "Illegal --gpu-metrics-devices arguments.\nNone of the installed GPUs are supported:\n",
            "nsys cannot sample the counters of this GPU",
        ),
    ],
)
def test_counters_that_cannot_be_sampled(output: str, message: str, run: Path, tmp_path: Path) -> None:
    (run / "target.log").write_text(output)
    with pytest.raises(CountersRefusedError) as refusal:
        finished(make_nsys(tmp_path), run)
    assert refusal.value.message == message
    assert "\n" not in str(refusal.value)


COPY = 'test "$1 $3" = "-i -o" && cp "$2" "$4"'


def test_a_bare_stream_is_imported(run: Path, tmp_path: Path) -> None:
    make_command(tmp_path / IMPORTER, COPY)
    (run / "capture.qdstrm").write_bytes(b"stream")
    (run / "capture.nsys-rep").write_bytes(b"half of an import that failed")
    assert finished(make_nsys(tmp_path), run).read_bytes() == b"stream"
    assert sorted(path.name for path in run.iterdir()) == ["capture.nsys-rep", "target.log"]


def test_an_import_that_hangs_is_stopped(run: Path, tmp_path: Path) -> None:
    make_command(tmp_path / IMPORTER, "sleep 60")
    (run / "capture.qdstrm").write_bytes(b"stream")
    with pytest.raises(CaptureError, match=r"The import of .*qdstrm was stopped after 0\.2 s") as caught:
        find_or_import_report(make_nsys(tmp_path), run / "capture.nsys-rep", run / "target.log", timeout_s=0.2)
    assert caught.value.hint.endswith(f"QdstrmImporter -i {run}/capture.qdstrm")
    assert sorted(path.name for path in run.iterdir()) == ["capture.qdstrm", "target.log"]


def test_an_importer_that_is_no_program(run: Path, tmp_path: Path) -> None:
    make_command(tmp_path / IMPORTER, "").write_text("#!/no/such/interpreter\n")
    (run / "capture.qdstrm").write_bytes(b"stream")
    with pytest.raises(CaptureError, match="QdstrmImporter cannot be run"):
        finished(make_nsys(tmp_path), run)


def test_no_importer(run: Path, tmp_path: Path) -> None:
    nsys = make_nsys(tmp_path)
    (run / "capture.qdstrm").write_bytes(b"stream")
    with pytest.raises(CaptureError) as caught:
        finished(nsys, run)
    assert caught.value.message == (
        f"{nsys.path} wrote {run}/capture.qdstrm, but its importer (QdstrmImporter) is not installed here"
    )
    assert "QdstrmImporter -i capture.qdstrm" in caught.value.hint
    assert (run / "capture.qdstrm").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'error while loading shared libraries: libdw.so.1' >&2; exit 127", "shared libraries: libdw.so.1"),
        ("echo 'File is corrupted.' >&2; exit 2", "cannot be imported: File is corrupted"),
        ("exit 0", "cannot be imported: exit status 0"),
        (f"{COPY}; exit 139", "cannot be imported: exit status 139"),
    ],
)
def test_an_import_that_fails_leaves_the_stream_alone(script: str, said: str, run: Path, tmp_path: Path) -> None:
    make_command(tmp_path / IMPORTER, script)
    (run / "capture.qdstrm").write_bytes(b"stream")
    with pytest.raises(CaptureError) as caught:
        finished(make_nsys(tmp_path), run)
    assert said in str(caught.value)
    assert sorted(path.name for path in run.iterdir()) == ["capture.qdstrm", "target.log"]


@pytest.mark.parametrize(
    "said",
    [
        "Generated:\n\tNo reports were generated\n",
        # as 2022 and 2023 print it
        "Importer error status: The importer binary and its dependencies were not found.\n"
        "Unable to retrieve the importer version: skipping importation of the QDSTRM file.\nGenerated:\n",
        "Generated:\n",
    ],
)
def test_nothing_recorded(said: str, run: Path, tmp_path: Path) -> None:
    log = run / "target.log"
    log.write_text(f"{log.read_text()}{said}")
    with pytest.raises(CaptureError, match="no capture range was opened") as caught:
        finished(make_nsys(tmp_path), run)
    assert "mporter" not in caught.value.message
    assert "torch.cuda.profiler.start()" in caught.value.hint


def test_no_report_for_another_reason(run: Path, tmp_path: Path) -> None:
    (run / "capture.nsys-rep").touch()
    with pytest.raises(CaptureError, match=r"nsys wrote no report: step 1 \| step 2\. Read its output: .*target\.log"):
        finished(make_nsys(tmp_path), run)
    (run / "target.log").unlink()
    with pytest.raises(CaptureError, match="it printed nothing"):
        finished(make_nsys(tmp_path), run)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ([], r"The disk of {run} is full\. Free some space"),
        (
            ["capture.qdstrm"],
            r"{run}/capture\.nsys-rep cannot be written \(No space left on device\)",
        ),
    ],
)
def test_a_full_disk(left: list[str], said: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real importer dies there of a "ProtobufSerializeException", and nsys itself says nothing."""
    make_command(tmp_path / IMPORTER, "echo 'ProtobufSerializeException' >&2; exit 2")
    for name in left:
        (run / name).write_bytes(b"stream")
    usage = type("Usage", (), {"free": (1 << 20) - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: usage)
    with pytest.raises(NsysAnalyzerError, match=said.format(run=run)):
        finished(make_nsys(tmp_path), run)

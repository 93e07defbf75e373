"""Tests odd environments and values: each ends in a report or one line of error, and none leaves its folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner

from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import ConfigurationError, NsysAnalyzerError
from nsys_analyzer.export import FORMATS
from nsys_analyzer.inputs.manifest import ManifestError, find_untraced_manifests, read_manifest
from nsys_analyzer.inputs.unprofiled_times import write_timings
from nsys_analyzer.report.writing import name_figure_files
from nsys_analyzer.system.strict_json import decode_json
from nsys_analyzer.trace.trace import Trace
from tests.support.export import Export, training_step

ROOT = Path(__file__).parents[1]
BENCHES = ROOT / "examples/benches"


def nsys_analyze(*words: str | bytes, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "nsys_analyzer", *words]
    kept = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME")}
    return subprocess.run(
        command, cwd=folder, env={**kept, "PYTHONPATH": str(ROOT), **environment}, capture_output=True
    )


@pytest.mark.parametrize(
    "words",
    [
        ("report", "--no-figures", "-o", os.fsdecode(b"r\xe9.md")),
        ("report", "--format", "json"),
        ("kernels",),
        ("info",),
        ("share",),
        *(("export", "--format", form) for form in FORMATS),
    ],
)
def test_a_path_that_is_no_text(tmp_path: Path, words: tuple[str, ...]) -> None:
    name = b"caf\xe9.sqlite"
    training_step(Export().gpu()).write(tmp_path / "t.sqlite").rename(tmp_path / os.fsdecode(name))
    where = ("-o", os.fsdecode(b"r\xe9.sqlite")) if words == ("share",) else ()
    ended = nsys_analyze(words[0], name, *words[1:], *where, folder=tmp_path, HOME=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert b"Traceback" not in ended.stderr
    if "-o" in (*words, *where):
        assert any(b"r\xe9" in written for written in os.listdir(os.fsencode(tmp_path)))  # noqa: PTH208  # as bytes


def test_the_manifest_that_timings_alone_are_read_with_stays(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    training_step(Export().gpu()).write(folder / "a.sqlite")
    (folder / "a.manifest.json").write_text('{"model": "small"}', encoding="utf-8")
    (folder / "timings.csv").write_text("model,phase,mean_ms\nsmall,forward,1\n", encoding="utf-8")
    words = ["report", "--csv", str(folder / "timings.csv"), "-o", str(folder / "a.manifest.json"), "--format", "json"]
    with pytest.raises(NsysAnalyzerError, match="which is read"):
        CliRunner().invoke(cli, [*words, "--force"], catch_exceptions=False)
    assert (folder / "a.manifest.json").read_text(encoding="utf-8") == '{"model": "small"}'


def test_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME unset, and a user whom the system does not know: as in a container that runs under any number."""

    def unknown(number: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    trace = tmp_path / "t.json.gz"
    shutil.copyfile(ROOT / "tests/data/cpu_train.pt.trace.json.gz", trace)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert len(Trace.load(trace).operations) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["t.json.gz"]


def test_a_closed_standard_output_is_one_line(tmp_path: Path) -> None:
    training_step(Export().gpu()).write(tmp_path / "t.sqlite")
    command = f"{sys.executable} -m nsys_analyzer kernels t.sqlite --format csv >&-"
    ended = subprocess.run(
        command, shell=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr == "Error: Standard output is closed. Send it to a file or to /dev/null\n"


@pytest.mark.parametrize(
    "text",
    [
        '{"model": "\\ud800"}',
        "[" * 100_000,
        '{"batch_size": NaN}',
        '{"batch_size": 1e400}',
        "\ufeff{",
        '{"a": Infinity}',
    ],
)
def test_json_that_nothing_could_keep_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(ManifestError, match="not JSON"):
        read_manifest(tmp_path / "manifest.json")


def test_a_byte_order_mark_is_no_part_of_json() -> None:
    assert decode_json(b"\xef\xbb\xbf[1]") == [1]


def test_a_manifest_of_an_impossible_size(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"context_length": 2**54}), encoding="utf-8")
    with pytest.raises(ManifestError, match="context_length is"):
        read_manifest(tmp_path / "manifest.json")


@pytest.mark.parametrize("timings", [7, [], {"status": "ok"}, {"status": "ok", "times_ms": {"forward": []}}])
def test_timings_of_a_manifest_that_no_sweep_wrote(tmp_path: Path, timings: object) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/manifest.json").write_text(json.dumps({"timings": timings}), encoding="utf-8")
    if not timings:
        assert write_timings(tmp_path).is_file()
        return
    with pytest.raises(ConfigurationError, match=r"one/manifest\.json: its timings were not written by a sweep"):
        write_timings(tmp_path)


def test_a_capture_outside_its_folder_is_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "other.nsys-rep").write_bytes(b"")
    (tmp_path / "run").mkdir()
    values = {"status": "oom", "capture": "../other.nsys-rep"}
    (tmp_path / "run/manifest.json").write_text(json.dumps(values), encoding="utf-8")
    assert len(find_untraced_manifests(tmp_path / "run")) == 1


def test_names_of_figures_stay_in_their_folder() -> None:
    keys = ["train-phase-times", "../../x", "a/b", "a:b", "é" * 500, "...", "2.7b--2-top"]
    names = name_figure_files(keys)
    assert names["train-phase-times"] == "train-phase-times.png"
    assert names["2.7b--2-top"] == "2.7b--2-top.png"
    assert names["../../x"] == "x.png"
    assert {names["a/b"], names["a:b"]} == {"a-b.png", "a-b--2.png"}
    assert names["..."] == "figure.png"
    assert all("/" not in name and len(name) < 130 for name in names.values())

import json
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize, find_model
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.inputs.manifest import (
    ManifestError,
    configuration_of,
    find_manifest,
    find_untraced_manifests,
    read_manifest,
)
from tests.support.commands import make_command_test

SMALL = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 10_000}


def write(path: Path, **values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema_version": 1, **values}), encoding="utf-8")
    return path


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_what_a_run_says_of_itself(tmp_path: Path) -> None:
    """False, 0 and a negative seed are values like others; a key that readers ignore may hold anything."""
    values = {
        "device": "cpu", "profiler": "torch", "compile": False, "cuda_graph": True, "seed": -1,
        "python": "3.11.2", "torch": "2.13.0", "cuda": "13.0", "driver": "580.1", "nsys": "2025.3.2",
        "host_cpu": "a CPU", "git_commit": "abc", "git_dirty": True, "peak_memory_bytes": 0, "warmup_steps": 0,
        "steps": 3, "gpu": "Some GPU", "command": "python train.py", "capture": "small.nsys-rep",
    }  # fmt: skip
    asked = {"model": "small", "context_length": 256, "batch_size": 4, "precision": "bfloat16", "mode": "train"}
    more = {"message": None, "a_key_of_tomorrow": [1, 2], "timings": [{"phase": "forward"}]}
    path = write(tmp_path / "manifest.json", **values, **asked, **SMALL, attention="sdpa", **more)
    manifest = read_manifest(path)
    assert {key: getattr(manifest, key) for key in values} == values
    assert configuration_of(manifest) == Configuration(find_model("small"), 256, 4, "bf16", "train", "sdpa", "manifest")


def test_everything_is_optional(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text("\ufeff{}", encoding="utf-8")
    manifest = read_manifest(path)
    assert manifest.status == "ok"
    assert configuration_of(manifest) == Configuration(source="manifest")


def test_model_by_dimensions_or_name(tmp_path: Path) -> None:
    tiny = {"d_model": 64, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    for values, model in (
        (SMALL, find_model("small")),
        ({"model": "2_7b", "d_model": 2560}, find_model("2.7B")),
        ({"model": "tiny", **tiny}, ModelSize("tiny", 64, 256, 2, 4, 50)),
    ):
        assert configuration_of(read_manifest(write(tmp_path / "manifest.json", **values))).model == model


def error_of_manifest(_: object) -> str:
    """How manifest.json is refused, with a hint."""
    path = Path("manifest.json")
    with pytest.raises(ManifestError) as error:
        read_manifest(path)
    assert isinstance(error.value, NsysAnalyzerError)
    assert str(path) in error.value.message
    assert error.value.hint
    return str(error.value)


test_malformed = make_command_test("manifests", figures={"error": error_of_manifest})


def test_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(tmp_path / "manifest.json")
    binary = tmp_path / "x.manifest.json"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ManifestError, match="not JSON"):
        read_manifest(binary)


def test_own_manifest_comes_first(tmp_path: Path) -> None:
    trace = tmp_path / "2.7B_ctx256.nsys-rep"
    touch(trace, tmp_path / "other.sqlite")
    write(tmp_path / "manifest.json", context_length=128, capture=trace.name)
    write(tmp_path / "2.7B_ctx256.manifest.json", context_length=256)
    manifest = find_manifest(trace)
    assert manifest
    assert manifest.context_length == 256


@pytest.mark.parametrize(
    ("files", "manifest", "belongs_to"),
    [
        ("a.nsys-rep a.sqlite report.json", {"steps": 3}, "a.nsys-rep a.sqlite"),  # the only trace, and its export
        ("a.nsys-rep b.sqlite", {"steps": 3}, ""),
        ("a.nsys-rep b.sqlite", {"capture": "a.nsys-rep"}, "a.nsys-rep a.sqlite"),
        ("a.nsys-rep 2.7B_x.json.gz", {"capture": "2.7B_x"}, "2.7B_x.json.gz"),
        ("a.sqlite", None, ""),
    ],
)
def test_the_manifest_of_a_folder(tmp_path: Path, files: str, manifest: dict[str, Any] | None, belongs_to: str) -> None:
    touch(*(tmp_path / name for name in files.split()))
    if manifest is not None:
        write(tmp_path / "manifest.json", **manifest)
    traces = {*files.split(), *belongs_to.split()} - {"report.json"}
    assert {name for name in traces if find_manifest(tmp_path / name)} == set(belongs_to.split())


def left(folder: Path) -> list[tuple[str, str]]:
    """The manifests of runs that left no trace, with their status or what is wrong with them."""
    manifests = find_untraced_manifests(folder).items()
    return [
        (str(path.relative_to(folder)), run.status if isinstance(run, Run) else run.message) for path, run in manifests
    ]


def test_manifests_without_trace(tmp_path: Path) -> None:
    """In the folder and one level below, in order; what is hidden or deeper is not looked at."""
    touch(tmp_path / "small/run.nsys-rep", tmp_path / "deep/er/x", tmp_path / ".hidden/x")
    write(tmp_path / "small/manifest.json", model="small")
    for name in ("xl/manifest.json", "deep/er/manifest.json", ".hidden/manifest.json", "flat.manifest.json"):
        write(tmp_path / name, status="oom")
    assert left(tmp_path) == [("flat.manifest.json", "oom"), ("xl/manifest.json", "oom")]
    assert left(tmp_path / "nowhere") == []


def test_manifests_with_a_trace_by_name(tmp_path: Path) -> None:
    touch(tmp_path / "a.sqlite", tmp_path / "b.sqlite", tmp_path / "c.json")
    write(tmp_path / "a.manifest.json")
    write(tmp_path / "c.manifest.json")
    write(tmp_path / "gone.manifest.json", status="failed")
    write(tmp_path / "manifest.json", capture="b.nsys-rep")
    assert left(tmp_path) == [("gone.manifest.json", "failed")]
    write(tmp_path / "manifest.json", capture="d.nsys-rep", status="oom")
    assert left(tmp_path) == [("gone.manifest.json", "failed"), ("manifest.json", "oom")]


def test_a_malformed_one_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    write(tmp_path / "xl/manifest.json", status="oom")
    (name, said), other = left(tmp_path)
    assert name == "manifest.json"
    assert "not JSON" in said
    assert other == ("xl/manifest.json", "oom")
    touch(tmp_path / "a.sqlite")  # its own row says what is wrong with the folder's manifest
    assert left(tmp_path) == [other]


@pytest.mark.parametrize("text", ['{"name": "a web application", "icons": []}', '["model-00001.safetensors"]'])
def test_a_manifest_of_another_program_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text(text, encoding="utf-8")
    assert not find_untraced_manifests(tmp_path)

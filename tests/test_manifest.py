import json
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize, find_model
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.runs.manifest import (
    ManifestError,
    configuration_of,
    find_manifest,
    manifests_without_trace,
    read_manifest,
)

SMALL = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 10_000}


def write(path: Path, **values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema_version": 1, **values}), encoding="utf-8")
    return path


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def model_in(path: Path) -> ModelSize | None:
    return configuration_of(read_manifest(path)).model


def test_full_manifest(tmp_path: Path) -> None:
    values = {
        "model": "small",
        **SMALL,
        "context_length": 256,
        "batch_size": 4,
        "precision": "bfloat16",
        "mode": "train",
        "attention": "sdpa",
        "status": "ok",
        "message": None,
        "warmup_steps": 0,
        "steps": 3,
        "gpu": "Some GPU",
        "command": "python train.py",
        "capture": "small.nsys-rep",
        "a_key_of_tomorrow": [1, 2],
    }
    manifest = read_manifest(write(tmp_path / "manifest.json", **values))
    assert manifest.warmup_steps == 0
    assert manifest.capture == "small.nsys-rep"
    assert configuration_of(manifest) == Configuration(find_model("small"), 256, 4, "bf16", "train", "sdpa", "manifest")


def test_everything_is_optional(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text("\ufeff{}", encoding="utf-8")
    manifest = read_manifest(path)
    assert manifest.status == "ok"
    assert configuration_of(manifest) == Configuration(source="manifest")


def test_what_a_run_says_of_itself(tmp_path: Path) -> None:
    """False, 0 and a negative seed are values like others; a key that readers ignore may hold anything."""
    values = {
        "device": "cpu", "profiler": "torch", "optimizer": "adamw", "compile": False, "cuda_graph": True, "seed": -1,
        "python": "3.11.2", "torch": "2.13.0", "cuda": "13.0", "driver": "580.1", "nsys": "2025.3.2",
        "host_cpu": "a CPU", "git_commit": "abc", "git_dirty": True, "peak_memory_bytes": 0,
    }  # fmt: skip
    manifest = read_manifest(write(tmp_path / "manifest.json", **values, timings=[{"phase": "forward"}]))
    assert {key: getattr(manifest, key) for key in values} == values


def test_model_by_dimensions_or_name(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    assert model_in(write(path, **SMALL)) == find_model("small")
    assert model_in(write(path, model="2_7b", d_model=2560)) == find_model("2.7B")
    tiny = {"d_model": 64, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    expected = ModelSize("tiny", 64, 256, 2, 4, 50)
    assert model_in(write(path, model="tiny", **tiny)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1]", "JSON list, not an object"),
        ('{"d_model": "wide"}', "d_model is 'wide': Expected `int"),
        ('{"batch_size": true}', "batch_size is True: Expected `int"),
        ('{"context_length": 256.5}', "context_length is 256.5: Expected `int"),
        ('{"context_length": 256.0}', "context_length is 256.0: Expected `int"),
        ('{"context_length": 1180591620717411303424}', "context_length is 1180591620717411303424: Expected `int`"),
        ('{"model": 7}', "model is 7: Expected `str"),
        ('{"context_length": 0}', "context_length is 0: Expected `int` >= 1"),
        ('{"status": "great"}', "status is 'great': .*ok.oom.failed.timeout"),
        ('{"status": "ok\\n"}', "status is 'ok"),
        ('{"compile": 1}', "compile is 1: Expected `bool"),
        ('{"peak_memory_bytes": -1}', "peak_memory_bytes is -1: Expected `int` >= 0"),
        ('{"schema_version": 2}', "schema version 2, this release reads 1. Upgrade"),
        ('{"model": "huge"}', "Unknown model 'huge'. Known models: small.*or give d_model"),
        ('{"d_model": 70, "d_ff": 9, "num_layers": 1, "num_heads": 3}', "70 is not a multiple of num_heads 3"),
    ],
)
def test_malformed(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ManifestError, match=message) as error:
        read_manifest(path)
    assert isinstance(error.value, NsysAnalyzerError)
    assert str(path) in error.value.message
    assert error.value.hint


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
    found = find_manifest(trace)
    assert found is not None
    assert found.context_length == 256


def test_shared_manifest_of_the_only_trace(tmp_path: Path) -> None:
    touch(tmp_path / "a.nsys-rep", tmp_path / "a.sqlite", tmp_path / "report.json")
    write(tmp_path / "manifest.json", steps=3)
    assert find_manifest(tmp_path / "a.nsys-rep") is not None
    assert find_manifest(tmp_path / "a.sqlite") is not None


def test_shared_manifest_of_several_traces(tmp_path: Path) -> None:
    touch(tmp_path / "a.nsys-rep", tmp_path / "b.sqlite", tmp_path / "2.7B_x.json.gz")
    write(tmp_path / "manifest.json", steps=3)
    assert find_manifest(tmp_path / "a.nsys-rep") is None
    write(tmp_path / "manifest.json", steps=3, capture="a.nsys-rep")
    assert find_manifest(tmp_path / "a.sqlite") is not None
    assert find_manifest(tmp_path / "b.sqlite") is None
    write(tmp_path / "manifest.json", steps=3, capture="2.7B_x")
    assert find_manifest(tmp_path / "2.7B_x.json.gz") is not None


def test_no_manifest(tmp_path: Path) -> None:
    touch(tmp_path / "a.sqlite")
    assert find_manifest(tmp_path / "a.sqlite") is None


def test_manifests_without_trace(tmp_path: Path) -> None:
    touch(tmp_path / "small" / "run.nsys-rep", tmp_path / "deep" / "er" / "x", tmp_path / ".hidden" / "x")
    write(tmp_path / "small" / "manifest.json", model="small")
    write(tmp_path / "xl" / "manifest.json", model="xl", status="oom", message="CUDA out of memory")
    write(tmp_path / "deep" / "er" / "manifest.json", status="oom")
    write(tmp_path / ".hidden" / "manifest.json", status="oom")
    write(tmp_path / "flat.manifest.json", model="large", status="oom")
    found = manifests_without_trace(tmp_path)
    runs = [run for run in found.values() if isinstance(run, Run)]
    assert [(run.model, run.status) for run in runs] == [("large", "oom"), ("xl", "oom")]
    assert runs[1].message == "CUDA out of memory"


def test_manifests_with_a_trace_by_name(tmp_path: Path) -> None:
    touch(tmp_path / "a.sqlite", tmp_path / "b.sqlite", tmp_path / "c.json")
    write(tmp_path / "a.manifest.json")
    write(tmp_path / "c.manifest.json")
    write(tmp_path / "gone.manifest.json", status="failed")
    write(tmp_path / "manifest.json", capture="b.nsys-rep")
    assert [path.name for path in manifests_without_trace(tmp_path)] == ["gone.manifest.json"]
    write(tmp_path / "manifest.json", capture="d.nsys-rep", status="oom")
    found = manifests_without_trace(tmp_path).values()
    assert [run.status for run in found if isinstance(run, Run)] == ["failed", "oom"]


def test_manifests_without_a_folder(tmp_path: Path) -> None:
    assert not manifests_without_trace(tmp_path / "nowhere")


def test_a_malformed_one_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    write(tmp_path / "xl" / "manifest.json", status="oom")
    broken, run = manifests_without_trace(tmp_path).items()
    assert broken[0] == tmp_path / "manifest.json"
    assert "not JSON" in str(broken[1])
    assert isinstance(run[1], Run)
    assert run[1].status == "oom"
    touch(tmp_path / "a.sqlite")  # its own row says what is wrong with the folder's manifest
    assert [path.parent.name for path in manifests_without_trace(tmp_path)] == ["xl"]


@pytest.mark.parametrize("text", ['{"name": "a web application", "icons": []}', '["model-00001.safetensors"]'])
def test_a_manifest_of_another_program_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text(text, encoding="utf-8")
    assert not manifests_without_trace(tmp_path)

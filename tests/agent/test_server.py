"""The server of ``nsys-analyze mcp``, driven by the client of the package mcp; without the extra these skip."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Main

RealCapture = Callable[[str], Path]
#: The tools that run nothing.
READING = ["explain", "ask", "figures", "check", "kernels", "modules", "compare", "what_if"]


def called(folder: Path, calls: Sequence[tuple[str, dict[str, Any]]], *options: str) -> tuple[list[str], list[Any]]:
    """The server's tools, and the answers to some calls: JSON, or the text of an error."""
    mcp = pytest.importorskip("mcp", reason="the extra agent is not installed: pip install 'nsys-analyze[agent]'")

    async def session() -> tuple[list[str], list[Any]]:
        words = ["-m", "nsys_analyzer", "mcp", str(folder), *options]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        async with mcp.Client(mcp.StdioServerParameters(command=sys.executable, args=words, env=env)) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            found = [await client.call_tool(name, arguments) for name, arguments in calls]
            texts = [(one.is_error, "".join(part.text for part in one.content)) for one in found]
            return names, [json.loads(text) if text[:1] in "[{" and not wrong else text for wrong, text in texts]

    return asyncio.run(session())


def test_an_agent_asks(real_capture: RealCapture) -> None:
    """Each tool that reads, over the protocol; the same figures as the commands print."""
    path = str(real_capture("train_small256"))
    before, after = (
        f"{ROOT}/examples/benches/compile/captures/small_ctx256_train_fp32{end}" for end in ("", "_compile")
    )
    names, (explained, asked, figures, claims, kernels, modules, what_if, few) = called(
        Path(path).parent,
        [
            ("explain", {"path": path, "budget": 900}),
            ("ask", {"path": path, "questions": ["gpu_busy_ms phase=forward", "step_unprofiled_ms"]}),
            ("figures", {}),
            ("check", {"path": path, "text": "gpu_busy_ms phase=forward = 9.0 ms"}),
            ("kernels", {"path": path, "phase": "forward", "kernel_class": "matmul", "top": 1}),
            ("modules", {"path": path}),
            ("what_if", {"path": path, "classes": {"matmul": 0.5}}),
            ("ask", {"path": path, "questions": ["gpu_busy phase=forward"]}),
        ],
    )
    assert names == READING
    assert len(json.dumps(explained, separators=(",", ":"))) <= 900
    assert explained["answers"][0]["figure"] == "step_estimated_ms"
    answer, abstained = asked["answers"]
    assert (answer["value"], answer["unit"]) == (9.04463, "ms")
    assert answer["evidence"] == {
        "capture": "train_small256.sqlite", "table": "CUPTI_ACTIVITY_KIND_KERNEL, _MEMSET", "rows": 2076
    }  # fmt: skip
    assert abstained["cannot_answer"]["needs"] == "nsys-analyze run -- python train.py"
    assert "gpu_busy_ms [phase=…]\n    ms: " in figures
    assert [one["holds"] for one in claims["claims"]] == [True]
    assert [(one["class"], one["launches"]) for one in kernels] == [("matmul", 84)]
    assert "nsys-analyze run --modules -- python train.py" in modules
    assert what_if["what_if"][0]["changes"] == ["matmul × 0.5"]
    assert "Did you mean gpu_busy_ms?" in few

    _, (compared,) = called(ROOT / "examples", [("compare", {"before": before, "after": after})])
    assert "Faster: a step takes" in compared
    assert len(compared) < 12_000


def test_it_reads_below_its_folders_alone(real_capture: RealCapture, tmp_path: Path) -> None:
    inside = tmp_path / "captures"
    inside.mkdir()
    (inside / "link.sqlite").symlink_to(real_capture("graph_small256"))
    outside = [inside.parent, inside / "..", inside / "link.sqlite", inside, Path("/etc/passwd")]
    _, answers = called(inside, [("ask", {"path": str(path), "questions": ["gpu"]}) for path in outside])
    assert all("lies outside of" in answer for answer in answers)


@pytest.mark.slow
def test_it_runs_programs_only_where_that_is_allowed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n", encoding="utf-8")
    arguments = {"program": [sys.executable, str(script)], "output_dir": str(tmp_path / "runs")}
    names, (refused,) = called(tmp_path, [("capture", arguments)])
    assert "capture" not in names
    assert "Unknown tool" in refused
    assert list(tmp_path.iterdir()) == [script]

    elsewhere = {**arguments, "output_dir": str(tmp_path.parent / "elsewhere")}
    calls = [("capture", arguments), ("capture", elsewhere), ("capture", {**arguments, "program": []})]
    names, (ran, kept_out, empty) = called(tmp_path, calls, "--allow-run")
    assert names == [*READING, "capture", "verify"]
    assert (tmp_path / "ran").exists()
    assert (tmp_path / "runs").is_dir()
    assert ran.startswith("Exit code ")
    assert "lies outside of" in kept_out
    assert "There is no program" in empty


def test_without_the_extra_it_says_how_to_install_it(run_main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    assert "pip install 'nsys-analyze[agent]'" in run_main("mcp").err

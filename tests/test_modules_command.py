"""``nsys-analyze modules`` and its section, from a capture to what is printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import Answer, Block, Listing, Paragraph, Table
from nsys_analyzer.report.sections.modules import modules_section
from nsys_analyzer.text import plain
from tests.conftest import Main
from tests.support.export import ADD, AUTOGRAD, GEMM, Export

RealSummary = Callable[[str], CaptureSummary]
MS = 1_000_000
NO_MODULES = "contains no range that names a module. Record one with: nsys-analyze run --modules -- python train.py\n"


def gpt(layers: tuple[int, ...] = (4, 4, 4, 7), *, backward: bool = True) -> Export:
    """One step of a model whose layers take so many ms in forward and, with ranges there, as many in backward.

    Besides, ``ln_f`` takes 1 ms, the loss 2 ms in no module, and backward 3 ms before the first module.
    """
    export, us = Export().thread(AUTOGRAD, "pt_autograd_0").gpu(), 1000
    at, end = 0, len(layers) * MS
    step = end + sum(layers) * 2 * MS + 20 * MS
    export.range("step", 0, step).range("forward", 0, end).range("nn.Module: GPT: GPT", us, end - us)
    gpu = 0
    for number, length in enumerate(layers):
        at = number * 100 * us + 10 * us
        export.range(f"nn.Module: GPT/h.{number}: Block", at, at + 90 * us)
        export.range(f"nn.Module: GPT/h.{number}.attn: Attention", at + 10 * us, at + 80 * us)
        gpu = max(gpu, at + 30 * us)
        export.kernel(GEMM, at + 20 * us, gpu, gpu + length * MS)
        gpu += length * MS
    at += 100 * us
    export.range("nn.Module: GPT/ln_f: LayerNorm", at, at + 90 * us).kernel(ADD, at + 10 * us, gpu, gpu + MS)
    export.range("loss", end, end + MS).kernel(ADD, end + us, gpu + MS, gpu + 3 * MS)
    gpu += 3 * MS
    export.range("backward", end + MS, step - us).kernel(ADD, end + MS + us, gpu, gpu + 3 * MS, tid=AUTOGRAD)
    gpu, at = gpu + 3 * MS, end + MS + 10 * us
    for number, length in reversed(list(enumerate(layers))):
        if backward:
            export.range(f"nn.Module: GPT/h.{number}.attn: Attention", at, at + 50 * us, AUTOGRAD)
        export.kernel(GEMM, at + 10 * us, gpu, gpu + length * MS, tid=AUTOGRAD)
        gpu, at = gpu + length * MS, at + 100 * us
    return export


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four layers of 4, 4, 4 and 7 ms in either direction: 19 + 1 + 2 ms forward and 19 + 3 ms backward, 44 in all."""
    return gpt().write(tmp_path / "train.sqlite")


def on_one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def summary_of(path: Path) -> CaptureSummary:
    (summary,) = summarize(Trace.load(path), path.stem)
    return summary


def blocks(path: Path, *, every: bool = False) -> tuple[Block, ...]:
    return modules_section((summary_of(path),), each_layer=every).blocks


def the_table(path: Path, *, every: bool = False) -> Table:
    (found,) = (one for one in blocks(path, every=every) if isinstance(one, Table))
    return found


def rows(table: Table) -> list[dict[str, Any]]:
    """The cells of a table by the titles of their columns."""
    titles = [plain(column.title) for column in table.columns]
    return [dict(zip(titles, row, strict=True)) for row in table.rows]


# --- the section -----------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_layers_of_one_kind(trace: Path) -> None:
    """Forward and backward of ``h.*`` are those of its attention, 19 ms each; GPT has ``ln_f`` besides."""
    found = {
        str(row["module"]): (row["×"], row["forward"], row["backward"], row["own"], row["launches"])
        for row in rows(the_table(trace))
    }
    assert found == {
        "GPT": (None, pytest.approx(20), pytest.approx(19), None, 9),
        "· h.*": (4, pytest.approx(19), pytest.approx(19), None, 8),
        "· · attn": (4, pytest.approx(19), pytest.approx(19), pytest.approx(38), 8),
        "· ln_f": (None, pytest.approx(1), None, pytest.approx(1), 1),
        "(no module)": (None, pytest.approx(2), pytest.approx(3), pytest.approx(5), 2),
    }


def test_every_layer_has_a_row_of_its_own(trace: Path) -> None:
    """All nine modules and the rest."""
    names = [row["module"] for row in rows(the_table(trace, every=True))]
    layers = [name for layer in range(4) for name in (f"· h.{layer}", "· · attn")]
    assert names == ["GPT", *layers, "· ln_f", "(no module)"]


@pytest.mark.parametrize("name", ["functions_autograd_gpt2", "mem_small256"])
def test_the_outermost_rows_and_the_rest_are_all_of_the_time(real_summary: RealSummary, name: str) -> None:
    """Their shares add up to 100 %: nothing is in no row, folded or not."""
    summary = real_summary(name)
    modules = summary.modules
    assert modules is not None
    roots = {one.path for one in modules.modules if not one.depth}
    for every in (False, True):
        (shown,) = (one for one in modules_section((summary,), each_layer=every).blocks if isinstance(one, Table))
        shares = [row["share"] for row in rows(shown) if row["module"] in {*roots, "(no module)"}]
        assert len(shares) == len(roots) + 1
        assert sum(shares) == pytest.approx(1, abs=1e-9)
    assert len(shown.rows) == len(modules.modules) + 1


def test_collectives_have_a_row_of_their_own(tmp_path: Path) -> None:
    """Of 5 ms one is in the module and 4 are in a collective that it launches: 20 and 80 %."""
    export = Export().range("forward", 0, MS).range("nn.Module: Net: Net", 10, MS - 10).kernel(GEMM, 100, 200, 200 + MS)
    export.kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096>)", 300, 2 * MS, 6 * MS)
    shares = {str(row["module"]): row["share"] for row in rows(the_table(export.write(tmp_path / "t.sqlite")))}
    assert shares == {"Net": pytest.approx(1 / 5), "(communication)": pytest.approx(4 / 5)}


def test_the_answer_names_what_takes_most_itself(trace: Path) -> None:
    """Attention itself takes 38 of 44 ms; of 22 ms of forward 20 are in a module, of 22 of backward 19."""
    (answer,) = (one for one in blocks(trace) if isinstance(one, Answer))
    text = plain(answer.text).replace("\N{NO-BREAK SPACE}", " ")
    assert "(44 ms per step)" in text
    assert "h.*.attn 86.4 %, ln_f 2.3 %" in text
    assert "90.9 % of forward and 86.4 % of backward belong to a module" in text


def test_an_odd_layer_is_named(trace: Path) -> None:
    """Three layers take 8 ms, the last 14 ms: 75 % more. Where each has a row nothing is named."""
    (odd, *_) = (one for one in blocks(trace) if isinstance(one, Listing))
    text = plain(odd.lines[0]).replace("\N{NO-BREAK SPACE}", " ")
    assert "h.3 takes 14 ms, other layers of its kind take 8 ms (median)." in text
    assert not any(
        "median" in plain(line) for one in blocks(trace, every=True) if isinstance(one, Listing) for line in one.lines
    )


def test_where_backward_is_not_known_the_remedy_is_said(tmp_path: Path, trace: Path) -> None:
    """Without ranges on autograd's thread none of the 22 ms of backward is in a module."""
    (how, _) = (one for one in blocks(gpt(backward=False).write(tmp_path / "t.sqlite")) if isinstance(one, Paragraph))
    text = plain(how.text, "`").replace("\N{NO-BREAK SPACE}", " ")
    assert "For 100.0 % of the backward time, the module is unknown. `nsys-analyze run --modules` records it" in text
    assert len([one for one in blocks(trace) if isinstance(one, Paragraph)]) == 1  # what the figures are


def test_small_modules_are_left_out_and_counted(tmp_path: Path) -> None:
    """Of 100.1 ms one module takes 0.1 ms, less than 0.2 %; asked for all, the table has it."""
    export = Export().range("forward", 0, MS).range("nn.Module: Net: Net", 10, MS - 10)
    for name, at, start, ns in (("large", 100, 200, 100 * MS), ("small", 500, 101 * MS, MS // 10)):
        export.range(f"nn.Module: Net/{name}: Linear", at, at + 100).kernel(GEMM, at + 10, start, start + ns)
    path = export.write(tmp_path / "t.sqlite")
    few, every = the_table(path), the_table(path, every=True)
    assert [row["module"] for row in rows(few)] == ["Net", "· large"]
    assert [row["module"] for row in rows(every)] == ["Net", "· large", "· small"]
    assert plain(few.caption) == "Modules (1 small ones left out), ms of kernel time per forward:"
    assert plain(every.caption) == "Modules, ms of kernel time per forward:"


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_section(trace: Path, run_main: Main) -> None:
    """The question, the answer and the table; a row holds the module's name, its times and its share."""
    outcome = run_main("modules", trace)
    assert (outcome.code, outcome.err) == (0, "")
    text = on_one_line(outcome.out)
    assert text.startswith(
        "Which modules take the time? These modules have the most own kernel time in forward and backward (44 ms"
    )
    assert "· · attn 4 19.00 19.00 38.00 8 86.4 %" in text
    assert "(no module) – 2.000 3.000 5.000 2 11.4 %" in text  # 5 of 44 ms


def test_all_is_for_each_layer(trace: Path, run_main: Main) -> None:
    """``h.3`` takes 7 ms in forward and in backward, 14 of 44 ms; no row stands for several."""
    text = on_one_line(run_main("modules", trace, "--all").out)
    assert "· · attn 7.000 7.000 14.00 2 31.8 %" in text
    assert "· h.*" not in text


def test_markdown_is_a_page_of_its_own(trace: Path, run_main: Main) -> None:
    """A title, the section, and its table."""
    text = run_main("modules", trace, "--format", "markdown").out.replace("\N{NO-BREAK SPACE}", " ")
    assert text.startswith("# The modules of train.sqlite\n\n## Which modules take the time?\n")
    assert re.search(
        r"^\| `· · attn` +\| +4 \| +19\.00 \| +19\.00 \| +38\.00 \| +8 \| +86\.4 % \|$", text, re.MULTILINE
    )


def test_json_holds_every_module_as_a_reports_does(trace: Path, run_main: Main) -> None:
    """Nothing is folded: ms of a step, each module behind the one that it lies in."""
    (capture,) = json.loads(run_main("modules", trace, "--format", "json").out)["captures"]
    (reported,) = json.loads(run_main("report", trace, "--format", "json").out)["captures"]
    assert capture == {key: reported[key] for key in capture}
    modules = capture["modules"]
    assert (capture["name"], modules["per"]) == ("train", "step")
    assert modules["source"] == "the ranges of nsys-analyze run --modules"
    assert (modules["forward_ms"], modules["backward_ms"]) == (pytest.approx(22), pytest.approx(22))
    assert modules["forward_coverage"] == pytest.approx(20 / 22)
    assert modules["backward_coverage"] == pytest.approx(19 / 22)
    assert modules["outside_backward"] == {"ms": pytest.approx(3), "launches": 1, "flops": None}
    assert len(modules["modules"]) == 1 + 4 * 2 + 1
    attention, work = modules["modules"][2], {"ms": pytest.approx(4), "launches": 1, "flops": None}
    assert attention.pop("own_forward_ms") == attention.pop("own_backward_ms") == pytest.approx(4)
    assert (attention.pop("forward"), attention.pop("backward")) == (work, work)
    assert attention == {
        "path": "GPT.h.0.attn", "label": "attn", "kind": "Attention", "depth": 2, "count": 1, "line": "",
    }  # fmt: skip


def test_a_report_holds_the_section(trace: Path, run_main: Main) -> None:
    """With the rows that the command prints."""
    page = run_main("report", trace, "-o", "-", "--no-figures").out
    table = run_main("modules", trace, "--format", "markdown").out
    (row,) = (line for line in table.splitlines() if line.startswith("| `· · attn`"))
    assert "Which modules take the time?" in page
    assert "".join(row.split()) in "".join(page.split())  # folded, its columns are not padded


def test_counted_flops_of_the_manifest_give_a_rate(trace: Path, run_main: Main) -> None:
    """38 TFLOP of attention in either direction: 76e12 in 38 ms are 2,000 TFLOP/s; the loss's are no module's."""
    by_module = {
        f"GPT/h.{i}.attn: Attention": {"forward": 9_500_000_000_000, "backward": 9_500_000_000_000} for i in range(4)
    }
    flops = {"passes": {"forward": 1}, "classes": {}, "modules": by_module}
    (trace.parent / "manifest.json").write_text(json.dumps({"capture": "train.sqlite", "flops": flops}))
    (capture,) = json.loads(run_main("modules", trace, "--format", "json").out)["captures"]
    found = {one["path"]: (one["forward"]["flops"], one["backward"]["flops"]) for one in capture["modules"]["modules"]}
    assert found["GPT"] == (38_000_000_000_000, 38_000_000_000_000)
    assert found["GPT.h.2"] == (9_500_000_000_000, 9_500_000_000_000)
    assert found["GPT.ln_f"] == (None, None)
    text = on_one_line(run_main("modules", trace).out)
    assert "· · attn 4 19.00 19.00 38.00 8 86.4 % 2 PFLOP/s" in text


def test_a_capture_without_modules_gives_one_line_with_the_remedy(tmp_path: Path, run_main: Main) -> None:
    """No error: there is nothing to say."""
    path = Export().range("forward", 0, 90).kernel(GEMM, 10, 20, 30).write(tmp_path / "t.sqlite")
    for options in ((), ("--all",), ("--format", "markdown")):
        assert run_main("modules", path, *options) == (0, f"{path} {NO_MODULES}", "")


def test_a_file_that_is_not_there_is_an_error_of_one_line(tmp_path: Path, run_main: Main) -> None:
    """It says which file, and exits with 1."""
    outcome = run_main("modules", tmp_path / "missing.sqlite")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.count("\n") == 1
    assert "missing.sqlite: No such file" in outcome.err


def test_a_folder_of_captures_has_a_table_for_each(tmp_path: Path, run_main: Main) -> None:
    """Two captures, of which one has no modules, and stands in JSON alone."""
    for name, export in (
        ("a", gpt()),
        ("b", gpt((2, 2))),
        ("c", Export().range("forward", 0, 90).kernel(GEMM, 10, 20, 30)),
    ):
        export.write(tmp_path / f"{name}.sqlite")
    outcome = run_main("modules", tmp_path)
    assert outcome.code == 0
    shown = [line for line in outcome.out.splitlines() if line in ("a", "b", "c") or "ms of kernel time per " in line]
    assert [line[:7] for line in shown] == ["a", "Modules", "b", "Modules"]
    captures = json.loads(run_main("modules", tmp_path, "--format", "json").out)["captures"]
    assert [(one["name"], one["modules"] is None) for one in captures] == [("a", False), ("b", False), ("c", True)]


def test_names_of_phases_can_be_given(tmp_path: Path, run_main: Main) -> None:
    """``model_fwd`` is no phase by itself: its blocks are modules once it is."""
    export = Export().range("model_fwd", 0, MS).range("block 0", 10, MS - 10).kernel(GEMM, 100, 200, 4 * MS)
    path = export.write(tmp_path / "t.sqlite")
    assert NO_MODULES in run_main("modules", path).out
    text = on_one_line(run_main("modules", path, "--phase-name", "forward=model_fwd").out)
    assert "block 0 4.000 " in text


def test_classes_of_modules_and_calls_of_phases_have_their_lines(trace: Path, run_main: Main) -> None:
    """Those that hooks found, in the manifest; LayerNorm is none of the program's."""
    lines = {"GPT": "model.py:90", "Block": "model.py:57", "Attention": "model.py:20", "forward": "train.py:8"}
    trace.with_suffix(".manifest.json").write_text(json.dumps({"status": "ok", "lines": lines}))
    table = [row.split("|") for row in run_main("modules", trace, "--format", "markdown").out.splitlines()]
    line_of = {cells[1].strip(" ·`"): cells[-2].strip(" `") for cells in table if len(cells) > 2}
    assert [line_of[one] for one in ("GPT", "h.*", "attn", "ln_f")] == [
        "model.py:90", "model.py:57", "model.py:20", "–",
    ]  # fmt: skip
    report = run_main("report", trace, "-o", "-", "--no-figures").out
    assert re.search(r"^\| forward \|.*\| `train.py:8` \|$", report, re.MULTILINE)

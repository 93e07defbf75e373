"""What each operator should cost: on the first screen, in its section, in commands, in JSON and on the page."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs

from nsys_analyzer import render, what_if
from nsys_analyzer.analysis.comparison.compare import compare
from nsys_analyzer.analysis.comparison.comparison import Side
from nsys_analyzer.analysis.operators.account import AccountPart, describe_shapes, fold_rows
from nsys_analyzer.analysis.operators.shape_reasons import Reason
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.cli.operators import operators_data
from nsys_analyzer.errors import CannotAnswerError, ConfigurationError
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.questions.ask import ask
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Details, Report, Section, StepBars, Table
from nsys_analyzer.report.renderers.html import encode_timeline
from nsys_analyzer.report.renderers.json_report import captures_data
from nsys_analyzer.report.sections.bars import make_account_bars, round_account
from nsys_analyzer.report.sections.decision import decision_section
from nsys_analyzer.report.sections.findings import explain_no_findings
from nsys_analyzer.report.sections.operators import (
    _REASONS,
    answer_operators,
    describe_limits_of_account,
    tabulate_operators,
)
from nsys_analyzer.report.units import shorten_shapes
from nsys_analyzer.text import plain
from nsys_analyzer.trace.operator_calls import Signature, Tensor
from tests.conftest import Main
from tests.support.export import ADD, GEMM
from tests.support.operators import ADD_US, MATMUL_US, STEP_US, make_account, make_capture, make_row, record_operators


@pytest.fixture
def recorded(tmp_path: Path) -> CaptureSummary:
    (capture,) = gather((record_operators(tmp_path),), with_tracks=True).captures
    return capture


def write_section(capture: CaptureSummary) -> str:
    """Returns the section on operators as markdown, with single spaces."""
    section = Section("operators", "", tuple(answer_operators(capture)))
    return " ".join(render(Report("", (section,))).replace("\N{NO-BREAK SPACE}", " ").split())


# --- the account


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 239.4 + 81.9 + 54.7 + 44.8 + 40.0 tenths: rounded down they are 458 of 461; 0.9, 0.8 and 0.7 are rounded up
        ({}, {"attainable": 23.9, "launch": 8.2, "host": 5.5, "redundant": 4.5, "operators": 4.0}),
        # 1,234 ms have no decimal places: 1,001.6 + 233.7 − 1.3 are rounded down to 1,001 + 233 − 2 = 1,232
        (
            {
                "step_ms": 1234.0,
                "attainable_ms": 1001.6,
                "parts": (AccountPart("operators", 233.7), AccountPart("unexplained", -1.3)),
            },
            {"attainable": 1001, "operators": 234, "unexplained": -1},
        ),
        # 0.5 of 0.512 ms in thousandths; 0.0004 ms are rounded to 0 and left out
        (
            {
                "step_ms": 0.512,
                "attainable_ms": 0.5,
                "parts": (AccountPart("launch", 0.0116), AccountPart("unexplained", 0.0004)),
            },
            {"attainable": 0.5, "launch": 0.012},
        ),
    ],
)
def test_rounded_parts_add_up_to_the_rounded_step(changes: dict[str, Any], expected: dict[str, float]) -> None:
    account = make_account(**changes)
    assert round_account(account) == expected
    digits = 1 if account.step_ms < 100 else 0
    digits = 3 if account.step_ms < 1 else digits
    assert sum(expected.values()) == pytest.approx(round(account.step_ms, digits))


def test_the_bar_has_a_part_for_each_kind_of_cause() -> None:
    """Launching 8.2 + other CPU work 5.5 = 13.7 ms are one part, and a collective that waits is communication."""
    bars = make_account_bars(make_account(), "46.1 ms", "run")
    assert dict(zip(bars.parts, bars.rows[0].ms, strict=True)) == pytest.approx(
        {"attainable": 23.9, "excess of operators": 4.0, "redundant work": 4.5, "launching and waiting": 13.7}
    )
    assert bars.title == "From attainable to today's 46.1 ms:"
    parts = (AccountPart("communication", 18.0), AccountPart("unexplained", 2.14), AccountPart("unfused", 2.0))
    with_ranks = make_account_bars(make_account(parts=parts), "46.1 ms", "run")
    assert with_ranks.parts == ("attainable", "unfused operators", "communication", "unexplained")
    assert with_ranks.note == ""


def test_a_bar_says_that_its_parts_are_longer_than_the_step() -> None:
    """23.9 + 23.0 − 0.82 = 46.08 ms, in tenths 239 + 230 − 8: the parts that are drawn are 0.8 ms too long."""
    parts = (AccountPart("operators", 23.0), AccountPart("unexplained", -0.82))
    bars = make_account_bars(make_account(attainable_ms=23.9, parts=parts), "46.1 ms", "run")
    assert bars.parts == ("attainable", "excess of operators")
    assert sum(bars.rows[0].ms) == pytest.approx(46.9)
    assert bars.note.replace("\N{NO-BREAK SPACE}", " ") == (
        "The parts of the replayed step are 0.8 ms longer than the step."
    )


def test_the_first_screen_states_the_attainable_time(recorded: CaptureSummary) -> None:
    capture = replace(recorded, account=make_account())
    blocks = decision_section(capture, Evidence((capture,))).blocks
    text = render(Report("", (Section("decision", "", blocks),))).replace("\N{NO-BREAK SPACE}", " ")
    assert " · attainable about 23.9 ms on this GPU · GPU busy" in text
    assert [block.parts[0] for block in blocks if isinstance(block, StepBars)] == ["attainable", "matmul"]
    assert "The attainable time" not in text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, ""),
        ({"expected_share": 0.995}, ""),
        (
            {"attainable_ms": 19.94, "parts": (*make_account().parts, AccountPart("unexplained", 4.0))},
            "The replayed step is 4 ms shorter than the step, so 4 ms are unexplained.",
        ),
        (
            {"expected_share": 0.98},
            "The attainable time contains 2 % of the kernel time as measured, because this part has no expectation.",
        ),
        ({"is_scaled": True}, "The attainable time is scaled by data sheets from times that were measured on H200."),
        (
            {"is_scaled": True, "expected_share": 0.88},
            "The attainable time is scaled by data sheets from times that were measured on H200 and contains 12 % of "
            "the kernel time as measured, because this part has no expectation.",
        ),
    ],
)
def test_the_limits_of_the_attainable_time(changes: dict[str, Any], sentence: str) -> None:
    capture = make_capture(**changes)
    assert describe_limits_of_account(make_account(**changes)).replace("\N{NO-BREAK SPACE}", " ") == sentence
    first_screen = decision_section(capture, Evidence((capture,))).blocks
    assert sentence in render(Report("", (Section("d", "", first_screen),))).replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(("unfused_ms", "is_said"), [(3.0, True), (1.0, False)])
def test_unfused_operators_without_findings(unfused_ms: float, *, is_said: bool) -> None:
    """3 ms are 7 % of 46.08 ms, and 1 ms are 2 %. A saving of less than 3 % is not said."""
    capture = make_capture(attainable_ms=46.08 - unfused_ms, parts=(AccountPart("unfused", unfused_ms),))
    sentence = explain_no_findings(capture).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "torch.compile may fuse some operators, as in each eager program, which saves about 3 ms." in sentence
    ) == is_said
    assert "Unfused operators are a finding only if fusing them saves at least 10 %." in sentence


def test_rows_are_added_up() -> None:
    """8 + 3 + 1 ms, of which 6 and 1 are attainable: the last row has no expectation and counts with its 1 ms."""
    rows = [
        make_row("aten::mm", 8.0, 6.0, line="a.py:1 in f"),
        make_row("aten::add", 3.0, 1.0, line="a.py:1 in f"),
        make_row("aten::sort", 1.0, None, line="a.py:1 in f"),
        make_row("aten::sort", 2.0, None, line="a.py:2 in f"),
    ]
    first, second = fold_rows(rows, lambda row: row.line)
    assert (first.calls, first.ms, first.attainable_ms, first.excess_ms) == (3, 12.0, 8.0, 4.0)
    assert (first.operator, first.shapes, first.line) == ("", "4×4 bf16", "a.py:1 in f")
    assert (second.operator, second.ms, second.attainable_ms, second.excess_ms) == ("aten::sort", 2.0, None, 0.0)


# --- the section


def test_the_section_lists_the_account_and_the_operators() -> None:
    text = write_section(make_capture())
    assert (
        "; about 23.9 ms would be attainable on this GPU. The largest parts above the attainable time: launching, "
        "short pauses (8.2 ms), other CPU work (5.5 ms) and redundant work (4.5 ms)." in text
    )
    cells = re.findall(r"\| ([a-z][a-zA-Z, ]+?) +\| +([\d.]+) \| +([\d.]+) % \|", text)
    assert cells[-1] == ("the step", "46.1", "100.0")
    assert sum(float(ms) for _, ms, _ in cells[:-1]) == pytest.approx(46.1)
    assert "| `mm` | 4×4 bf16 | – | memory | 1 | 8.000 | 6.000 | 2.000 |" in re.sub(r" +", " ", text)
    assert "| `add` | 4×4 bf16 | `train.py:20 in step` | memory | 1 | 3.000 | 1.000 | 2.000 |" in re.sub(
        r" +", " ", text
    )


def test_operators_after_the_first_rows_are_folded() -> None:
    """Seven operators with an excess of 1 ms and one without an expectation: five are in view."""
    rows = [make_row(f"aten::op{number}", 2.0, 1.0) for number in range(7)]
    capture = make_capture(operators=(*rows, make_row("aten::sort", 3.0, None)))
    *_, table, folded = answer_operators(capture)
    assert isinstance(table, Table)
    assert isinstance(folded, Details)
    assert [plain(row[0]) for row in table.rows] == [f"op{number}" for number in range(5)]  # type: ignore[arg-type]
    less, unknown, _ = folded.blocks
    assert isinstance(less, Table)
    assert isinstance(unknown, Table)
    assert [row[0] for row in less.rows] == ["op5", "op6"]
    assert unknown.caption == "Kernel time without an expectation, by operator:"
    assert [row[0] for row in unknown.rows] == ["sort"]


def test_a_capture_without_operators_names_the_command_once(tmp_path: Path) -> None:
    (capture,) = gather((record_operators(tmp_path, recorded=False),)).captures
    assert (capture.operators, capture.account) == (None, None)
    text = render(Report("", (Section("operators", "", tuple(answer_operators(capture))),)))
    assert text.count("nsys-analyze run") == 1
    assert write_section(capture) == (
        "# **What each operator should cost is not known, because no operators were recorded. `nsys-analyze run -- "
        "python train.py` records them.**"
    )
    first_screen = decision_section(capture, Evidence((capture,))).blocks
    assert "attainable" not in render(Report("", (Section("d", "", first_screen),)))
    data = json.dumps(captures_data([capture]))
    assert '"account": null' in data
    assert "operators were recorded" not in data


def test_nothing_is_said_of_a_program_that_does_not_use_pytorch(tmp_path: Path) -> None:
    (capture,) = gather((record_operators(tmp_path, recorded=False),)).captures
    assert capture.whole
    other = replace(capture, whole=structs.replace(capture.whole, kernels=capture.whole.kernels[:1]))  # cuBLAS alone
    assert not other.is_torch
    assert [*answer_operators(other)] == []


# --- from a recorded capture to commands and pages


def test_a_recorded_capture_has_an_account(recorded: CaptureSummary) -> None:
    """A step of 1,000 µs; its kernels take 400 and 100 µs, and both have an attainable time."""
    account = recorded.account
    assert account
    assert account.step_ms == pytest.approx(STEP_US / 1000, rel=0.05)
    assert account.attainable_ms + sum(part.ms for part in account.parts) == pytest.approx(account.step_ms)
    assert account.expected_share == 1
    assert recorded.step
    assert {(kernel.name, kernel.operator) for kernel in recorded.step.kernels} == {
        (GEMM, "aten::mm"), (ADD, "aten::add"),
    }  # fmt: skip
    assert {row.operator: row.ms for row in account.operators} == {
        "aten::mm": pytest.approx(MATMUL_US / 1000), "aten::add": pytest.approx(ADD_US / 1000),
    }  # fmt: skip
    assert {row.operator: (row.module, row.line) for row in account.operators} == {
        "aten::mm": ("GPT/h.*.up: Linear", "train.py:12 in forward"), "aten::add": ("", "train.py:20 in step"),
    }  # fmt: skip
    # 2 · 4096³ FLOPs, and three matrices of 4096² numbers of 2 bytes
    assert {row.operator: (row.flops, row.bytes) for row in account.operators}["aten::mm"] == (
        2 * 4096**3, 3 * 4096**2 * 2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("operator", ["mm", "add"]),
        ("module", ["GPT/h.*.up: Linear", "(no module)"]),
        ("line", ["train.py:12 in forward", "train.py:20 in step"]),
    ],
)
def test_the_command_prints_a_row_for_each_name(by: str, names: list[str], tmp_path: Path, run_main: Main) -> None:
    path = record_operators(tmp_path)
    ended = run_main("operators", path, "--by", by)
    assert ended.code == 0
    assert "ms per step, the largest excess first:" in ended.out
    assert sorted(names, key=ended.out.index) == names  # the matmul has the larger excess
    ended = run_main("operators", path, "--by", by, "--top", 1, "--format", "json")
    (row,) = json.loads(ended.out)
    assert (row["ms"], row["calls"]) == (pytest.approx(0.4), 1)
    assert row["excess_ms"] == pytest.approx(row["ms"] - row["attainable_ms"])
    rows = [*csv.DictReader(io.StringIO(run_main("operators", path, "--by", by, "--format", "csv").out))]
    assert [float(row["ms"]) for row in rows] == [pytest.approx(0.4), pytest.approx(0.1)]


def test_tables_shorten_shapes_and_json_has_all_shapes() -> None:
    signature = Signature("aten::cat", (tuple(Tensor((size, 8), "bfloat16") for size in range(1, 6)),))
    shapes = describe_shapes(signature)
    assert shapes == "1×8 · 2×8 · 3×8 · 4×8 · 5×8 bf16"
    row = make_row("aten::cat", 2.0, 1.0, shapes=shapes)
    (data,) = operators_data([(make_capture(), (row,))])
    assert data["shapes"] == shapes
    assert tabulate_operators([row], "", "").rows[0][1] == "1×8 · 2×8 · 3×8 and 2 more bf16"
    assert shorten_shapes("1×8 · 2×8 · scalar") == "1×8 · 2×8 · scalar"


def test_the_command_without_operators(tmp_path: Path, run_main: Main) -> None:
    path = record_operators(tmp_path, recorded=False)
    ended = run_main("operators", path)
    assert ended.code == 0
    assert ended.out.endswith("Record them with: nsys-analyze run -- python train.py\n")
    ended = run_main("operators", path, "--format", "json")
    assert ended.code == 1
    assert json.loads(ended.out)["cannot_answer"]["needs"] == "nsys-analyze run -- python train.py"


def test_json_has_the_longest_operators() -> None:
    """Of 250 operators the 200 with the most time, which are the last ones; they stay in their order."""
    rows = tuple(make_row(f"aten::op{number}", 1.0 + number, 1.0) for number in range(250))
    (document,) = captures_data([make_capture(operators=rows)])["captures"]
    assert document["account"]["operators_left_out"] == 50
    assert [row["operator"] for row in document["account"]["operators"]] == [f"aten::op{n}" for n in range(50, 250)]


@pytest.mark.parametrize(
    ("question", "value"),
    [
        ("attainable_ms", 23.94),
        ("redundant_ms", 4.48),
        ("unfused_ms", 3.5),
        ("expected_share", 1),
        ("operator_excess_ms operator=mm", 8 - 6),
        ("operator_excess_ms operator=aten::add", 3 - 1),
        ("line_excess_ms line=train.py:20", 3 - 1),
        ("module_excess_ms module=h.*.up", 5 - 4),
    ],
)
def test_questions(question: str, value: float, recorded: CaptureSummary) -> None:
    rows = (*make_account().operators, make_row("aten::silu", 5.0, 4.0, module="GPT/h.*.up: Linear"))
    account = make_account(operators=rows)
    account = replace(account, parts=(*account.parts, AccountPart("unfused", 3.5)))
    answer = ask(Evidence((replace(recorded, account=account),)), question)
    assert (answer.value, answer.cannot_answer) == (value, None)


def test_questions_without_an_answer(tmp_path: Path, recorded: CaptureSummary) -> None:
    with pytest.raises(ConfigurationError, match=r"No operator of the steps has the line 'other\.py:1'"):
        ask(Evidence((recorded,)), "line_excess_ms line=other.py:1")
    (tmp_path / "without").mkdir()
    (capture,) = gather((record_operators(tmp_path / "without", recorded=False),)).captures
    answer = ask(Evidence((capture,)), "attainable_ms")
    assert answer.cannot_answer
    assert answer.cannot_answer.needs == "nsys-analyze run -- python train.py"


def test_what_if_an_operator_is_faster(recorded: CaptureSummary) -> None:
    """The program waits for both kernels, so a step is as much shorter as the kernel: by half of 400 µs."""
    assert recorded.account
    excess_ms = {row.operator: row.excess_ms for row in recorded.account.operators}
    assert what_if(recorded, operators={"mm": 0.5}).less_ms == pytest.approx(0.2)
    prediction = what_if(recorded, operators={"aten::mm": None})
    assert prediction.less_ms == pytest.approx(excess_ms["aten::mm"])
    assert prediction.saves_ms == pytest.approx(excess_ms["aten::mm"], rel=0.1)
    both = what_if(recorded, operators={"mm": None, "add": None})
    assert both.less_ms == pytest.approx(sum(excess_ms.values()))


def test_what_if_of_unknown_operators(tmp_path: Path, recorded: CaptureSummary, run_main: Main) -> None:
    with pytest.raises(ConfigurationError, match=r"no operator 'bmm'\. They contain: aten::add, aten::mm"):
        what_if(recorded, operators={"bmm": None})
    (tmp_path / "without").mkdir()
    path = record_operators(tmp_path / "without", recorded=False)
    with pytest.raises(CannotAnswerError, match="The operators of the steps are not known"):
        what_if(*gather((path,)).captures, operators={"mm": None})
    ended = run_main("what-if", tmp_path / "capture.sqlite", "--operator", "mm=attainable")
    assert "what if mm at its attainable time" in ended.out
    assert run_main("what-if", tmp_path / "capture.sqlite", "--operator", "mm=fast").code == 2


def test_changed_operators_are_paired_by_shapes(recorded: CaptureSummary) -> None:
    """The size 32000 became 32001 in two matmuls, each with the more similar one; an operator is gone, one is new."""

    def side(*rows: Any) -> Side:
        return Side((replace(recorded, account=make_account(operators=rows)),))

    before = side(
        make_row("aten::mm", 1.0, 1.0, shapes="8×32000 · 32000×4 bf16"),
        make_row("aten::mm", 0.9, 0.9, shapes="32000×8 · 8×4 bf16"),
        make_row("aten::add", 2.0, 1.0),
        make_row("aten::cos", 0.5, 0.5),
    )
    after = side(
        make_row("aten::mm", 6.0, 1.0, shapes="32001×8 · 8×4 bf16"),
        make_row("aten::mm", 5.0, 1.0, shapes="8×32001 · 32001×4 bf16"),
        make_row("aten::add", 2.0, 1.0),
        make_row("aten::sin", 0.25, 0.25),
    )
    changes = compare(before, after).operators
    assert changes
    assert [(row.operator, row.before_shapes, row.after_shapes, row.ms) for row in changes] == [
        ("aten::mm", "32000×8 · 8×4 bf16", "32001×8 · 8×4 bf16", pytest.approx(6.0 - 0.9)),
        ("aten::mm", "8×32000 · 32000×4 bf16", "8×32001 · 32001×4 bf16", pytest.approx(5.0 - 1.0)),
        ("aten::cos", "4×4 bf16", None, -0.5),
        ("aten::sin", None, "4×4 bf16", 0.25),
    ]
    without = Side((replace(recorded, account=None),))
    assert compare(before, without).operators is None


def test_a_comparison_lists_changed_operators(tmp_path: Path, run_main: Main) -> None:
    for name, size in (("before", 4096), ("after", 4097)):
        (tmp_path / name).mkdir()
        record_operators(tmp_path / name, size)
    ended = run_main("compare", tmp_path / "before", tmp_path / "after", "--force")
    assert "operators whose kernel time" not in ended.out  # the kernels take equally long
    (tmp_path / "none").mkdir()
    record_operators(tmp_path / "none", recorded=False)
    ended = run_main("compare", tmp_path / "before", tmp_path / "none", "--force", "--format", "json")
    assert json.loads(ended.out)["comparisons"][0]["operators"] is None


def test_the_page_knows_the_operator_of_each_kernel(recorded: CaptureSummary) -> None:
    lines = encode_timeline(Report("", (), (recorded,)))[1].splitlines()
    data = json.loads(zlib.decompress(base64.b64decode(lines[1])))
    (stream,) = (track for track in data["tracks"] if track["kind"] == "stream")
    assert recorded.account
    attainable_ns = {row.operator: round((row.attainable_ms or 0) * 1e6) for row in recorded.account.operators}
    shapes = "4096×4096 · 4096×4096 bf16"
    assert data["operators"] == [
        ["aten::mm", shapes, "train.py:12 in forward", attainable_ns["aten::mm"]],
        ["aten::add", shapes, "train.py:20 in step", attainable_ns["aten::add"]],
    ]
    assert stream["operator"] == [0, 1] * 3


def test_a_page_without_operators_has_no_column_for_them(tmp_path: Path) -> None:
    (capture,) = gather((record_operators(tmp_path, recorded=False),), with_tracks=True).captures
    lines = encode_timeline(Report("", (), (capture,)))[1].splitlines()
    data = json.loads(zlib.decompress(base64.b64decode(lines[1])))
    assert data["operators"] == []
    assert not any("operator" in track for track in data["tracks"])


def test_every_reason_has_words() -> None:
    keys = {key for part in get_args(Reason) for key in (get_args(part) or (part,))}
    assert keys == _REASONS.keys()


def test_the_table_shows_the_reason_of_each_row() -> None:
    rows = (replace(make_row("aten::mm", 8.0, 6.0), reason="wave_tail"), make_row("aten::add", 3.0, 1.0))
    for by in ("operator", "module", "line"):
        table = tabulate_operators(rows, "", "run", by)
        position = [column.title for column in table.columns].index("reason")
        assert {row[position] for row in table.rows} == {"partial last wave", None}


def test_the_reason_of_a_sum_of_rows_is_that_of_most_of_the_excess() -> None:
    """2 ms of the excess are those of a small grid, 3 ms have no known reason, and 4 ms those of a reduction."""
    excess_ms = {"small_grid": 2.0, "": 3.0, "reduction": 4.0}
    rows = [replace(make_row("aten::sum", ms + 1, 1.0), reason=reason) for reason, ms in excess_ms.items()]
    assert [row.reason for row in fold_rows(rows, lambda row: row.operator)] == ["reduction"]

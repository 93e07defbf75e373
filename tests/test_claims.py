"""``check``: lines of ``ask`` and sentences of the report are judged, and nothing else is."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from nsys_analyzer.experiments.evidence import make_evidence
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.questions.claims import _is_same_or_shortened, check
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.renderers import markdown
from nsys_analyzer.report.renderers.html import render_fragment
from nsys_analyzer.report.sections import build_report
from tests.conftest import DATA, ROOT, Main
from tests.support.copied import text_of
from tests.test_ask_command import two_phases

#: What ``ask`` and the report say of ``trace``.
ASKED = "gpu_busy_ms phase=forward = 2 ms"
WHOLE = f"{ASKED}, median of 2 instances of forward (2 rows of CUPTI_ACTIVITY_KIND_KERNEL in t.sqlite)"
TIMES = "Under the profiler, forward takes 6 ms (the GPU is busy for 2 ms)."
MATMUL = (
    "Of the total kernel time, matmul takes 100.0 % in forward, 0.0 % in the optimizer and 66.7 % in the training step."
)
TITLES = "| phase | n | profiled ms | GPU span ms |\n|:--|--:|--:|--:|\n"
#: Captures whose whole reports are judged: of one process, of a CPU, of graphs, of two ranks; and experiments.
REPORTED = ("train_small256", "graph_small256", "llama_bf16", "cpu_train", "ddp2_small256", "oom_fp32", "sweep")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_phases().write(tmp_path_factory.mktemp("claims") / "t.sqlite")


@pytest.fixture(scope="module")
def evidence(trace: Path, real_capture: Callable[[str], Path]) -> Callable[[str], Evidence]:
    places = {"t": trace, "sweep": ROOT / "examples" / "sweep", "cpu_train": DATA / "cpu_train.pt.trace.json.gz"}
    return cache(lambda name: make_evidence(gather((places.get(name) or real_capture(name),))))


@pytest.fixture(scope="module")
def holds(evidence: Callable[[str], Evidence]) -> Callable[[str], list[bool | None]]:
    return lambda text: [claim.holds for claim in check(evidence("t"), text).claims]


@pytest.mark.parametrize(
    "text",
    [
        ASKED, WHOLE, f"{WHOLE}.", f"- {ASKED}.", f"**{ASKED}**", "`gpu_busy_ms phase=forward` = 2 ms",
        "wall_ms phase='forward' = 6 ms", "class_share class=matmul = 0.67 fraction",  # of 0.666667
        "class_share class=matmul = 0.666667 fraction", "saves_ms finding=cpu_pause = 4.41 to 8 ms",
        "top_kernel phase=forward = ampere_sgemm_128x64_tn",
        "peak_memory_bytes: not known. Memory was not recorded. It needs: "
        "nsys-analyze run --memory -- python train.py",
        TIMES, f"**{TIMES}**", f"* {TIMES}", TIMES.replace(" (the", "\n(the"), f"## {TIMES}",
        MATMUL, MATMUL.replace(" %", "\u00a0%"), MATMUL.replace(" %", "%"),
        f"{TITLES}| forward | 2 | 6.000 | 2.000 |", "phase\tn\tprofiled ms\tGPU span ms\nstep\t2\t10.00\t7.000",
        "phase      n  profiled ms  GPU span ms\nforward    2        6.000        2.000",
    ],
)  # fmt: skip
def test_what_is_true(text: str, holds: Callable[[str], list[bool | None]]) -> None:
    if "saves_ms" not in text or holds(text) != [None]:  # a finding has other bounds where its rule changes
        assert holds(text) == [True]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (ASKED.replace("2 ms", "3 ms"), "gpu_busy_ms phase=forward = 2 ms"),
        (ASKED.replace("2 ms", "-2 ms"), "gpu_busy_ms phase=forward = 2 ms"),
        (ASKED.replace("forward", "optimizer"), "gpu_busy_ms phase=optimizer = 1 ms"),
        ("top_kernel phase=forward = elementwise_kernel", "= ampere_sgemm_128x64_tn"),
        (TIMES.replace("6", "7"), TIMES),
        (TIMES.replace("6 ms", "60 ms"), TIMES),
        (TIMES.replace("6 ms", "-6 ms"), TIMES),
        (TIMES.replace("2 ms", "1 ms"), TIMES),
        (MATMUL.replace("66.7", "66.8"), MATMUL),
        (MATMUL.replace("100.0 % in forward, 0.0", "0.0 % in forward, 100.0"), MATMUL),
        (f"{TITLES}| forward | 2 | 6.100 | 2.000 |", "forward | 2 | 6.000 | 2.000"),
        (f"{TITLES}| step | 2 | 6.000 | 2.000 |", "step | 2 | 10.00 | 7.000"),
    ],
)
def test_what_is_false_is_said_with_what_is_right(
    text: str, right: str, trace: Path, tmp_path: Path, run_main: Main
) -> None:
    (tmp_path / "text").write_text(text, encoding="utf-8")
    outcome = run_main("check", trace, tmp_path / "text")
    assert outcome.code == 3
    first, shown = outcome.out.splitlines()
    assert first.startswith("false: ")
    assert right in shown


#: What no one may call true, though it holds the words of a true line.
ADVERSARIAL = [
    # Other relations, signs and denials in a line of ``ask``.
    *(ASKED.replace("=", sign).replace(f"phase{sign}", "phase=") for sign in "≠><≥≤≈~"),
    *(f"{ASKED} {words}" for words in ("each", "in total", "per kernel", "at most", "是假的", "?", "not")),
    *(f"{words} {ASKED}" for words in ("not", "It is false that:", "Es stimmt nicht, dass", "¬", "假:", "Nobody says")),
    ASKED.replace("= 2", "= not 2"), ASKED.replace("= 2", "!= 2"), ASKED.replace("= 2", "= > 2"),
    ASKED.replace("= 2", "= −2"), ASKED.replace("2 ms", "2 s"), ASKED.replace("2 ms", "2 µs"), ASKED.replace(" ms", ""),
    ASKED.replace("2 ms", "1 to 3 ms"), ASKED.replace("2 ms", "2 to 2 ms"), ASKED.replace("2 ms", "2 ms to 2 ms"),
    ASKED.replace("forward", "backward"), ASKED.replace("busy", "idle"), ASKED.replace(" phase=forward", ""),
    WHOLE.replace("forward (", "optimizer ("), WHOLE.replace("median", "maximum"), WHOLE.replace("2 rows", "3 rows"),
    "busy_share phase=forward = 1 fraction", "class_share class=matmul = 1 fraction",  # rounded away
    # The same in a sentence of the report.
    *(f"{TIMES} {words}" for words in ("This is false.", "— not!", "(no)", "Falsch.", "これは嘘です。", "Each.")),
    *(f"{words}{TIMES}" for words in ("It is false that: ", "No: ", "“", "Falsch: ", "On an A100, ", "> ", "~~", "≠ ")),
    *(f"{words}\n{TIMES}" for words in ("It is false that:", "Falsch ist, dass", "It is not so that", "Not –")),
    *(f"{words}\n\n{TIMES}" for words in ("It is false that:", "Nothing of the following is true:", "以下は誤り：")),
    *(f"{TIMES}\n{words}" for words in ("(which is false)", "— said nobody", "≠", "…not")),
    f"It is false that:\n\n- {TIMES}", f'"{TIMES}" is false', f"~~{TIMES}~~", f"<s>{TIMES}</s>",
    TIMES.replace("forward", "the optimizer"), TIMES.replace("6", "<6"),
    TIMES.replace("Under", "Without"), TIMES.replace("takes", "never takes"), TIMES.replace("forward", "backward"),
    TIMES.replace("6 ms", "6 s"), TIMES.replace("6 ms", "≥ 6 ms"), TIMES.replace("6", "٧"),
    TIMES.replace("6", "6\u0338"), TIMES.replace("6", "\0"),  # the placeholder of a number
    TIMES.replace("6 ms", "6 ms each"), TIMES.replace("busy", "idle"), TIMES.replace("profiler,", "profiler"),
    MATMUL.replace("66.7", "67.6"), MATMUL.replace("66.7", "0.667"), MATMUL.replace("matmul", "attention"),
    MATMUL.replace("total kernel time", "wall time"), MATMUL.replace(" %", " ms"), MATMUL.replace("66.7", "7e1"),
    "GPU busy — forward: 2 ms, optimizer: 2 ms", "The GPU is busy 2 ms in forward.", "forward takes 6 ms",
    # Rows without their table, below other titles, or with more in them.
    "| forward | 2 | 6.000 | 2.000 |", f"{TITLES.replace('profiled', 'unprofiled')}| forward | 2 | 6.000 | 2.000 |",
    f"{TITLES}\n| forward | 2 | 6.000 | 2.000 |", f"{TITLES}| forward | 2 | 6.000 | not 2.000 |",
    f"{TITLES}| backward | 2 | 6.000 | 2.000 |", f"{TITLES}| forward | 2 | 6.000 | 2.000 | is | not | so | a | b | c |",
]  # fmt: skip


@pytest.mark.parametrize("text", ADVERSARIAL)
def test_nothing_false_is_called_true(text: str, holds: Callable[[str], list[bool | None]]) -> None:
    assert len(ADVERSARIAL) > 90
    verdicts = holds(text)
    assert verdicts
    assert True not in verdicts


@pytest.mark.parametrize("name", REPORTED)
def test_each_sentence_of_a_report_is_judged_true(name: str, evidence: Callable[[str], Evidence]) -> None:
    """In markdown, and as it is copied from a page, where a bar of several rows has labels that claim nothing."""
    report = build_report(evidence(name))
    claims = check(evidence(name), markdown.render(report, {})).claims
    assert len(claims) > 40
    assert [claim.text for claim in claims if claim.holds is not True] == []
    claims = check(evidence(name), text_of(render_fragment(report))).claims
    assert len(claims) > 40
    assert [claim.text for claim in claims if claim.holds is False] == []
    assert [claim.text for claim in claims if claim.holds is None and re.search(r"[.:] |[.:]$", claim.text)] == []


@pytest.mark.parametrize(
    ("cell", "is_same"),
    [
        ("…/programs/train.py:22", True), ("/home/somebody/prog…", True), ("/home/somebody/programs/train.py:22", True),
        ("…/programs/train.py:2", False), ("…/programs/train.py:23", False), ("…22", False), ("train.py:22", False),
    ],
)  # fmt: skip
def test_a_terminal_may_cut_the_start_of_a_path(cell: str, is_same: bool) -> None:
    assert _is_same_or_shortened(cell, "/home/somebody/programs/train.py:22") == is_same


@pytest.mark.parametrize("name", ["train_small256", "cpu_train"])
@pytest.mark.parametrize("words", [("report", "-o", "report.md", "--no-figures"), ("explain",)])
def test_each_sentence_on_a_terminal_is_judged_true(
    name: str, words: tuple[str, ...], real_capture: Callable[[str], Path], tmp_path: Path, run_main: Main,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """At 72 columns, where sentences are broken over several lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "72")
    path = DATA / "cpu_train.pt.trace.json.gz" if name == "cpu_train" else real_capture(name)
    (tmp_path / "screen").write_text(run_main(words[0], path, *words[1:]).out, encoding="utf-8")
    claims = json.loads(run_main("check", path, "screen", "--format", "json").out)["claims"]
    assert sum(claim["holds"] is True for claim in claims) > 3
    assert [claim["text"] for claim in claims if claim["holds"] is False] == []
    assert [claim["text"] for claim in claims if claim["holds"] is None and claim["text"].endswith(".")] == []


def changed(sentence: str) -> Iterator[str]:
    """A sentence with each of its numbers changed in the last digit, and with each pair of them exchanged."""
    numbers = list(re.finditer(r"(?<![\w.])\d(?:[\d,]*\d)?(?:\.\d+)?(?!\w|[.,]\d)", sentence))
    for place, number in enumerate(numbers):
        yield f"{sentence[: number.end() - 1]}{(int(number[0][-1]) + 3) % 10}{sentence[number.end() :]}"
        for later in numbers[place + 1 :]:
            if later[0] != number[0]:
                between = sentence[number.end() : later.start()]
                yield f"{sentence[: number.start()]}{later[0]}{between}{number[0]}{sentence[later.end() :]}"


@pytest.mark.parametrize("name", ["train_small256", "llama_bf16"])
def test_no_sentence_with_other_numbers_is_true(name: str, evidence: Callable[[str], Evidence]) -> None:
    """Each of another claim: no number of a report's sentence can be changed unnoticed."""
    written = markdown.render(build_report(evidence(name)), {}).splitlines()
    true = {claim.text for claim in check(evidence(name), "\n\n".join(written)).claims}
    tried = [one for sentence in sorted(true) if len(sentence) < 400 for one in changed(sentence)]
    tried = [one for one in tried if one not in true]
    claims = check(evidence(name), "\n\n".join(tried)).claims
    assert len(tried) > 100
    assert [claim.text for claim in claims if claim.holds] == []
    assert sum(claim.holds is False for claim in claims) > 50


@pytest.mark.parametrize("name", ["train_small256", "llama_bf16", "graph_small256"])
@pytest.mark.parametrize("other", ["train_small256", "llama_bf16", "ddp2_small256", "t"])
def test_a_sentence_of_another_capture_is_true_only_if_this_one_says_it(
    name: str, other: str, evidence: Callable[[str], Evidence]
) -> None:
    letters = {}
    for capture in (name, other):
        text = markdown.render(build_report(evidence(capture)), {})
        letters[capture] = re.sub(r"[\s`*\\|]", "", text)
    claims = check(evidence(name), markdown.render(build_report(evidence(other)), {})).claims
    true = [claim.text for claim in claims if claim.holds]
    assert all(re.sub(r"[\s`*\\|]", "", text) in letters[name] for text in true)
    assert name == other or len(true) < len(claims) / 2


def test_a_sentence_is_of_the_capture_above_it(
    evidence: Callable[[str], Evidence], real_capture: Callable[[str], Path]
) -> None:
    """Of several captures a sentence with different figures needs the name of one."""
    both = make_evidence(gather((real_capture("train_small256"), real_capture("graph_small256"))))
    sentences = {}
    for name in ("train_small256", "graph_small256"):
        (section,) = (one for one in build_report(evidence(name)).sections if one.key == "times")
        sentences[name] = markdown.render_block(section.blocks[0], {})
    own, other = sentences.values()
    assert {claim.holds for claim in check(both, f"train_small256\n\n{own}").claims} == {True}
    assert True not in [claim.holds for claim in check(both, f"train_small256\n\n{other}").claims]
    assert True not in [claim.holds for claim in check(both, f"graph_small256\n\n{own}").claims]


@pytest.mark.parametrize(
    ("text", "code"), [(f"{ASKED}\n{TIMES}", 0), (f"{ASKED}\nForward would take 1 ms.", 4), ("", 0)]
)
def test_exit_codes(text: str, code: int, trace: Path, tmp_path: Path, run_main: Main) -> None:
    (tmp_path / "text").write_text(text, encoding="utf-8")
    assert run_main("check", trace, tmp_path / "text").code == code


def test_each_line_of_a_text_is_judged_by_itself(holds: Callable[[str], list[bool | None]]) -> None:
    text = f"# Ours\n\nIt is slow.\n\n- {ASKED}\n- forward takes 6 ms\n- {TIMES}\n\n{MATMUL} {TIMES}\n"
    assert holds(text) == [None, None, True, None, True, True, True]


@pytest.mark.parametrize(
    "text",
    [
        "Under the profiler, forward\n" * 20_000, "word " * 200_000, "[" * 100_000,
        f"wall_ms{' a=b' * 50_000}", "1," * 200_000,
        "░" * 200_000, "| a " * 50_000, "wall_ms phase=forward = 1e999999999999 ms",
        f"wall_ms phase=forward = {'9' * 10_000} ms",
    ],
    ids=range(9),
)  # fmt: skip
def test_a_hostile_text_is_read_in_seconds(text: str, holds: Callable[[str], list[bool | None]]) -> None:
    start = time.process_time()
    assert True not in holds(text)
    assert time.process_time() - start < 20

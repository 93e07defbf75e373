"""``verify``: what pairs of processes tell, how two programs take turns, the ledger, and the whole command on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from nsys_analyzer.analysis.comparison.change import Change
from nsys_analyzer.analysis.comparison.turns import ProcessPairs, TimedProcess
from nsys_analyzer.cli.main import cli
from nsys_analyzer.configuration import Run
from nsys_analyzer.errors import ConfigurationError, NsysAnalyzerError
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.system.process import JobResult
from nsys_analyzer.verify import side_by_side, verification
from nsys_analyzer.verify.ledger import (
    Entry,
    Prediction,
    append_entry,
    judge_change,
    prediction_holds,
    read_ledger,
    widening_factor,
    with_calibrated_intervals,
)
from nsys_analyzer.verify.section import describe_work_difference
from nsys_analyzer.verify.turns import _run_jobs, checkout
from nsys_analyzer.verify.verification import find_prediction
from tests.support.packed import unpack_fault

MOST = 10


def series(change: float, seed: int, spread: float = 0.02) -> ProcessPairs:
    """As many pairs as tell enough, ten at most: processes differ by 5 %, the two of a pair by ``spread``."""
    random, pairs = np.random.default_rng(seed), []
    while len(pairs) < MOST:
        ms = 10 * np.exp(random.normal(0, 0.05) + random.normal(0, spread / 2**0.5, 2))
        pairs.append((TimedProcess((ms[0],) * 6), TimedProcess((ms[1] * (1 + change),) * 6)))
        if (turns := ProcessPairs(tuple(pairs))).is_certain_enough:
            break
    return turns


def test_programs_that_were_not_changed_are_called_changed_in_fewer_than_one_of_twenty() -> None:
    # 600 series, looked at after each of their pairs: 30 may be wrong at 5 %.
    wrong = sum(series(0.0, seed).change.is_change for seed in range(600))
    assert wrong <= 30


@pytest.mark.parametrize(("change", "least"), [(-0.1, 0.99), (0.05, 0.7)])
def test_planted_changes_are_found_and_their_interval_holds_them(change: float, least: float) -> None:
    # A pair's spread of 2 %: of ten pairs the mean is known to 0.6 %, and the interval is about ± 3 %.
    found = [series(change, seed).change for seed in range(200)]
    assert sum(one.is_change and np.sign(one.ms) == np.sign(change) for one in found) >= least * 200
    inside = [one for one in found if one.low_share is not None and one.high_share is not None]
    assert sum(one.low_share <= change <= one.high_share for one in inside) >= 0.95 * len(inside)


def test_one_pair_tells_nothing_and_more_pairs_are_asked_for() -> None:
    one = ProcessPairs(((TimedProcess((10.0,) * 6), TimedProcess((9.0,) * 6)),))
    assert (one.change.low_ms, one.change.is_change, one.is_certain_enough, one.more_pairs) == (None, False, False, 3)
    assert not one.has_losses  # no losses
    # Four pairs are the fewest that may tell: with 16 = 1 + 3 · 5, t of three has no end, as (√16 ÷ 0.04)^(2/3) = 21.5.
    unclear = series(0.0, 1, spread=0.05)
    assert not unclear.change.is_change
    assert unclear.more_pairs is not None
    assert unclear.more_pairs > 0


@pytest.mark.parametrize(
    ("change", "pairs"),
    [
        # Of one pair the interval is ± 0.2 × √(11 ÷ 10 × (2 ln 100 + ln 11)) = ± 0.714: ln 0.4 is −0.916, 0.2 beyond.
        (-0.6, 1),
        (1.5, 1),  # the same the other way, ln 2.5 = 0.916
        # ln 0.57 is −0.562. Two pairs: ± 0.2 × √(21 ÷ 20 × (2 ln 100 + ln 21) ÷ 2) = ± 0.507, too near. Three: ± 0.417.
        (-0.43, 3),
    ],
)
def test_a_change_that_is_large_beyond_doubt_ends_the_measurement(change: float, pairs: int) -> None:
    turns = [series(change, seed, spread=0.02) for seed in range(50)]
    assert {len(one.pairs) for one in turns} == {pairs}
    assert all(one.change.is_change and np.sign(one.change.ms) == np.sign(change) for one in turns)
    assert all(one.change.low_share < change < one.change.high_share for one in turns if one.change.high_share)


def test_where_pairs_or_blocks_differ_by_more_than_any_should_one_pair_tells_nothing() -> None:
    # Blocks of −60, −86 and +11 %: a deviation of the logarithm of 0.85, of which three tell a pair to 0.49.
    after = TimedProcess((4.0, 4.0, 1.4, 1.4, 11.1, 11.1), block=2)
    turns = ProcessPairs(((TimedProcess((10.0,) * 6, block=2), after),))
    assert not turns.is_certain_enough
    assert not turns.change.is_change
    # Pairs of −80 % and −20 %: a deviation of 0.98.
    two = [(TimedProcess((10.0,) * 6), TimedProcess((ms,) * 6)) for ms in (2.0, 8.0)]
    assert not ProcessPairs((*two,)).change.is_change


def test_programs_whose_starts_differ_by_much_are_rarely_called_changed() -> None:
    # The largest deviation that is allowed for, 20 % between pairs: as above, 30 of 600 may be wrong.
    assert sum(series(0.0, seed, spread=0.2).change.is_change for seed in range(600)) <= 30


def test_a_program_without_a_seed_is_compared_with_itself() -> None:
    # Losses of another start differ by 20 %. One or two pairs do not tell whether that is chance: nothing is said yet.
    random, decided = np.random.default_rng(0), list[str]()
    for _ in range(100):
        losses = 2 * np.exp(random.normal(0, 0.2, (6, 2, 5)))
        ms = np.where(np.arange(2), 4.0, 10.0)  # a change that one pair would tell
        pairs = [tuple(TimedProcess((ms[side],) * 6, losses=tuple(pair[side])) for side in (0, 1)) for pair in losses]
        first = ProcessPairs((pairs[0],))  # type: ignore[arg-type]
        assert not first.work_differences
        assert first.unclear_loss_difference.kind == "loss"
        assert not first.is_certain_enough
        assert not first.change.is_change
        every = [ProcessPairs((*pairs[:n],)) for n in (2, 3, 4, 5, 6)]  # type: ignore[arg-type]
        decided += [said for turns in every for said in map(describe_work_difference, turns.work_differences)]
        assert every[1].is_certain_enough
    assert len(decided) <= 5  # of 100 programs, looked at again and again


@pytest.mark.parametrize("ended", [float("nan"), float("inf")])
def test_losses_that_are_no_numbers(ended: float) -> None:
    def side(*losses: float) -> TimedProcess:
        return TimedProcess((10.0,) * 6, losses=losses)

    both = ProcessPairs(((side(2.0, ended), side(2.0, ended)),) * 2)
    assert not both.work_differences
    after = ProcessPairs(((side(2.0, 2.0), side(2.0, ended)),) * 2)
    assert [*map(describe_work_difference, after.work_differences)] == [
        f"The loss of step 2 is 2 before the change and {ended} after it"
    ]
    before = ProcessPairs(((side(ended, 2.0), side(2.0, 9.0)),) * 2)
    assert [*map(describe_work_difference, before.work_differences)] == [
        f"The loss of step 1 is {ended} before the change and 2 after it"
    ]
    once = ProcessPairs(((side(2.0, 2.0), side(2.0, ended)), (side(2.0, 2.0), side(2.0, 2.0)), (side(2.0, 2.0),) * 2))
    assert not once.work_differences  # a start that ended so by chance


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (TimedProcess((9.0,) * 6, losses=(2.3, 2.2), rows=(8, 8)), []),
        (TimedProcess((9.0,) * 6, losses=(2.31, 2.25), rows=(8, 8)), []),  # within 5 % of the largest
        (
            TimedProcess((9.0,) * 6, losses=(2.3, 9.0), rows=(8, 8)),
            ["The loss of step 2 is 2.2 before the change and 9 after it"],
        ),
        (
            TimedProcess((9.0,) * 6, losses=(2.3, float("nan"))),
            ["The loss of step 2 is 2.2 before the change and nan after it"],
        ),
        (
            TimedProcess((9.0,) * 6, losses=(2.3, 2.2), rows=(4, 4)),
            ["A step computes 8 rows before the change and 4 after it: the batches differ"],
        ),
    ],
)
def test_another_computation_is_no_faster_one(other: TimedProcess, said: list[str]) -> None:
    before = TimedProcess((10.0,) * 6, losses=(2.3, 2.2), rows=(8, 8))
    turns = ProcessPairs(((before, other),) * 4)
    assert [*map(describe_work_difference, turns.work_differences)] == said
    assert judge_change(turns.change, said) == ("not comparable" if said else "faster")


#: A program of three blocks; it writes its name when it has its turn, and again when it gives it up.
BLOCKS = """
import os, sys
turn, name, order = int(os.environ["NSYS_ANALYZE_TURN"]), sys.argv[1], sys.argv[2]
for _ in range(3):
    os.write(turn, b".")
    os.read(turn, 1)
    for _ in range(2):
        with open(order, "a") as file:
            file.write(name)
"""


def job(folder: Path, name: str, text: str) -> dict[str, object]:
    script, log = folder / f"{name}.py", folder / f"{name}.log"
    script.write_text(text)
    command = [sys.executable, str(script), name, str(folder / "order")]
    return {"command": command, "folder": str(folder), "variables": {}, "log": str(log)}


def test_two_programs_take_turns_block_by_block(tmp_path: Path) -> None:
    assert side_by_side.run([job(tmp_path, name, BLOCKS) for name in "ab"]) == 0
    assert (tmp_path / "order").read_text() == "aabb" * 3


def test_a_program_that_fails_ends_both_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [job(tmp_path, "a", BLOCKS), job(tmp_path, "b", "raise ValueError('no such file')")]
    assert side_by_side.run(jobs) == 1
    assert capsys.readouterr().out == "ValueError: no such file\n"
    assert (tmp_path / "order").read_text() == "aa" * 3  # nobody else waits


def test_of_a_long_output_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_MAX_LOG_BYTES", 100_000)
    monkeypatch.setattr(side_by_side, "_READ_BYTES", 10_000)
    text = "for number in range(60_000): print('line', number)\nraise ValueError('in the end')"
    assert side_by_side.run([job(tmp_path, "a", text)]) == 1
    lines = (tmp_path / "a.log").read_text().splitlines()
    assert lines[-1] == "ValueError: in the end"
    assert "line 59999" in lines
    assert 1_000 <= (tmp_path / "a.log").stat().st_size <= 100_000


def test_what_a_program_starts_ends_with_its_pair(tmp_path: Path) -> None:
    """A child with a session of its own, which holds the output and the turn; the supervisor finds it all the same."""
    text = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[2], "w").write(str(child.pid))
"""
    assert _run_jobs([job(tmp_path, "a", text)], tmp_path, 60) == JobResult("ok")
    assert not psutil.pid_exists(int((tmp_path / "order").read_text()))


def entry(saved: float, prediction: Prediction | None = None) -> Entry:
    change = (10.0, 10 - saved, -saved, -saved - 0.5, -saved + 0.5)
    return Entry("faster", "2026-01-02T03:04:05+00:00", "old", "new", *change, 4, "0.2.0", prediction=prediction)


def test_the_ledger_keeps_what_was_measured_and_says_by_how_much_intervals_are_too_narrow(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ledger.jsonl"
    told = Prediction("host_sync", "The program waits", 2.0, 4.0)
    # The middle is 3, half the interval 1: savings of 3, 3.5, 4, 4.5 and 5 are 0, 0.5, 1, 1.5 and 2 halves away. Of
    # these 80 % lie within 1.6: inclusive deciles lie at 0.4 × (k − 1) places, the eighth at 3.2, a fifth from 1.5 on.
    for saved in (3.0, 3.5, 4.0, 4.5, 5.0):
        append_entry(entry(saved, told), path)
    entries = read_ledger(path)
    assert [one.saved_ms for one in entries] == [3.0, 3.5, 4.0, 4.5, 5.0]
    assert widening_factor(entries) == pytest.approx(1.6)
    with pytest.raises(NsysAnalyzerError, match="verify measured only 4 predictions"):
        widening_factor(entries[1:])
    shown = CliRunner().invoke(cli, ["history", "--ledger", str(path), "--calibrate"])
    assert "5 verifications: 5 faster." in shown.output
    assert "intervals must be 1.60 times as" in shown.output
    page = CliRunner().invoke(cli, ["history", "--ledger", str(path), "-o", str(tmp_path / "page.html")])
    assert page.exit_code == 0
    assert "<svg" in (tmp_path / "page.html").read_text()

    with path.open("a") as file:
        file.write('{"verdict": "faster"}\n')
    with pytest.raises(NsysAnalyzerError, match="line 6 is not an entry"):
        read_ledger(path)


@pytest.mark.parametrize(
    ("left", "told"),
    [
        (b"", ""),
        (b'{"verdict": "faster", "ti', "line 2 contains an unfinished entry"),
        (b"\0" * 40, "line 2 contains an unfinished entry"),  # a crash while the line was written
        (b'{"ver', "line 2 contains an unfinished entry"),
        (b"\n\r\n", ""),
    ],
)
def test_half_a_line_at_the_end_costs_no_other_entry(tmp_path: Path, left: bytes, told: str) -> None:
    path, said = tmp_path / "ledger.jsonl", list[str]()
    append_entry(entry(1.0), path)
    with path.open("ab") as file:
        file.write(left)
    append_entry(entry(2.0), path)
    assert [one.saved_ms for one in read_ledger(path, said.append)] == [1.0, 2.0]
    assert told in " ".join(said)
    assert bool(said) == bool(told)
    # An entry that stands behind half of another, in one line, is read as well.
    path.write_bytes(path.read_bytes() + b'{"verdict":"fas' + path.read_bytes().splitlines()[0] + b"\n")
    assert [one.saved_ms for one in read_ledger(path)] == [1.0, 2.0, 1.0]
    path.write_bytes(b"no ledger\n")
    with pytest.raises(NsysAnalyzerError, match="line 1 is not an entry"):
        read_ledger(path)


def test_too_few_entries_to_calibrate_by_are_shown_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append_entry(entry(3.0, Prediction("host_sync", "", 2.0, 4.0)), path)
    for _ in range(5):
        append_entry(entry(3.0, Prediction("host_sync", "", 2.0, 2.0)), path)  # an interval of width 0
    shown = CliRunner().invoke(cli, ["history", "--ledger", str(path), "--calibrate"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "6 verifications: 6 faster." in shown.output
    assert "verify measured only 1 prediction. To calibrate intervals, 5 are needed." in shown.output


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    os.mkfifo(path)
    for use in (read_ledger, lambda path: append_entry(entry(1.0), path)):
        with pytest.raises(NsysAnalyzerError, match=r"ledger\.jsonl is a pipe or a device, not a file"):
            use(path)


@pytest.mark.parametrize(("saved", "held"), [(3.0, True), (4.4, True), (4.6, False), (1.4, False)])
def test_a_prediction_holds_where_the_measured_interval_meets_it(saved: float, held: bool) -> None:
    # The measured interval is the saving ± 0.5, the predicted one 2 to 4.
    change = Change(10.0, 10.0 - saved, -saved - 0.5, -saved + 0.5, 4, 4)
    assert prediction_holds(Prediction("host_sync", "", 2.0, 4.0), change) == held


def test_the_finding_that_is_gone_was_acted_on(tmp_path: Path) -> None:
    (before,) = gather([unpack_fault("item", tmp_path)]).captures
    (after,) = gather([unpack_fault("none", tmp_path)]).captures
    told, why = find_prediction(before, after, None)
    assert told is not None
    assert (told.finding, why) == ("host_sync", "")
    assert find_prediction(before, before, None) == (
        None, "Every finding of BEFORE is still found: name the finding that was acted on with --finding.",
    )  # fmt: skip
    asked, _ = find_prediction(before, before, "host_sync")
    assert asked == told


def test_intervals_are_widened_by_a_ledger_and_say_so(tmp_path: Path) -> None:
    path, told = tmp_path / "ledger.jsonl", Prediction("host_sync", "", 2.0, 4.0)
    for _ in range(5):
        append_entry(entry(5.0, told), path)  # each lies two halves of its interval away
    captures = gather([unpack_fault("item", tmp_path)]).captures
    before, after = captures[0].findings[0], with_calibrated_intervals(captures, path)[0].findings[0]
    assert after.saves_ms_high - after.saves_ms == pytest.approx(2 * (before.saves_ms_high - before.saves_ms))
    assert "widened by a factor of 2.00, from 5 savings" in str(after.derivation)


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs the command on processes that were measured: its exit status and its output."""
    monkeypatch.chdir(tmp_path)
    (before,) = gather([unpack_fault("item", tmp_path)]).captures
    before = replace(before, run=Run(command="python old.py"))
    Path("new.py").touch()
    monkeypatch.setattr(verification, "_capture_of_program", lambda *_: before)
    monkeypatch.setattr(verification, "load_runs", lambda *_: ())

    def invoked(*pairs: tuple[TimedProcess, TimedProcess]) -> tuple[int, str]:
        monkeypatch.setattr(verification, "take_turns", lambda *_: iter(pairs))
        words = ["verify", ".", "--profiler", "none", "--time-limit", "1000", "--", "python", "new.py"]
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        return done.exit_code, done.output

    return invoked


PAIR = (TimedProcess((10.0,) * 6, losses=(2.0,)), TimedProcess((4.0,) * 6, losses=(2.0,)))


def test_the_verdict_is_said_where_the_ledger_cannot_be_written(verified: Callable[..., tuple[int, str]]) -> None:
    Path(".nsys-analyze").write_text("a file where the folder of the ledger would be")
    code, said = verified(PAIR)
    assert code == 0
    assert "Faster: a step takes 10 ms → 4 ms (−60.0 %, −80.4 % to −18.3 % at 95 %), in 1 pair" in " ".join(
        said.split()
    )
    assert ".nsys-analyze/ledger.jsonl cannot be written (File exists). See: ls -ld .nsys-analyze" in said


def test_one_pair_of_other_losses_is_not_judged(verified: Callable[..., tuple[int, str]]) -> None:
    other = replace(PAIR[1], losses=(3.0,))
    code, said = verified((PAIR[0], other))
    assert code == 5
    loss = "The loss of step 1 is 2 before the change and 3 after it: more pairs would show whether this difference is"
    assert loss in " ".join(said.split())
    code, said = verified((PAIR[0], other), (PAIR[0], other))
    assert code == 4
    assert "Not comparable" in said


TRAINING = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), 50.0 if "--large" in sys.argv else 1e-3)
inputs, targets = torch.randn(8, 16), torch.randint(0, 4, (8,))
while True:
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if SLOW:
        norms = [parameter.norm().item() for parameter in model.parameters() for _ in range(100)]
"""


def test_what_of_a_command_line_stays_where_it_is_beside_an_old_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter outside and data that git ignores stay; a program is that of the commit, or the error."""
    repository = tmp_path / "repository"
    (repository / "data").mkdir(parents=True)
    monkeypatch.chdir(repository)
    for path, text in {
        ".gitignore": "data/\n", "train.py": "old", "data/a.bin": "", "later.py": "", "../python": "",
    }.items():  # fmt: skip
        Path(path).write_text(text)
    for words in (["init", "-q"], ["add", "train.py", ".gitignore"], ["commit", "-qm", "one"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], check=True)
    Path("train.py").write_text("new")
    with checkout("HEAD", ("../python", "train.py", "--data", "data/a.bin", "data")) as (folder, words, moved):
        inside = str(repository / "data")
        assert words == (f"{repository}/../python", "train.py", "--data", f"{inside}/a.bin", inside)
        assert (folder / "train.py").read_text() == "old"
        assert moved == (repository, folder)
    assert not folder.exists()
    with pytest.raises(ConfigurationError, match=r"later\.py is not in commit HEAD"), checkout("HEAD", ("later.py",)):
        pass


@pytest.mark.slow
def test_a_program_that_was_made_faster_from_its_commit_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def git(*words: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *name, *words], check=True, capture_output=True)

    def analyze(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, [*words, "--profiler", "none", "--", sys.executable, "train.py", *more])
        return done.exit_code, f"{done.output}{done.exception}"

    more: list[str] = []
    Path("train.py").write_text(TRAINING.replace("SLOW", "True"))
    assert analyze("run", "--output-dir", "runs")[0] == 0
    code, said = analyze("verify", "runs")
    assert code == 1
    assert "The command lines of the old and the new program are equal" in said

    git("init", "-q")
    git("add", "train.py")
    git("commit", "-qm", "slow")
    assert analyze("run", "--output-dir", "runs", "--rerun")[0] == 0
    Path("train.py").write_text(TRAINING.replace("SLOW", "False"))
    code, said = analyze("verify", "runs", "--time-limit", "300")
    assert code == 0, said
    assert "Faster: a step takes" in said
    more = ["--large"]
    code, said = analyze("verify", "runs", "--before", f"{sys.executable} train.py")
    assert code == 4, said
    assert "Not comparable" in said
    assert [json.loads(line)["verdict"] for line in Path(".nsys-analyze/ledger.jsonl").read_text().splitlines()] == [
        "faster", "not comparable",
    ]  # fmt: skip

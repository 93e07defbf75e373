"""Tests that each strategy of the distributed target trains the same model, and that the right rank is late."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from nsys_analyzer.analysis.transformer.models import ModelSize  # noqa: E402
from nsys_analyzer.capture.launcher import make_launch_command  # noqa: E402
from nsys_analyzer.configuration import Run  # noqa: E402
from nsys_analyzer.errors import ConfigurationError  # noqa: E402
from nsys_analyzer.inputs.manifest import make_run  # noqa: E402
from profiling_targets import distributed, parallelism  # noqa: E402
from profiling_targets.distributed import Lateness, main, parse_arguments, plant_delay  # noqa: E402
from profiling_targets.harness import Config  # noqa: E402
from profiling_targets.parallelism import ModuleOnOtherRank, Pipeline, Rank, SharedTraining, Sharing  # noqa: E402
from profiling_targets.transformer import Transformer  # noqa: E402

ROOT = Path(__file__).parent.parent
SIZE = ModelSize("tiny", d_model=32, d_ff=64, num_layers=3, num_heads=4, vocab_size=50)
STEPS, WARMUP = 3, 2
TINY = [
    "--device", "cpu", "--d-model", "32", "--d-ff", "64", "--num-layers", "3", "--num-heads", "4", "--vocab-size", "50",
    "--batch-size", "4", "--context-length", "16", "--steps", str(STEPS), "--warmup", str(WARMUP),
]  # fmt: skip
ALONE = Sharing("none")


def config(**changes: Any) -> Config:
    return Config(**{"size": SIZE, "context_length": 16, "batch_size": 4, "device": "cpu", **changes})


def losses(training: SharedTraining, steps: int = WARMUP + STEPS) -> list[float]:
    """The loss of each step, before the step's update."""
    found = []
    for _ in range(steps):
        distributed.step(training, synchronized=False)
        found.append(training.value.item())
    return found


# --- two processes ---


@pytest.fixture(scope="module")
def of_strategies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The results of both ranks, by strategy."""
    folder = tmp_path_factory.mktemp("results")
    late = {"ddp": ["--late-rank", "1", "--late-ms", "20"], "pipeline": ["--microbatches", "2"]}
    found = {}
    for strategy in ("ddp", "fsdp", "tensor", "pipeline"):
        words = ["--strategy", strategy, *late.get(strategy, ()), "--results", str(folder / f"{strategy}.json"), *TINY]
        command = make_launch_command([sys.executable, "-m", "profiling_targets.distributed", *words], 2)
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        paths = [folder / f"{strategy}_rank{rank}.json" for rank in range(2)]
        found[strategy] = [json.loads(path.read_text()) for path in paths]
    return found


@pytest.mark.slow
def test_ranks_with_one_batch_train_as_one_process_does(of_strategies: dict[str, list[dict[str, Any]]]) -> None:
    expected = pytest.approx(losses(SharedTraining(config(), ALONE, Rank()))[-1], rel=1e-4)
    assert [one["loss"] for one in of_strategies["tensor"]] == [expected, expected]
    assert [one["loss"] for one in of_strategies["pipeline"]] == [None, expected]  # the first has no targets


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_with_their_own_batches_train_as_one_with_both(
    strategy: str, of_strategies: dict[str, list[dict[str, Any]]]
) -> None:
    both = SharedTraining(config(batch_size=8), ALONE, Rank())
    of_ranks = [SharedTraining(config(), ALONE, Rank()), Second(config(), ALONE, Rank())]
    both.host_tokens = torch.cat([one.host_tokens for one in of_ranks])
    both.host_targets = torch.cat([one.host_targets for one in of_ranks])
    # Batches are equally large: the mean of two means is the mean of all, and so are the gradients.
    mean = sum(one["loss"] for one in of_strategies[strategy]) / 2
    assert mean == pytest.approx(losses(both)[-1], rel=1e-4)


class Second(SharedTraining):
    """Has the batch of rank 1."""

    def _random_tokens(self, which: int) -> torch.Tensor:
        self.rank = Rank(1, 2)
        return super()._random_tokens(which)


@pytest.mark.slow
def test_results_say_who_is_which_and_who_was_late(of_strategies: dict[str, list[dict[str, Any]]]) -> None:
    first, second = of_strategies["ddp"]
    said = [make_run(one, Path("x")) for one in (first, second)]
    assert [(one.rank, one.world_size, one.steps) for one in said] == [(0, 2, STEPS), (1, 2, STEPS)]
    assert (second["strategy"], second["late_rank"]) == ("ddp", 1)
    assert "delay" not in first["times_ms"]
    delays = second["times_ms"]["delay"]
    assert len(delays) == STEPS
    assert min(delays) >= 20  # a sleep is never shorter
    for one in (first, second):  # gradients of each step wait for the late rank; but its first sleep may have begun
        assert sum(one["times_ms"]["step"]) >= sum(delays[1:])


@pytest.mark.slow
def test_parts_of_a_model_are_all_of_it() -> None:
    held = []
    for number in range(2):
        stage = Pipeline.__new__(Pipeline)
        stage.rank, stage.config = Rank(number, 2), config()
        model = stage.prepare_model(Transformer(config()))
        held.append({name for name, _ in model.named_parameters()})
    names = {f"model.{name}" for name, _ in Transformer(config()).named_parameters()}
    assert held[0] | held[1] == names
    assert not held[0] & held[1]
    assert "model.embedding.weight" in held[0]
    assert {"model.norm.weight", "model.head.weight"} <= held[1]
    # 3 layers: the first rank has layers below 3·1 ÷ 2 = 1
    assert {name.split(".")[2] for name in held[0] if ".blocks." in name} == {"0"}


# --- one process ---


def test_a_rank_without_a_launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(TINY) == 2
    assert "RANK is not set: no launcher started this process. Start it with torchrun" in capsys.readouterr().err


def test_a_late_rank_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--late-rank", "1", *TINY]) == 2
    assert "There is no rank 1: the ranks are 0 to 0" in capsys.readouterr().err


def test_a_batch_that_cannot_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallelism, "Stage", lambda *_: None)
    with pytest.raises(ConfigurationError, match="A batch of 4 cannot be cut into 3 microbatches"):
        Pipeline(config(), Sharing("pipeline", microbatches=3), Rank(0, 2))
    with pytest.raises(ConfigurationError, match="3 layers cannot make 4 stages"):
        Pipeline(config(), Sharing("pipeline", microbatches=2), Rank(0, 4))


def test_what_is_elsewhere_changes_nothing() -> None:
    x = torch.randn(2, 3)
    assert ModuleOnOtherRank()(x, x) is x


@pytest.mark.parametrize(("late_rank", "delayed"), [(0, 1), (1, 0)])
def test_the_late_rank_sleeps_before_its_input(late_rank: int, delayed: int) -> None:
    training = SharedTraining(config(), ALONE, Rank())
    delays = plant_delay(Lateness(late_rank, late_ms=1), training)
    distributed.step(training, synchronized=True)
    assert len(delays) == delayed
    assert all(ms >= 1 for ms in delays)


def test_the_configuration_is_that_of_a_run() -> None:
    made, sharing, lateness, _ = parse_arguments(["--strategy", "pipeline", *TINY])
    assert (sharing.microbatches, lateness.late_rank, made.mode) == (4, None, "train")
    assert made.run() == Run(
        model="d32-L3", d_model=32, d_ff=64, num_layers=3, num_heads=4, vocab_size=50, context_length=16, batch_size=4,
        mode="train", precision="fp32", attention="unfused", compile=False, cuda_graph=False, seed=0,
        device="cpu", steps=STEPS, warmup_steps=WARMUP,
    )  # fmt: skip

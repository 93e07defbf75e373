"""The target with planted faults, on a tiny model and a CPU."""

from __future__ import annotations

import gc
import io
import json
import math
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

import faults  # noqa: E402
import in_turns  # noqa: E402
import llama  # noqa: E402
import resnet  # noqa: E402
from fault_training import (  # noqa: E402
    NETWORKS,
    Batches,
    Case,
    Switches,
    Training,
    copied_when_needed,
    load,
    there_and_back,
    tokenize,
)  # fmt: skip
from faults import CHANGES, CONTROL, FAULTS, compare, main, timed_ms  # noqa: E402

from nsys_analyzer.analysis.transformer.models import ModelSize  # noqa: E402
from profiling_targets import harness  # noqa: E402

SIZE = ModelSize("tiny", d_model=32, d_ff=64, num_layers=2, num_heads=4, vocab_size=50)
TINY = [
    "--device", "cpu", "--no-compile", "--d-model", "32", "--d-ff", "64", "--num-layers", "2", "--num-heads", "4",
    "--vocab-size", "50", "--batch-size", "2", "--context-length", "16", "--steps", "2", "--warmup", "1",
]  # fmt: skip
ON_CPU = [name for name, one in FAULTS.items() if not (one.fault.needs_gpu or one.remedy.needs_gpu)]


@pytest.fixture(autouse=True)
def _what_is_global_stays() -> Iterator[None]:
    wanted, precision = harness._ranges_enabled, torch.get_float32_matmul_precision()
    yield
    harness._ranges_enabled = wanted
    torch.set_float32_matmul_precision(precision)
    gc.unfreeze()


def case(switches: Switches, network: str = "transformer") -> Case:
    """A tiny training that compiles nothing, makes its batches itself and keeps few records."""
    records = min(switches.heap_records, 100)
    quick = replace(switches, compiled=False, workers=0, heap_records=records)
    return Case(quick, SIZE, batch_size=2, context_length=16, device="cpu", network=network)


def losses(switches: Switches, steps: int = 3, network: str = "transformer") -> list[float]:
    training = Training(case(switches, network))
    found = []
    for _ in range(steps):
        training.step()
        found.append(training.loss.item())
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_change(name: str) -> None:
    one = FAULTS[name]
    changed = [field for field in vars(CONTROL) if getattr(one.fault, field) != getattr(one.remedy, field)]
    allowed = {"none": 0, "collector": 2}  # the control; the collections go, and the records are frozen
    assert len(changed) == allowed.get(name, 1), changed
    assert one.description


@pytest.mark.parametrize(("program", "name"), [(one, name) for one in (llama, resnet) for name in one.FAULTS])
def test_a_fault_of_a_plain_program_is_one_change(program: ModuleType, name: str) -> None:
    one = program.FAULTS[name]
    changed = [field for field in vars(program.CONTROL) if getattr(one.fault, field) != getattr(one.remedy, field)]
    allowed = {"none": 0, "collector": 2, "padding": 2}  # without padding, fewer sequences hold the same tokens
    assert len(changed) == allowed.get(name, 1), changed


@pytest.mark.parametrize("name", ["none", "item", "pageable", "checkpoint", "recomputation", "memory_format"])
def test_a_residual_network_learns_the_same_with_and_without_a_fault(name: str) -> None:
    losses = []
    for switches in resnet.FAULTS[name][1:]:
        training = resnet.Training(replace(switches, workers=0, precision="fp32"), device="cpu", tiny=True, turns=None)
        training.train(2)
        losses.append(training.loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_programs_take_turns() -> None:
    program = "import sys; print('waiting', flush=True)\nfor _ in sys.stdin: print('step_ms', sys.argv[1], flush=True)"
    times = in_turns.compare(*([sys.executable, "-c", program, step_ms] for step_ms in ("2.5", "1.5")))
    assert times == ([2.5] * 7, [1.5] * 7)


def test_a_program_waits_for_its_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(2 * "your turn\n"))
    turns = in_turns.time_in_turns("cpu")
    for _ in range(8 + 2 * (2 + 10)):  # the warm-up, and in each turn the steps that settle and those that are timed
        next(turns)
    with pytest.raises(SystemExit):  # there is no third turn
        next(turns)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["waiting", "step_ms", "step_ms"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_trains_before_and_after_it(name: str) -> None:
    before, after = CHANGES[name][1:]
    assert [field for field in vars(CONTROL) if getattr(before, field) != getattr(after, field)] in (
        ["precision"], ["batch_size"],
    )  # fmt: skip
    for switches in (before, after):
        found = losses(switches)
        assert found[0] != found[-1]


@pytest.mark.parametrize("name", ON_CPU)
def test_fault_and_remedy_learn_the_same(name: str) -> None:
    fault, remedy = (losses(switches) for switches in FAULTS[name][1:])
    assert all(math.isfinite(loss) for loss in fault)
    assert fault[0] != fault[-1]  # the optimizer changes something
    # Attention in one kernel rounds to bf16 in other places than the naive one.
    assert fault == pytest.approx(remedy, rel=1e-2 if name == "attention" else 1e-6)


@pytest.mark.parametrize("network", [name for name in NETWORKS if name != "transformer"])
@pytest.mark.parametrize("name", ["item", "casts", "checkpoint"])
def test_every_network_learns_with_and_without_a_fault(name: str, network: str) -> None:
    fault, remedy = (losses(switches, network=network) for switches in FAULTS[name][1:])
    assert fault[0] != fault[-1]
    # A convolution sums bf16 in another order where its input lies otherwise in memory.
    assert fault == pytest.approx(remedy, rel=1e-2 if network == "convolution" else 1e-6)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_gives_logits_for_each_place(network: str) -> None:
    one = case(replace(CONTROL, precision="fp32"), network)
    tokens, _, features = Batches(one)[0]
    assert Training(one).model(tokens, features).shape == (2, 16, 50)  # (B, S, V)


def test_attention_of_another_network_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fault", "attention", "--network", "convolution", *TINY]) == 2
    assert "no attention of its own" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--remedy"], ["--compare"]])
@pytest.mark.parametrize(("name", "needs"), [("tiny_batch", "a CUDA graph"), ("fp32", "TF32")])
def test_a_remedy_that_needs_a_gpu_says_so(
    name: str, needs: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(math.isfinite(loss) for loss in losses(FAULTS[name].fault, steps=1))  # the fault itself needs none
    assert main(["--fault", name, *options, *TINY]) == 2
    said = capsys.readouterr().err
    assert needs in said
    assert said.count("\n") == 1


def test_copies_that_change_nothing() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    assert torch.equal(there_and_back(x), x)
    assert there_and_back(x).dtype == x.dtype


def test_tokens_of_text_are_those_it_was_made_from() -> None:
    assert tokenize("ababa", {"a": 0, "b": 1, "ab": 2}) == [2, 2, 0]  # each the longest piece
    one, other = (Batches(case(replace(CONTROL, tokenized=tokenized))) for tokenized in (False, True))
    assert other.texts
    assert all(torch.equal(one[index][0], other[index][0]) for index in range(5))


def test_workers_make_the_batches_of_the_data_set_in_its_order() -> None:
    one = case(CONTROL)
    made = Batches(one)
    loaded = load(replace(one, switches=replace(one.switches, workers=1)))
    for index, batch in zip(range(5), copied_when_needed(loaded, "cpu"), strict=False):
        assert all(torch.equal(got, wanted) for got, wanted in zip(batch, made[index], strict=True))


def test_no_worker_lives_on_after_a_timed_block(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []

    def step(training: Training) -> None:
        one_step(training)
        alive.append(len(multiprocessing.active_children()))

    one_step = Training.step
    monkeypatch.setattr(Training, "step", step)
    one = case(CONTROL)
    training = Training(replace(one, switches=replace(one.switches, workers=1)))
    for _ in range(2):  # the second block makes its workers anew
        assert timed_ms(training, steps=1) > 0
        assert not multiprocessing.active_children()
    assert set(alive) == {1}


def test_every_tensor_of_features_is_added() -> None:
    tokens, _, features = Batches(case(replace(CONTROL, feature_tensors=2)))[0]
    assert features.shape == (2, 2, 16, 32)  # (F, B, S, d)
    model = Training(case(replace(CONTROL, precision="fp32"))).model
    with torch.no_grad():
        assert torch.allclose(model(tokens, features), model(tokens, features.sum(0, keepdim=True)), atol=1e-5)
        assert not torch.allclose(model(tokens, features), model(tokens, features[:1]), atol=1e-2)


def test_a_checkpoint_holds_the_weights() -> None:
    training = Training(case(FAULTS["checkpoint"].fault))
    training.step()
    weights = training.model.state_dict()
    assert training.saved.keys() == weights.keys()
    assert all(torch.equal(training.saved[name], weight) for name, weight in weights.items())


def test_norms_are_those_of_gradients_and_weights() -> None:
    each, total = (Training(case(switches)) for switches in FAULTS["item"][1:])
    each.step()
    total.step()
    count = len(each.parameters)
    assert len(each.norms) == 2 * count
    assert total.total_norms
    for norm, norms in zip(total.total_norms, (each.norms[:count], each.norms[count:]), strict=True):
        assert norm.item() == pytest.approx(math.hypot(*norms), rel=1e-5)


def test_the_remedy_takes_the_records_from_the_garbage_collector() -> None:
    fault, remedy = (Training(case(switches)) for switches in FAULTS["collector"][1:])
    fault.prepare()
    assert any(one is fault.heap for one in gc.get_objects())
    remedy.prepare()
    assert not any(one is remedy.heap for one in gc.get_objects())  # frozen
    fault.prepare()
    assert any(one is fault.heap for one in gc.get_objects())  # and not for the one that runs next


def test_ranges_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(harness, "_ranges_enabled", True)  # a target that ran without ranges turned them off
    monkeypatch.setattr(harness, "range_functions", lambda: (opened.append, lambda: None))
    training = Training(case(replace(CONTROL, norms="total", checkpoint="blocking")))
    training.step()
    inside = {"scaled dot product attention"}
    expected = ["step", "data", "forward", "loss", "backward", "log", "optimizer", "checkpoint"]
    assert [name for name in opened if name not in inside] == expected


def test_rounds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def timed(training: Training, steps: int) -> float:
        order.append(training.switches.norms)
        return float(steps)

    monkeypatch.setattr(faults, "timed_ms", timed)
    cases = (case(switches) for switches in FAULTS["item"][1:])
    compared = compare(*cases, steps=4, warmup=1, rounds=2)
    assert order == 3 * ["each", "total"]  # the warm-up, then two rounds
    assert compared == ([4, 4], [4, 4])


def test_command_line_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fault", "item", *TINY, "--no-ranges", "--no-window", "--results", str(tmp_path / "r.json")]) == 0
    assert " ms" in capsys.readouterr().out
    results = json.loads((tmp_path / "r.json").read_text())
    assert results.items() >= {"fault": "item", "remedy": False, "model": "d32-L2", "steps": 2}.items()
    assert results["step_ms"] > 0
    assert main(["--fault", "eager", "--compare", *TINY, "--results", str(tmp_path / "r.json")]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["fault", "remedy"]
    results = json.loads((tmp_path / "r.json").read_text())
    assert (results["rounds"], len(results["fault_ms"]), len(results["remedy_ms"])) == (7, 7, 7)
    assert results["gpu"] is None


@pytest.mark.parametrize("wrong", ["--steps=0", "--warmup=-1", "--fault=unknown"])
def test_impossible_options(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([wrong])
    assert wrong.partition("=")[0] in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", FAULTS)
def test_on_a_gpu_every_remedy_runs(name: str) -> None:
    for switches in FAULTS[name][1:]:
        training = Training(replace(case(switches), device="cuda"))
        training.step()
        assert math.isfinite(training.loss.item())

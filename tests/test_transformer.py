from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from nsys_analyzer.analysis.transformer.models import MODEL_SIZES, ModelSize  # noqa: E402
from nsys_analyzer.configuration import Options, Run  # noqa: E402
from profiling_targets import harness, transformer  # noqa: E402
from profiling_targets.harness import Config, make_parser, read_options  # noqa: E402

TINY = ModelSize("tiny", d_model=32, d_ff=64, num_layers=2, num_heads=4, vocab_size=50)


def config(**changes: Any) -> Config:
    return Config(**{"size": TINY, "context_length": 16, "batch_size": 2, "device": "cpu", **changes})


class Counted(TorchDispatchMode):  # type: ignore[misc]
    """Counts the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [TINY, *MODEL_SIZES], ids=lambda size: size.name)
def test_every_size_has_the_parameters_of_the_formula(size: ModelSize) -> None:
    with torch.device("meta"):  # shapes without memory
        model = transformer.Transformer(config(size=size))
    assert sum(parameter.numel() for parameter in model.parameters()) == size.parameters


def test_a_forward_pass_launches_nine_products_a_layer_and_one() -> None:
    training = transformer.Training(config())
    with Counted() as counted:
        training.forward()
    # per layer 4 projections, 2 attention products, 3 of the feed-forward; the head: 9·2 + 1 = 19
    assert counted.calls["mm"] + counted.calls["bmm"] == 19


def test_unfused_attention_is_attention() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    masked = torch.ones(16, 16, dtype=torch.bool).triu(1)
    ours = transformer.unfused_attention(q, k, v, masked)
    torch.testing.assert_close(ours, transformer.sdpa_attention(q, k, v, masked))


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    cos, sin = transformer.rope_tables(16, 8)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = (transformer.rotate(x.expand(1, 1, 16, 8), cos, sin)[0, 0] for x in (q, k))  # (16, 8) each
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(16))
    torch.testing.assert_close(turned_q[5] @ turned_k[2], turned_q[12] @ turned_k[9])  # both 3 apart


def test_norm_is_root_mean_square() -> None:
    x = torch.randn(3, 5, 32) * 7
    torch.testing.assert_close(transformer.RMSNorm(32)(x), torch.nn.functional.rms_norm(x, (32,), eps=1e-5))


def test_no_token_sees_the_future() -> None:
    training = transformer.Training(config(mode="forward"))
    training.forward()
    before = training.logits.clone()
    training.tokens[:, 10:] = (training.tokens[:, 10:] + 1) % TINY.vocab_size
    training.forward()
    torch.testing.assert_close(training.logits[:, :10], before[:, :10])
    assert not torch.equal(training.logits[:, 10:], before[:, 10:])


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"attention": "sdpa"}])
def test_training_learns_its_batch(changes: dict[str, str]) -> None:
    training = transformer.Training(config(**changes))
    losses = []
    for _ in range(20):
        for phase in training.phases().values():
            phase()
        losses.append(training.value.item())
    assert losses[0] == pytest.approx(math.log(TINY.vocab_size), rel=0.3)  # it knows nothing yet
    assert losses[-1] < 0.95 * losses[0]


def test_forward_mode_keeps_nothing_for_a_backward_pass() -> None:
    training = transformer.Training(config(mode="forward"))
    assert list(training.phases()) == ["forward"]
    training.forward()
    assert not training.logits.requires_grad


class Ranges:
    """Stands in for torch.cuda.nvtx."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []

    def mark(self, name: str) -> None:
        del name

    def range_push(self, name: str) -> None:
        self.open.append(name)
        self.seen.append(" > ".join(self.open))

    def range_pop(self) -> None:
        self.open.pop()


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranges]:
    recorded = Ranges()
    for name in ("mark", "range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, getattr(recorded, name))
    harness.range_functions.cache_clear()
    yield recorded
    harness.range_functions.cache_clear()
    monkeypatch.setattr(harness, "_ranges_enabled", True)


OPTIONS = [
    "--d-model", "32", "--d-ff", "64", "--num-layers", "2", "--num-heads", "4", "--vocab-size", "50",
    "--context-length", "16", "--batch-size", "2", "--device", "cpu", "--warmup", "1", "--steps", "2",
]  # fmt: skip


ONE_STEP = Options[Any](device="cpu", warmup_steps=0, steps=1, cuda_graph=False)


def run(*options: str) -> int:
    made, given = read_options(make_parser("transformer", ""), [*OPTIONS, *options])
    return harness.run(lambda: transformer.Training(made), made, made.run(), given.results, ranges=not given.no_ranges)


def test_the_ranges_of_a_run(ranges: Ranges) -> None:
    assert run() == 0
    step = ["step", *(f"step > {phase}" for phase in ("forward", "loss", "backward", "optimizer"))]
    attention = [
        f"step > forward > scaled dot product attention{inner}"
        for _ in (0, 1)  # blocks
        for inner in ("", " > computing attention scores", " > computing softmax", " > final matmul")
    ]
    # one warm-up step and two measured ones
    expected = Counter({"warmup": 1})
    for name in (*step, *attention):
        expected[f"warmup > {name}"] += 1
        expected[name] += 2
    assert Counter(ranges.seen) == expected
    assert not ranges.open


def test_without_ranges(ranges: Ranges) -> None:
    assert run("--no-ranges") == 0
    assert not ranges.seen


def test_the_results(tmp_path: Path, ranges: Ranges, capsys: pytest.CaptureFixture[str]) -> None:
    del ranges
    path = tmp_path / "results.json"
    assert run("--mode", "forward-backward", "--results", str(path)) == 0
    results = json.loads(path.read_text())
    assert {key: results[key] for key in ("model", "d_model", "num_layers", "device", "status", "warmup_steps")} == {
        "model": "d32-L2", "d_model": 32, "num_layers": 2, "device": "cpu", "status": "ok", "warmup_steps": 1,
    }  # fmt: skip
    times = results["times_ms"]
    assert {phase: len(values) for phase, values in times.items()} == {
        "forward": 2, "loss": 2, "backward": 2, "step": 2,
    }  # fmt: skip
    for forward, loss, backward, step in zip(*times.values(), strict=True):
        assert 0 < forward + loss + backward <= step
    assert "forward" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError("no room")]
)
def test_out_of_memory_is_a_result(error: Exception, tmp_path: Path) -> None:
    def build() -> harness.Workload:
        raise error

    path = tmp_path / "results.json"
    assert harness.run(build, ONE_STEP, Run(), path) == 3
    results = json.loads(path.read_text())
    assert (results["status"], results["message"], results["times_ms"]) == ("oom", str(error), {})


def test_other_errors_are_not() -> None:
    def build() -> harness.Workload:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        harness.run(build, ONE_STEP, Run(), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "huge"], "Error: Unknown model 'huge'. Known models: small"),
        (["--device", "cpu", "--precision", "tf32"], "Error: TF32 is a precision of NVIDIA's tensor cores"),
        (["--device", "cpu", "--cuda-graph"], "Error: --cuda-graph needs a GPU"),
        (["--num-heads", "7"], "Error: Model 'small': d_model 768 is not a multiple of num_heads 7"),
    ],
)
def test_what_cannot_run(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["transformer", *options])
    assert transformer.main() == 2
    assert capsys.readouterr().err.startswith(message)

from typing import Any

import pytest

from nsys_analyzer.analysis.transformer.models import (
    MODEL_SIZES,
    Configuration,
    ModelSize,
    configuration_from_name,
    find_model,
    mode_from_text,
    model_from_dimensions,
    precision_from_text,
    resolve_model,
)
from nsys_analyzer.errors import ConfigurationError


# parameters = L·(4·d² + 3·d·d_ff + 2·d) + 2·10,000·d + d; with d_ff = 4·d that is L·(16·d² + 2·d) + 20,001·d
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("small", 128_625_408),  # 12·(16·589,824 + 1,536) + 20,001·768
        ("medium", 423_183_360),  # 24·(16·1,048,576 + 2,048) + 20,001·1,024
        ("large", 969_411_840),  # 36·(16·1,638,400 + 2,560) + 20,001·1,280
        ("xl", 1_998_235_200),  # 48·(16·2,560,000 + 3,200) + 20,001·1,600
        ("2.7B", 3_406_809_600),  # 32·(16·6,553,600 + 5,120) + 20,001·2,560
        ("xl-2026", 3_406_809_600),
        # 50·(4·4,608² + 3·4,608·12,288 + 2·4,608) + 20,001·4,608 = 50·254,813,184 + 92,164,608
        ("10B", 12_832_823_808),
    ],
)
def test_parameters(name: str, parameters: int) -> None:
    assert find_model(name).parameters == parameters


def test_d_head_is_whole_for_every_size() -> None:
    # 768/12, 1024/16, 1280/20, 1600/25, 2560/32, 2560/32, 4608/36
    assert [model.d_head for model in MODEL_SIZES] == [64, 64, 64, 64, 80, 80, 128]


@pytest.mark.parametrize(
    ("text", "name"),
    [("Small", "small"), (" XL ", "xl"), ("2.7b", "2.7B"), ("2_7B", "2.7B"), ("2p7b", "2.7B"), ("xl_2026", "xl-2026"),
     ("10b", "10B")],
)  # fmt: skip
def test_find_model_spellings(text: str, name: str) -> None:
    assert find_model(text).name == name


@pytest.mark.parametrize("text", ["huge", "", "smaller", "7b", "27b"])
def test_find_model_unknown_names_the_known(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Known models: small, medium, large, xl, 2\.7B, xl-2026, 10B"):
        find_model(text)


def test_model_from_dimensions() -> None:
    assert model_from_dimensions(2560, 10240, 32, 32).name == "2.7B"
    assert model_from_dimensions(768, 2048, 12, 12).name == "d768-L12"
    assert model_from_dimensions(768, 3072, 12, 12, vocab_size=50_257).vocab_size == 50_257


def test_resolve_model_lets_the_dimensions_decide() -> None:
    shape = (2560, 10240, 32, 32)
    assert resolve_model(None, None) is None
    assert resolve_model("xl", None) == find_model("xl")
    assert resolve_model(None, shape) == find_model("2.7B")
    assert resolve_model("xl_2026", shape) == find_model("xl-2026")
    assert resolve_model("xl", shape) == find_model("2.7B")
    assert resolve_model("tiny", (64, 256, 2, 4)) == ModelSize("tiny", 64, 256, 2, 4)
    with pytest.raises(ConfigurationError, match="Unknown model 'tiny'"):
        resolve_model("tiny", None)


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [((770, 3072, 12, 12), "770 is not a multiple of num_heads 12"), ((768, 3072, 0, 12), "below 1")],
)
def test_impossible_dimensions(dimensions: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelSize("odd", *dimensions)


def test_precision_and_mode_spellings() -> None:
    precisions = {"torch.bfloat16": "bf16", "FP32": "fp32", "half": "fp16", "int8": "int8"}
    assert {text: precision_from_text(text) for text in precisions} == precisions
    both = "forward+backward"
    modes = {"fwd": "forward", "fwd+bwd": both, both: both, "Training step": "train", "eval": "eval"}
    assert {text: mode_from_text(text) for text in modes} == modes


@pytest.mark.parametrize(
    ("stem", "model", ("context_batch_precision_mode_attention")),
    [
        ("small_ctx128", "small", (128, None, None, None, None)),
        ("train_small256", "small", (256, None, None, "train", None)),
        ("bf16_sdpa_small1024", "small", (1024, None, "bf16", None, "sdpa")),
        ("medium-ctx-512-bf16", "medium", (512, None, "bf16", None, None)),
        ("2.7B_ctx256_b4", "2.7B", (256, 4, None, None, None)),
        ("2p7b_128", "2.7B", (128, None, None, None, None)),
        ("xl_seq1024", "xl", (1024, None, None, None, None)),
        ("xl-2026_ctx128", "xl-2026", (128, None, None, None, None)),
        ("small_128_forward", "small", (128, None, None, "forward", None)),
        ("Large_context_length_512_batch_size_8_tf32", "large", (512, 8, "tf32", None, None)),
        ("small_fwd_bwd", "small", (None, None, None, "forward+backward", None)),
        ("10B_bs2", "10B", (None, 2, None, None, None)),
        ("2.7B", "2.7B", (None, None, None, None, None)),
        ("xl-2026-03-01_ctx256", "xl", (256, None, None, None, None)),
        ("small_2025-06-12_ctx256", "small", (256, None, None, None, None)),
        ("small256_fp32_vs_bf16", "small", (256, None, None, None, None)),
        ("ctx512_bf16", None, (512, None, "bf16", None, None)),
    ],
)
def test_configuration_from_name(
    stem: str, model: str | None, context_batch_precision_mode_attention: tuple[Any, ...]
) -> None:
    known = find_model(model) if model else None
    expected = Configuration(known, *context_batch_precision_mode_attention, source="file name")
    assert configuration_from_name(stem) == expected


@pytest.mark.parametrize(
    "stem",
    ["mysmallmodel", "smaller", "xlarge_128", "x-large_128", "large_file", "report1", "2025-06-12", "small_20250612",
     "small-2025-06-12", "seq_3", "bf16_run", "small_vs_medium_ctx128", "small_ctx128_ctx256", "gpt2-small_ctx128",
     "bert-large-512", ""],
)  # fmt: skip
def test_configuration_from_name_none_when_unsure(stem: str) -> None:
    assert configuration_from_name(stem) is None

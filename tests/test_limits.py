"""Measured figures against what the device can do: peaks, ceilings, and memory that must live."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.transformer.peaks import PEAKS, find_peaks
from nsys_analyzer.experiments.model import Results
from nsys_analyzer.experiments.section import (
    MANTISSA_BITS,
    CeilingsCase,
    CeilingsFigures,
    MinimumMemory,
    Rate,
    check_limits,
    conditions,
    fitted_exponent,
    precision_found,
    precision_title,
    precision_warnings,
)
from nsys_analyzer.report.model import Block, Listing, Paragraph, Table
from nsys_analyzer.runs.rows import Row

GPU = {"gpu": "NVIDIA H200", "torch": "2.11.0", "python": "3.12.3"}
GIB = 2**30


def results(bits: int = 23, gpu: bool = True) -> Results:
    machine = GPU if gpu else {**GPU, "gpu": None, "threads": 2}
    ceiling = CeilingsFigures(product_bits=bits, product_flops_per_s=50e12, copy_bytes_per_s=4.2e12)
    row = Row("profiling_targets.ceilings", CeilingsCase("cuda", "fp32"), "ok", "", ceiling, machine)
    return Results((Row("m", {"device": "cuda"}, "ok", "", {}, machine),), {"fp32": row})


def plain(text: object) -> str:
    return str(text).replace("\N{NO-BREAK SPACE}", " ")


def table(blocks: tuple[Block, ...]) -> Table:
    return next(block for block in blocks if isinstance(block, Table))


def broken(blocks: tuple[Block, ...]) -> list[str]:
    return [str(line) for block in blocks if isinstance(block, Listing) for line in block.lines]


def test_the_highest_rate_beside_its_limits() -> None:
    # 10 TFLOP in 200 ms are 50 TFLOP/s, of a peak of 67; 1 TB in 250 ms are 4 TB/s, of 4.8
    rates = [
        Rate("slow", "fp32", 1e12, None, 200),
        Rate("fast", "fp32", 10e12, 1e12, 200),
        Rate("copy", "fp32", None, 1e12, 250),
    ]
    found = check_limits(results(), rates)
    rows = table(found).rows
    assert [(row[0], plain(row[2])) for row in rows] == [("fast", "50 TFLOP/s"), ("fast", "5 TB/s")]
    assert rows[0][-1] == pytest.approx(50 / 67)
    assert broken(found) == ["Impossible rate: fast is 104.2\N{NO-BREAK SPACE}% of its limit."]  # 5 ÷ 4.8


def test_nothing_beyond_a_limit_is_said_so() -> None:
    found = check_limits(results(), [Rate("fast", "fp32", 10e12, None, 200)])
    assert broken(found) == []
    assert isinstance(found[-1], Paragraph)


def test_memory_that_fits_a_cache_says_nothing_of_bandwidth() -> None:
    # 100 MB moved in 0.01 ms would be 10 TB/s, twice the peak: it came from the cache
    found = check_limits(
        results(), [Rate("small", "fp32", 1e6, 100e6, 0.01), Rate("again", "fp32", 1e6, 1e9, 0.1, 1e6)]
    )
    assert [plain(row[2]) for row in table(found).rows] == ["100 GFLOP/s"]  # 1e6 ÷ 0.01 ms


def test_without_a_peak_the_ceiling_is_the_limit() -> None:
    found = check_limits(results(gpu=False), [Rate("fast", "fp32", 60e9, None, 1)])
    assert table(found).rows[0][-1] == pytest.approx(60 / 50)
    assert broken(found) == ["Above the measured ceiling: fast is 120.0\N{NO-BREAK SPACE}% of its limit."]


def test_memory_below_what_must_live() -> None:
    found = check_limits(
        results(),
        [],
        [
            ("one", MinimumMemory("good", 3 * GIB, 2 * GIB, "x")),
            ("two", MinimumMemory("loose", 4 * GIB, 2 * GIB, "weights")),
            ("two", MinimumMemory("bad", 1 * GIB, 2 * GIB, "weights")),
        ],
    )
    assert [row[3] for row in table(found).rows] == [1.5, 0.5]
    assert broken(found) == ["Impossible memory: bad shows less than its minimum (weights)."]


def test_fp32_that_ran_as_tf32_is_a_warning() -> None:
    assert list(precision_warnings(results(bits=23))) == []
    (line,) = precision_warnings(results(bits=10))
    assert "TF32" in line
    text = conditions(results(bits=10), {}).text
    assert "fp32 ran as TF32 (10 bits of mantissa)" in text


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), ("NVIDIA H100 80GB HBM3", "H100 80GB HBM3"),
     ("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"), ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
     ("NVIDIA GeForce RTX 5090", "GeForce RTX 5090"), ("NVIDIA B200", "B200"), ("NVIDIA GB200", "GB200"),
     ("NVIDIA B300 SXM6 AC", "B300 SXM6 AC"), ("NVIDIA H20", "H20"), ("NVIDIA A10", "A10"),
     ("AMD Instinct MI300X", "AMD Instinct MI300X"), ("AMD Instinct MI355X", "AMD Instinct MI355X")],
)  # fmt: skip
def test_peaks_by_the_name_of_the_gpu(gpu: str, name: str) -> None:
    found = find_peaks(gpu)
    assert found
    assert found.name == name


def test_an_unknown_gpu_has_no_peak() -> None:
    for other in (
        "NVIDIA H100 Something",
        "NVIDIA L40",
        "NVIDIA H200 NVL",
        "GH200 480GB",
        "GeForce RTX 4090 Laptop GPU",
    ):
        assert find_peaks(other) is None  # each holds the name of one that is known, or the start of it
    assert find_peaks(None) is None


def test_peaks_are_in_an_order_that_silicon_knows() -> None:
    for peaks in PEAKS:
        rates = peaks.flops_per_s
        known = [rates[one] for one in ("fp32", "tf32", "bf16", "fp8", "fp4") if one in rates]
        assert known == sorted(known)
        assert rates["bf16"] == rates["fp16"]
        # Half the bits, twice the rate, to the digits of a datasheet; Blackwell Ultra has three times that of fp8.
        assert rates.get("fp8", 2 * rates["bf16"]) == pytest.approx(2 * rates["bf16"], rel=0.02)
        assert peaks.source


@given(st.floats(0.1, 3), st.floats(0.1, 1e9), st.lists(st.integers(1, 10**6), min_size=2, max_size=6, unique=True))
def test_an_exact_power_is_found(exponent: float, factor: float, xs: list[int]) -> None:
    assert fitted_exponent([(x, factor * x**exponent) for x in xs]) == pytest.approx(exponent, rel=1e-6)


def test_one_point_has_no_exponent() -> None:
    assert fitted_exponent([(2, 4), (2, 5)]) is None


@pytest.mark.parametrize(
    ("bits", "asked", "found"),
    [
        (23, "other", "fp32"),
        (10, "fp32", "tf32"),  # of fp32 tensors; fp16 keeps as many
        (7, "other", "bf16"),
        (None, "bf16", "bf16"),  # not counted: what was asked for
    ],
)
def test_bits_tell_the_precision(bits: int | None, asked: str, found: str) -> None:
    assert precision_found(bits, asked) == found
    assert bits is None or MANTISSA_BITS[found] == bits


@pytest.mark.parametrize(
    ("bits", "title"),
    [(23, "fp32"), (10, "TF32 (10 bits of mantissa)"), (7, "bf16 (7 bits of mantissa)"), (3, "3 bits")],
)
def test_titles(bits: int, title: str) -> None:
    assert precision_title(bits) == title

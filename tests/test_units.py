import pytest

from nsys_analyzer.report.model import Cell, MedianRange, Spread, Unit
from nsys_analyzer.report.units import (
    format_cell,
    format_count,
    format_ms,
    format_ms_range,
    format_number,
    format_percent,
)

SPACE = "\N{NO-BREAK SPACE}"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "count", "0"),
        (1300, "count", "1,300"),
        (11_166.0, "count", "11,166"),
        (12.5, "count", "12.5"),
        (2.999, "count", "3"),
        (0.0, "ms", "0.000"),
        (0.0004, "ms", "0.000"),
        (5.3351, "ms", "5.335"),
        (40.19, "ms", "40.19"),
        (171.84, "ms", "171.8"),
        (3100.2, "us", "3,100.2"),
        (-4.5, "ms", "\N{MINUS SIGN}4.500"),
        (0.5644, "percent", "56.4 %"),
        (1.0, "percent", "100.0 %"),
        (0.0004, "percent", "0.0 %"),
        (51.2, "factor", "51.20×"),
        (0.801, "factor", "0.801×"),
        (2.62e11, "flop", "262 GFLOP"),
        (1.5e15, "flop", "1.5 PFLOP"),
        (3.2e18, "flop", "3.2 EFLOP"),
        (6.05e12, "flop/s", "6.05 TFLOP/s"),
        (999.7e9, "flop/s", "1 TFLOP/s"),
        (999.4e9, "flop/s", "999 GFLOP/s"),
        (12.0, "flop", "12 FLOP"),
        (150_110_011_392, "bytes", "139.8 GiB"),
        (4.8e12, "bytes/s", "4.8 TB/s"),
    ],
)
def test_numbers(value: float, unit: Unit, text: str) -> None:
    assert format_number(value, unit) == text.replace(" ", SPACE)
    assert str(format_cell(value, unit)) == text.replace(" ", SPACE)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ms", "–"),
        (None, "text", "–"),
        ("forward", "text", "forward"),
        ("", "text", ""),
        ("gemm<4>", "code", "gemm<4>"),
        ("", "code", ""),
        (Spread(21.0, None), "ms", "21.00"),
        (Spread(9.036, 0.021), "ms", "9.036 ± 0.021"),
        (Spread(40.19, 10.221), "ms", "40.19 ± 10.22"),
        (Spread(84.1, 0.7), "ms", "84.10 ± 0.70"),  # the digits of the mean
        (Spread(0.0, 0.0), "ms", "0.000 ± 0.000"),
    ],
)
def test_cells(value: Cell, unit: Unit, text: str) -> None:
    assert str(format_cell(value, unit)) == text.replace(" ", SPACE)


def test_in_sentences() -> None:
    assert format_percent(0.239) == f"23.9{SPACE}%"


@pytest.mark.parametrize(
    ("value", "text"), [(0.204, "20.4 %"), (-0.006, "−0.6 %"), (0.0004, "0.0 %"), (-0.0004, "0.0 %"), (0.0, "0.0 %")]
)
def test_percentages(value: float, text: str) -> None:
    assert format_percent(value).replace(SPACE, " ") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (MedianRange(34.829, 33.76, 51.97), "35 (34 – 52)"),  # a range of 18 ms leaves whole milliseconds a meaning
        (MedianRange(22.171, 22.14, 22.2), "22.17 (22.14 – 22.20)"),
        (MedianRange(9.0447, 9.0446, 9.0448), "9.045"),
        (MedianRange(105.3, 102.5, 105.5), "105.3 (102.5 – 105.5)"),
        (MedianRange(4.0, 4.0, 4.0), "4.000"),
        (MedianRange(3000.0, 1000.0, 9000.0), "3,000 (1,000 – 9,000)"),
        (MedianRange(2.0, -29.0, 25.0), "2 (−29 – 25)"),  # as a rank that is not late
    ],
)
def test_a_median_has_the_digits_that_its_range_supports(value: MedianRange, text: str) -> None:
    assert format_cell(value, "ms").replace(SPACE, " ") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9.3712, "9.37"), (52.04, "52"), (1234.5, "1,234"), (999.6, "1,000"), (0.0, "0"), (7.11e-15, "0"),
        (0.0000123, "0.000012"), (-0.5, "−0.5"), (-7e-15, "0"),
    ],
)  # fmt: skip
def test_three_digits_and_none_below_a_nanosecond(value: float, text: str) -> None:
    assert format_ms(value) == f"{text}{SPACE}ms"
    assert format_ms_range(0.0, 7.11e-15) == f"0.00{SPACE}ms"


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "launch", "1 launch"),
        (0.5, "launch", "0.5 launches"),
        (644.0, "kernel", "644 kernels"),
        (0, "step", "0 steps"),
    ],
)
def test_a_number_of_things(number: float, noun: str, text: str) -> None:
    assert format_count(number, noun).replace(SPACE, " ") == text

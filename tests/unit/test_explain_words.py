"""Figures in the units that leave a whole number in front, also where they are rounded."""

import pytest

from flashgen.explain.words import bytes_text, time_text


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_600, "1 MB"),
        (67_108_864, "67.1 MB"), (26_038_239_232, "26 GB"), (999.6e9, "1 TB"), (2.5e15, "2,500 TB"),
    ],
)  # fmt: skip
def test_bytes(number, said) -> None:
    assert bytes_text(number) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 us"), (1.514e-4, "151 us"), (9.994e-4, "999 us"), (9.996e-4, "1 ms"),
        (0.0108, "10.8 ms"), (0.9996, "1 s"), (12.3, "12.3 s"),
    ],
)  # fmt: skip
def test_times(seconds, said) -> None:
    assert time_text(seconds) == said

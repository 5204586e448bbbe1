"""Dropout's random words: those of the published generator, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType

import pytest
import torch

from flashgen.philox import kept, kept_scale, philox
from support.variants import shipped_module

MODULE: ModuleType = shipped_module("dropout_causal_d64")

# kat_vectors of Random123 (https://github.com/DEShawResearch/random123): philox4x32 of 7 rounds.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "5f6fb709 0d893f64 4f121f81 4f730a48",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "5207ddc2 45165e59 4d8ee751 8c52f662",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
]

Generator = Callable[..., Iterable[torch.Tensor]]

SHAPE = (3, 4, 45, 70)


def _words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize("generator", [philox, MODULE._philox], ids=["oracle", "module"])
@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, answer: str, generator: Generator) -> None:
    assert list(generator(_words(counter), _words(key))) == _words(answer)


def _kept_by_module(shape: tuple[int, ...], dropout_p: float, seed: int) -> torch.Tensor:
    weights = torch.ones(shape, dtype=torch.float64)
    dropped = MODULE._dropped(weights, dropout_p, torch.tensor([seed]))
    keeps = dropped != 0.0
    assert torch.equal(dropped, keeps.double() * kept_scale(dropout_p))
    return keeps


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345, -(2**63)])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 16, 16), (1, 2, 17, 40), SHAPE], ids=str)
def test_the_modules_own_reference_keeps_the_same(shape: tuple[int, ...], seed: int) -> None:
    """It makes words for all pairs at once, the oracle for each pair."""
    for dropout_p in (0.1, 0.5, 0.97):
        assert torch.equal(_kept_by_module(shape, dropout_p, seed), kept(shape, dropout_p, seed))


def test_a_weight_is_kept_by_its_positions_alone() -> None:
    """Whatever the lengths are, and how many heads and batch entries there are."""
    everything = kept(SHAPE, 0.4, 7)
    assert torch.equal(kept((2, 3, 20, 37), 0.4, 7), everything[:2, :3, :20, :37])
    part = kept((1, 2, 30, 61), 0.4, 7, first=(2, 1, 15, 9))
    assert torch.equal(part, everything[2:, 1:3, 15:, 9:])


@pytest.mark.parametrize("dropout_p", [0.02, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_should_be(dropout_p: float) -> None:
    """Altogether, of each row and of each column: within 5 standard deviations."""
    keeps = kept((2, 2, 512, 512), dropout_p, 3).double()
    for dims in ((0, 1, 2, 3), (3,), (2,), (0, 2, 3)):
        share = keeps.mean(dims)
        count = keeps.numel() // share.numel()
        deviation = (dropout_p * (1 - dropout_p) / count) ** 0.5
        assert (share - (1 - dropout_p)).abs().max() < 5 * deviation


@pytest.mark.parametrize(
    ("axis", "step"), [(0, 1), (1, 1), (2, 1), (2, 8), (3, 1), (3, 8), (3, 16)]
)
def test_neighbours_are_kept_independently(axis: int, step: int) -> None:
    """Of what is kept, half of what is beside it is too; those of one call among them."""
    keeps = kept((4, 4, 256, 256), 0.5, 11)
    length = keeps.shape[axis] - step
    one, other = keeps.narrow(axis, 0, length), keeps.narrow(axis, step, length)
    agree = (one == other).double().mean().item()
    assert abs(agree - 0.5) < 5 * 0.5 * one.numel() ** -0.5


@pytest.mark.parametrize("other", [6, 5 + 2**32, 5 + 2**40, -5])
def test_seeds_differ_in_each_of_their_bits(other: int) -> None:
    one, another = kept((1, 1, 256, 256), 0.5, 5), kept((1, 1, 256, 256), 0.5, other)
    agree = (one == another).double().mean().item()
    assert abs(agree - 0.5) < 5 * 0.5 / 256


def test_what_a_small_probability_drops_a_larger_one_does_too() -> None:
    few, many = kept(SHAPE, 0.2, 9), kept(SHAPE, 0.6, 9)
    assert bool((few | ~many).all()) and bool((few & ~many).any())


def test_the_least_and_the_largest_probability() -> None:
    """Steps are of 2^-16. Below the first nothing is dropped; at the last a few are still kept."""
    assert bool(kept(SHAPE, 0.0, 1).all()) and bool(kept(SHAPE, 2**-18, 1).all())
    assert kept_scale(2**-18) == 1.0
    shape = (2, 2, 1024, 1024)
    nearly_all = kept(shape, 1 - 2**-53, 1)
    assert kept_scale(1 - 2**-53) == 2**16
    assert abs(int(nearly_all.sum()) - 64) < 5 * 8
    assert torch.equal(_kept_by_module(shape, 1 - 2**-53, 1), nearly_all)

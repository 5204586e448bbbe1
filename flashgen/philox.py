"""Which weights dropout keeps, in eager torch: the oracle of every kernel's random numbers.

The weight of a query and a key is kept or not by 16 bits of Philox-4x32-7 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011, whose fewest rounds without a failed test are
7): a function of the seed, the batch entry, the query head and the two positions. So dropout does
not depend on a kernel's tile sizes, and the backward pass computes the forward's choice again. One
call makes four words, for queries and keys whose positions differ in bit 3 alone; the halves of a
word, the lower one first, belong to two adjacent keys. With the usual layouts of matrix units, all
eight numbers belong to one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

#: How many values the random number of a weight has: probabilities have steps of one part of it.
NUMBERS = 2**16


def philox(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, ...]:
    """The four words of each counter.

    Args:
        counter: four words, int64 tensors that broadcast, of values below 2^32.
        key: two words, numbers or tensors likewise.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # 64 bits of a product: int64 wraps around, which is what modulo 2^64 means.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high >> 32) & _WORD) ^ c1 ^ k0,
            high & _WORD,
            ((low >> 32) & _WORD) ^ c3 ^ k1,
            low & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def num_dropping(dropout_p: float) -> int:
    """How many of the random numbers drop their weight: the nearest, but not all of them.

    Args:
        dropout_p: the probability that a weight is dropped, from 0 to before 1.
    """
    return min(round(dropout_p * NUMBERS), NUMBERS - 1)


def kept_scale(dropout_p: float) -> float:
    """The factor of kept weights, which leaves the mean of each weight unchanged."""
    return NUMBERS / (NUMBERS - num_dropping(dropout_p))


def kept(
    shape: Sequence[int],
    dropout_p: float,
    seed: torch.Tensor | int,
    device: Any = None,
    first: Sequence[int] = (0, 0, 0, 0),
) -> torch.Tensor:
    """Which weights are kept, a bool tensor of the weights' shape.

    Args:
        shape: (batch, num_q_heads, q_len, kv_len).
        dropout_p: the probability that a weight is dropped, from 0 to before 1, in steps of 2^-16.
        seed: 64 bits, a number or an int64 tensor of one element.
        device: where the result goes.
        first: where they begin: a batch entry, a query head, a query, a key.
    """
    import torch

    b, h, q_idx, kv_idx = (
        torch.arange(start, start + size, device=device).reshape(-1, *(1,) * after)
        for start, size, after in zip(first, shape, (3, 2, 1, 0), strict=True)
    )
    seed = int(seed)
    # The counter: positions without bit 3, and those of keys without bit 0 too.
    query, key = q_idx >> 4 << 3 | q_idx & 7, kv_idx >> 4 << 2 | kv_idx >> 1 & 3
    words = philox((key, query, h, b), (seed & _WORD, seed >> 32 & _WORD))
    q_bit, kv_bit = ((x >> 3 & 1).bool() for x in (q_idx, kv_idx))
    of_first, of_second = (torch.where(kv_bit, words[i + 1], words[i]) for i in (0, 2))
    word = torch.where(q_bit, of_second, of_first)
    number = torch.where((kv_idx & 1).bool(), word >> 16, word & 0xFFFF)
    return number >= num_dropping(dropout_p)

"""The work of a training step's attention, forward and backward, as sympy expressions.

Standard attention as frameworks run it, step by step, each step a kernel that streams all scores:

| step | reads | writes |
| --- | --- | --- |
| S = Q K^T | | S |
| mask, score function | S each | S each |
| softmax | S | P |
| dropout | P | P, and a byte for what is kept |
| O = P V | P | |
| dV = P^T dO | P | |
| dP = dO V^T | | dP |
| dropout's | dP, the bytes | dP |
| softmax's | P, dP | dS |
| score function's | dS | dS |
| dQ = dS K, dK = dS^T Q | dS each | |

The mask costs no pass in the backward pass: for a hidden element, P is 0, and so is dS.
FlashAttention-1 recomputes the scores, one product more, and for each tile of keys reads and writes
the tensors of queries. Delta, the row sum of O times dO, is computed when a row is first read, so O
is read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE
from flashgen.budget.traffic import QK_HEAD_DIM as D
from flashgen.budget.traffic import TILES
from flashgen.budget.traffic import V_HEAD_DIM as V
from flashgen.explain.algorithms import DROPS, FLASH_1, HEADS, SCORES, STANDARD
from flashgen.symbols import KV_LEN, Q_LEN

_ALL = HEADS * Q_LEN * KV_LEN
_QUERY_ROW, _OUTPUT_ROW, _STATISTIC = D * ITEMSIZE, V * ITEMSIZE, 4
_KEYS = HEADS * KV_LEN * (D + V) * ITEMSIZE
_ROWS = HEADS * Q_LEN

# Scores that the steps from dO to dQ and dK read and write.
_BACKWARD_PASSES = 1 + 1 + 2 * DROPS + 3 + 2 * SCORES + 2


@dataclass(frozen=True)
class Step:
    """Forward and backward pass of one way to compute attention.

    Attributes:
        name: its name.
        flops: FLOPs of all products.
        bytes: bytes that SMs read and write.
    """

    name: str
    flops: Any
    bytes: Any


# Two products forward; those of dV and dP are v wide, those of dQ and dK as wide as q and k.
STANDARD_STEP = Step(
    "standard",
    2 * _ALL * (3 * D + 3 * V),
    STANDARD.read.of_sms
    + STANDARD.written.of_sms
    + _ALL * (_BACKWARD_PASSES * ITEMSIZE + DROPS)
    # dV: dO and dV. dP: dO and V. dQ: K and dQ. dK: Q and dK.
    + 2 * _ROWS * (_QUERY_ROW + _OUTPUT_ROW)
    + 2 * _KEYS,
)

_VISITED = TILES * BLOCK_M
_LATER = sympy.Max(0, _VISITED - _ROWS)

FLASH_1_STEP = Step(
    "FlashAttention-1",
    2 * TILES * BLOCK_M * BLOCK_N * (4 * D + 3 * V),
    FLASH_1.read.of_sms
    + FLASH_1.written.of_sms
    + 2 * _KEYS  # K and V, dK and dV
    + _VISITED * (2 * _QUERY_ROW + _OUTPUT_ROW)  # Q and dO read, dQ written
    + _LATER * _QUERY_ROW  # dQ read
    + _ROWS * _OUTPUT_ROW  # O read
    + 2 * _VISITED * _STATISTIC,  # log-sum-exp and delta
)

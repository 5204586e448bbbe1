"""A step of decoding with a cache: a few queries of grouped heads, each of which sees every key.

    python -m benchmarks.decoding [--json FILE] [--fa4]

bfloat16, head_dim 128, 32 query heads and 8 of keys. The time of such a step is for reading keys
and values, so a rate is their bytes a second; DRAM's bandwidth is the limit if the cache does not
fit L2. `flashgen, heads apart` is the same module with tiles of one head each. Timings are as
in benchmarks.forward, twice, the second time in reverse order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.accuracy import WRONG, Inputs, relative_error
from benchmarks.call_tables import decoding_table
from benchmarks.fa4 import heads_first
from benchmarks.measuring import noted
from benchmarks.passes import as_results
from benchmarks.peers import Call, compiled_flex, load_module
from benchmarks.record import environment, kernels_of, protocol
from benchmarks.script import make_parser, sees_gpu, tell
from benchmarks.timing import TIMERS

MODULE = "full_d128"
HEAD_DIM, HEADS, KV_HEADS = 128, 32, 8


@dataclass(frozen=True)
class Step:
    """One call: sequences, queries of each, and the number of its keys."""

    batch: int
    q_len: int
    kv_len: int

    @property
    def name(self) -> str:
        """The step's name."""
        return f"{self.batch} x {self.q_len} of {self.kv_len:,}"

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, counted once."""
        return 2 * 2 * self.batch * KV_HEADS * self.kv_len * HEAD_DIM


STEPS = (
    *(Step(batch, 1, 8192) for batch in (1, 16, 64)),
    Step(128, 1, 1024),
    Step(16, 1, 32768),
    *(Step(16, q_len, 8192) for q_len in (4, 16)),
)


def tensors_of(step: Step, device: torch.device) -> Inputs:
    """q, k and v from the standard normal distribution, the same every time."""
    torch.manual_seed(0)

    def tensor(heads: int, length: int) -> torch.Tensor:
        shape = (step.batch, heads, length, HEAD_DIM)
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    keys = (KV_HEADS, step.kv_len)
    return tensor(HEADS, step.q_len), tensor(*keys), tensor(*keys)


def ways(qkv: Inputs, with_fa4: bool) -> Iterator[tuple[str, AbstractContextManager[Call]]]:
    """All implementations of a step by name: contexts that give the call, as peers do."""
    module = load_module(MODULE)
    own = partial(module.attention, *qkv)
    yield "flashgen", nullcontext(own)
    yield "flashgen, heads apart", _heads_apart(module, own)
    yield "SDPA cuDNN", _sdpa(SDPBackend.CUDNN_ATTENTION, qkv)
    yield "SDPA flash", _sdpa(SDPBackend.FLASH_ATTENTION, qkv)
    yield "FlexAttention", nullcontext(partial(compiled_flex(), *qkv, enable_gqa=True))
    if with_fa4:
        yield "FA4", _fa4(qkv)


@contextmanager
def _heads_apart(module: Any, call: Call) -> Iterator[Call]:
    """Tiles of one head each. Kept launches depend on this choice, and are cleared."""
    with patch.object(module, "_packed_heads", lambda q, k, block_m: 1):
        module._LAUNCHES.clear()
        yield call
    module._LAUNCHES.clear()


@contextmanager
def _sdpa(backend: SDPBackend, qkv: Inputs) -> Iterator[Call]:
    with sdpa_kernel(backend):
        yield partial(scaled_dot_product_attention, *qkv, enable_gqa=True)


@contextmanager
def _fa4(qkv: Inputs) -> Iterator[Call]:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    tensors = tuple(x.transpose(1, 2).contiguous() for x in qkv)
    yield partial(heads_first, flash_attn_func, tensors, qkv[0].shape[0])


def new_row(step: Step) -> dict[str, Any]:
    """A step before its first measurement."""
    return asdict(step) | {"step": step.name, "bytes": step.bytes, "unavailable": {}}


def measure(step: Step, row: dict[str, Any], qkv: Inputs, **options: Any) -> None:
    """Adds the milliseconds of every implementation to a row of results, by both timings.

    One that raises, or whose output is not attention, is noted with the reason and left out from
    then on; for flashgen, this is an error.

    Args:
        step: the call.
        row: its row.
        qkv: its tensors.
        options: with_fa4; reverse, for the reverse order; timers, by the names of figures.
    """
    found = list(ways(qkv, options["with_fa4"]))
    right = [_exact_heads(qkv)]
    for name, way in reversed(found) if options["reverse"] else found:
        if name in row["unavailable"]:
            continue
        with torch.no_grad(), noted(row, name), way as call:
            error = relative_error(as_results(call()), right)
            if not error <= WRONG:
                raise ValueError(f"wrong output, {error:.2g} off")
            for key, time_ms in options["timers"].items():
                ms = float(f"{time_ms(call):.4g}")
                row.setdefault(key, {}).setdefault(name, []).append(ms)


def _exact_heads(qkv: Inputs) -> torch.Tensor:
    """The output's first and last head of the batch in float64, (2, q_len, head_dim)."""
    heads = [tuple(x[i, i].double() for x in qkv) for i in (0, -1)]
    return torch.stack([scaled_dot_product_attention(*head) for head in heads])


def main() -> int:
    """Measures, and shows the table."""
    options = make_parser("decoding", __doc__, with_fa4=True).parse_args()
    if not sees_gpu("decoding"):
        return 2
    device = torch.device("cuda")
    rows = [new_row(step) for step in STEPS]
    for reverse in (False, True):
        for step, row in zip(STEPS, rows, strict=True):
            qkv = tensors_of(step, device)
            measure(step, row, qkv, with_fa4=options.fa4, reverse=reverse, timers=TIMERS)
            print(step.name, {name: ms[-1] for name, ms in row["ms"].items()}, flush=True)
    document = {
        "benchmark": "decoding",
        "environment": environment(device),
        "protocol": protocol(),
        "module": MODULE,
        **kernels_of(load_module(MODULE)),
        "cells": rows,
    }
    tell(document, decoding_table, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

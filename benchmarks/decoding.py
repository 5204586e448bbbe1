"""A step of decoding with a cache: a few queries of grouped heads, each of which sees every key.

    python -m benchmarks.decoding [--json FILE] [--fa4]

bfloat16, head_dim 128, 32 query heads and 8 of keys. What such a step takes is reading keys and
values, so that a rate is bytes of these a second; those of DRAM are the limit where the cache does
not fit L2. `flashgen, heads apart` is the same module with tiles of one head each. Timings are
those of benchmarks.forward, twice, the second time in reverse order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.accuracy import WRONG
from benchmarks.call_tables import decoding_table
from benchmarks.peers import load_module
from benchmarks.record import environment, protocol
from benchmarks.timing import TIMERS

MODULE = "full_d128"
HEAD_DIM, HEADS, KV_HEADS = 128, 32, 8

#: A call that can be made again and again, and where it is made.
Way = tuple[Callable[[], torch.Tensor], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Step:
    """One call: queries of each sequence, and how many keys it has by then."""

    batch: int
    q_len: int
    kv_len: int

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.batch} x {self.q_len} of {self.kv_len}"

    @property
    def bytes(self) -> int:
        """Of keys and values, once."""
        return 2 * 2 * self.batch * KV_HEADS * self.kv_len * HEAD_DIM


STEPS = (
    *(Step(batch, 1, 8192) for batch in (1, 16, 64)),
    Step(128, 1, 1024),
    Step(16, 1, 32768),
    *(Step(16, q_len, 8192) for q_len in (4, 16)),
)


def tensors_of(step: Step, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k and v from the standard normal distribution, the same every time."""
    torch.manual_seed(0)
    shapes = ((HEADS, step.q_len), (KV_HEADS, step.kv_len), (KV_HEADS, step.kv_len))
    return tuple(
        torch.randn(step.batch, *shape, HEAD_DIM, dtype=torch.bfloat16, device=device)
        for shape in shapes
    )


def ways(qkv: tuple[torch.Tensor, ...], with_fa4: bool) -> Iterator[tuple[str, Way]]:
    """Everything that computes a step, by name."""
    module = load_module(MODULE)
    yield "flashgen", (lambda: module.attention(*qkv), nullcontext())
    if hasattr(module, "_packed_heads"):
        yield "flashgen, heads apart", (lambda: module.attention(*qkv), _heads_apart(module))
    grouped = partial(scaled_dot_product_attention, *qkv, enable_gqa=True)
    for name, backend in (
        ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("SDPA flash", SDPBackend.FLASH_ATTENTION),
    ):
        yield name, (grouped, sdpa_kernel(backend))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    yield "FlexAttention", (partial(compiled, *qkv, enable_gqa=True), nullcontext())
    if with_fa4:
        from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

        rows = [x.transpose(1, 2).contiguous() for x in qkv]

        def fa4() -> torch.Tensor:
            found = flash_attn_func(*rows)
            out: torch.Tensor = found[0] if isinstance(found, tuple) else found
            return out.transpose(1, 2)

        yield "FA4", (fa4, nullcontext())


@contextmanager
def _heads_apart(module: Any) -> Iterator[None]:
    """Inside, each head has tiles of its own. A launch that is kept knows how it was made."""
    with patch.object(module, "_packed_heads", lambda q, k, block_m: 1):
        module._LAUNCHES.clear()
        yield
    module._LAUNCHES.clear()


def measure(step: Step, row: dict[str, Any], qkv: tuple[torch.Tensor, ...], **options: Any) -> None:
    """Adds the milliseconds of every way to a row of results, by both timings.

    A way that raises, or whose output is not attention, is noted with its reason and left out from
    then on; flashgen's may not.

    Args:
        step: the call.
        row: its row.
        qkv: its tensors.
        options: with_fa4; reverse, the ways in reverse order; timers, by the names of figures.
    """
    found = list(ways(qkv, options["with_fa4"]))
    right = _exact(qkv)
    for name, (call, context) in reversed(found) if options["reverse"] else found:
        if name in row["unavailable"]:
            continue
        try:
            with torch.no_grad(), context:
                error = float((call()[-1].double() - right).norm() / right.norm())
                if not error <= WRONG:
                    raise ValueError(f"wrong output, {error:.2g} off")
                for key, time_ms in options["timers"].items():
                    ms = float(f"{time_ms(call):.4g}")
                    row.setdefault(key, {}).setdefault(name, []).append(ms)
        except Exception as error:
            if name.startswith("flashgen"):
                raise
            row["unavailable"][name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _exact(qkv: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The last sequence's output in float64."""
    q, k, v = (x[-1:].double() for x in qkv)
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, help="where the figures are written too")
    parser.add_argument("--fa4", action="store_true", help="FlashAttention 4 too, if installed")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.decoding measures a CUDA GPU; torch sees none", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    rows = [asdict(step) | {"bytes": step.bytes, "unavailable": {}} for step in STEPS]
    for reverse in (False, True):
        for step, row in zip(STEPS, rows, strict=True):
            qkv = tensors_of(step, device)
            measure(step, row, qkv, with_fa4=options.fa4, reverse=reverse, timers=TIMERS)
            print(step.name, {name: ms[-1] for name, ms in row["ms"].items()}, flush=True)
    document = {
        "benchmark": "decoding",
        "environment": environment(device),
        "protocol": protocol(),
        "cells": rows,
    }
    print(decoding_table(document))
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

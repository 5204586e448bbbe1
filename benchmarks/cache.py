"""Steps of decoding by `cache_attention`: rates of reading keys and values.

    python -m benchmarks.cache [--json FILE] [--fa4]

bfloat16, head_dim 128, every key is seen but those of later drafted tokens. A timing is of replays
of a CUDA graph that computes the step over several caches, so many that none of them stays in L2;
all kernels of a step are inside. flashgen chooses the number of splits. Each implementation has the
layout that it likes: flashgen and FlashAttention 4 (batch, keys, heads, head_dim), SDPA (batch,
heads, keys, head_dim). Measured twice, the second time in reverse order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.accuracy import WRONG, relative_error
from benchmarks.figures import OWN, Document, caption, peers_of
from benchmarks.forms import build_own, in_both_orders
from benchmarks.markdown import header, line
from benchmarks.measuring import noted
from benchmarks.peers import load_module
from benchmarks.record import environment
from benchmarks.script import make_parser, sees_gpu, tell
from benchmarks.timing import mean_ms

MODULE, HEAD_DIM = "cache_d128", 128

#: Bytes of all caches of a step together: several times what L2 holds.
CACHES = 320 * 2**20

#: Milliseconds of a timing, and how many there are of each.
TIMING_MS, TIMINGS = 10, 5

Call = Callable[[], Any]
Cache = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One call: sequences, heads, heads of keys, queries of each sequence, and its keys."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    @property
    def name(self) -> str:
        """The step's name."""
        heads = f"{self.heads}/{self.kv_heads}"
        return f"{self.batch} x {self.q_len} of {self.kv_len:,}, {heads} heads"

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, counted once."""
        return 2 * 2 * self.batch * self.kv_heads * self.kv_len * HEAD_DIM


STEPS = (
    Step(1, 32, 8, 1, 8192),
    Step(1, 32, 8, 1, 131072),
    Step(4, 32, 8, 1, 32768),
    Step(16, 32, 8, 1, 8192),
    Step(64, 32, 8, 1, 4096),
    Step(16, 64, 8, 1, 16384),
    Step(8, 32, 8, 4, 16384),
)


def tensors_of(step: Step, device: torch.device) -> tuple[torch.Tensor, list[Cache]]:
    """Queries and caches, (batch, length, heads, head_dim), standard normal."""
    torch.manual_seed(0)

    def tensor(heads: int, length: int) -> torch.Tensor:
        shape = (step.batch, length, heads, HEAD_DIM)
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    count = max(2, math.ceil(CACHES / step.bytes))
    size = (step.kv_heads, step.kv_len)
    return tensor(step.heads, step.q_len), [(tensor(*size), tensor(*size)) for _ in range(count)]


def ways(
    step: Step, q: torch.Tensor, caches: list[Cache], with_fa4: bool
) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
    """All implementations by name: functions that make their calls, one for each cache."""
    module = load_module(MODULE)
    lens = torch.full((step.batch,), step.kv_len, dtype=torch.int32, device=q.device)
    yield OWN, lambda: [partial(module.cache_attention, q, k, v, lens) for k, v in caches]
    yield "SDPA cuDNN", partial(_sdpa, SDPBackend.CUDNN_ATTENTION, q, caches)
    yield "SDPA flash", partial(_sdpa, SDPBackend.FLASH_ATTENTION, q, caches)
    if with_fa4:
        from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

        yield "FA4", lambda: [partial(flash_attn_func, q, k, v, causal=True) for k, v in caches]


def _sdpa(backend: SDPBackend, q: torch.Tensor, caches: list[Cache]) -> list[Call]:
    """Several queries see the later keys of the step, too: SDPA aligns causal masks top left."""
    heads_first = q.transpose(1, 2).contiguous()

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(heads_first, k, v, enable_gqa=True)

    return [partial(call, *(x.transpose(1, 2).contiguous() for x in pair)) for pair in caches]


def graph_ms(calls: list[Call]) -> float:
    """The median milliseconds of one of the calls, in replays of a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    replays = max(1, math.ceil(TIMING_MS / mean_ms(graph.replay, 2)))
    return median(mean_ms(graph.replay, replays) for _ in range(TIMINGS)) / len(calls)


def new_row(step: Step) -> dict[str, Any]:
    """A step before its first measurement."""
    return asdict(step) | {"step": step.name, "bytes": step.bytes, "ms": {}, "unavailable": {}}


def measure(
    step: Step,
    row: dict[str, Any],
    device: torch.device,
    *,
    with_fa4: bool,
    reverse: bool,
    time_ms: Callable[[list[Call]], float] = graph_ms,
) -> None:
    """Adds the milliseconds of every implementation to a row of results.

    One that raises, or whose output is not attention, is noted with the reason; for flashgen, this
    is an error.
    """
    q, caches = tensors_of(step, device)
    found = list(ways(step, q, caches, with_fa4))
    right = _exact(step, q, *caches[0])
    for name, make in reversed(found) if reverse else found:
        if name in row["unavailable"]:
            continue
        with torch.no_grad(), noted(row, name):
            calls = make()
            out = calls[0]()
            out = out[0] if isinstance(out, tuple) else out
            out = out.transpose(1, 2) if name.startswith("SDPA") else out
            # The last query sees every key, aligned in any way.
            error = relative_error([out[:, -1]], [right])
            if not error <= WRONG:
                raise ValueError(f"wrong output, {error:.2g} off")
            row["ms"].setdefault(name, []).append(float(f"{time_ms(calls):.4g}"))


def _exact(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last query's output of the first and the last sequence in float64, (2, heads, dim)."""
    group = step.heads // step.kv_heads
    outs = []
    for b in (0, -1):  # those that `relative_error` compares
        keys, values = (x[b].transpose(0, 1).double() for x in (k, v))
        query = q[b, -1].double().view(step.kv_heads, group, HEAD_DIM)
        weights = (query @ keys.mT * HEAD_DIM**-0.5).softmax(-1)
        outs.append((weights @ values).flatten(0, 1))
    return torch.stack(outs)


def cache_table(document: Document) -> str:
    """TB/s of keys and values of each step by each implementation."""
    rows = document["cells"]
    names = peers_of(rows)
    parts = [
        "TB/s of keys and values, in replays of a CUDA graph over caches that do not fit L2: "
        f"sequences x queries of keys; head_dim 128, bfloat16; {caption(document)}."
    ]
    lines = header(["step", *names])
    for row in rows:
        rates = {name: row["bytes"] / mean(ms) / 1e9 for name, ms in row["ms"].items()}
        shown = [f"{rates[name]:.2f}" if name in rates else "-" for name in names]
        lines.append(line([row["step"], *shown]))
    refused = {f"- {name}: {reason}" for row in rows for name, reason in row["unavailable"].items()}
    return "\n\n".join([*parts, "\n".join(lines), *sorted(refused)])


def main() -> int:
    """Measures, and shows the table."""
    options = make_parser("cache", __doc__, with_fa4=True).parse_args()
    if not sees_gpu("cache"):
        return 2
    build_own(MODULE)
    rows = in_both_orders(STEPS, new_row, measure, title="step", with_fa4=options.fa4)
    made = environment(torch.device("cuda"))
    document = {"benchmark": "cache", "environment": made, "cells": rows}
    tell(document, cache_table, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Packed sequences by `varlen_attention`: rates of the forward and of the backward pass.

    python -m benchmarks.varlen [--json FILE] [--fa4] [--jobs N]

bfloat16, head_dim 128, causal, aligned at the last query and the last key. Kernels are compiled
beforehand, in several processes. Outputs and gradients are first compared with float64. A timing is
the median of calls that wait in the GPU's queue, so that the CPU's part of a call is not in it.
Measured twice, the second time in reverse order. TFLOP/s count visible pairs: 4 * head_dim FLOPs of
each in the forward pass, 10 * head_dim in the backward pass.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from multiprocessing import get_context
from statistics import mean
from typing import Any

import torch

from benchmarks.accuracy import WRONG
from benchmarks.compiling import FA4_CACHE
from benchmarks.figures import OWN, Document, caption, peers_of
from benchmarks.forms import build_own, in_both_orders
from benchmarks.markdown import header, line
from benchmarks.measuring import noted
from benchmarks.peers import load_module
from benchmarks.record import environment
from benchmarks.script import make_parser, sees_gpu, tell
from benchmarks.timing import queued_ms
from flashgen.errors import first_line

MODULE, CROSS_MODULE, HEAD_DIM = "varlen_d128", "varlen_cross_d128", 128

#: Rows of scores that float64 holds at once.
ROWS = 1024

#: FLOPs of a pass for each column of a visible pair.
WORK = {"ms": 4, "backward_ms": 10}

Tensors = tuple[torch.Tensor, ...]
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Packing:
    """Sequences of a call: queries and keys of each, not fewer keys; heads, and heads of keys."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int
    kv_heads: int

    @property
    def title(self) -> str:
        """The packing's name with its heads."""
        return f"{self.name}, {self.heads}/{self.kv_heads} heads"

    @property
    def module(self) -> str:
        """The module that computes it."""
        return MODULE if self.q_lens == self.kv_lens else CROSS_MODULE

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        lengths = zip(self.q_lens, self.kv_lens, strict=True)
        return sum(n * (m - n) + n * (n + 1) // 2 for n, m in lengths)


def lognormal(total: int, seed: int) -> tuple[int, ...]:
    """Lengths that are drawn until they have so many tokens; their median is about 665."""
    drawn, lengths = random.Random(seed), list[int]()
    while sum(lengths) < total:
        lengths.append(min(int(drawn.lognormvariate(6.5, 1.0)) + 1, total - sum(lengths)))
    return tuple(lengths)


TOKENS = 16384
EQUAL = {
    "lognormal lengths": lognormal(TOKENS, 1),
    "8 of 2,048": (2048,) * 8,
    "12,288 and 16 of 256": (12288, *[256] * 16),
    "one of 16,384": (TOKENS,),
}
#: Queries and keys of each sequence: prompts behind keys that were there before, and chunks.
CROSS = {
    "16 of 512 queries, 2,048 keys": ((512,) * 16, (2048,) * 16),
    "8 of 1,024 queries, 1,024 to 8,192 keys": ((1024,) * 8, tuple(range(1024, 8193, 1024))),
}
HEADS = ((16, 16), (16, 2))
PACKINGS = tuple(
    Packing(name, *lengths, *heads)
    for heads in HEADS
    for name, lengths in (*((name, (lens, lens)) for name, lens in EQUAL.items()), *CROSS.items())
)


def tensors_of(packing: Packing, device: torch.device) -> tuple[Tensors, torch.Tensor]:
    """Queries, keys and values, (tokens, heads, head_dim), and a gradient of the output."""
    torch.manual_seed(0)
    total_q, total_kv = sum(packing.q_lens), sum(packing.kv_lens)
    sizes = ((total_q, packing.heads), *((total_kv, packing.kv_heads),) * 2)
    qkv = tuple(_normal(size, device).requires_grad_() for size in sizes)
    return qkv, _normal(sizes[0], device)


def _normal(size: tuple[int, int], device: torch.device) -> torch.Tensor:
    return torch.randn(*size, HEAD_DIM, dtype=torch.bfloat16, device=device)


def ways(packing: Packing, device: torch.device, with_fa4: bool) -> Iterator[tuple[str, Call]]:
    """All implementations by name."""
    same = packing.q_lens == packing.kv_lens
    cu_q, cu_kv = _offsets(packing.q_lens, device), _offsets(packing.kv_lens, device)
    lengths = (cu_q, cu_q if same else cu_kv, max(packing.q_lens), max(packing.kv_lens))
    module = load_module(packing.module)
    yield OWN, lambda q, k, v: module.varlen_attention(q, k, v, *lengths)
    yield "varlen_attn", lambda q, k, v: _varlen_attn(q, k, v, *lengths)
    if with_fa4:
        from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found]

        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        named = dict(zip(names, lengths, strict=True))
        yield "FA4", lambda q, k, v: flash_attn_varlen_func(q, k, v, **named, causal=True)


def _offsets(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _varlen_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lengths: Any) -> torch.Tensor:
    """torch's, whose causal mask is a flag, or a window in later versions."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    if q.shape[1] != k.shape[1] and "enable_gqa" not in known:
        raise ValueError(f"torch {torch.__version__}: it has no grouped heads")
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {}
    causal = causal or {"is_causal": True}
    if q.shape[1] != k.shape[1]:
        causal["enable_gqa"] = True
    out: Any = varlen_attn(q, k, v, *lengths, **causal)
    found: torch.Tensor = out
    return found


def exact(packing: Packing, qkv: Tensors, grad_out: torch.Tensor) -> Tensors:
    """Output and gradients in float64 of the last head of keys, with all of its queries' heads."""
    group = packing.heads // packing.kv_heads
    q, grad = (x[:, -group:].detach().transpose(0, 1).double() for x in (qkv[0], grad_out))
    k, v = (x[:, -1].detach().double() for x in qkv[1:])
    out, grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, q, k, v))
    q_first, kv_first = 0, 0
    for q_len, kv_len in zip(packing.q_lens, packing.kv_lens, strict=True):
        keys = slice(kv_first, kv_first + kv_len)
        for first in range(0, q_len, ROWS):
            rows = slice(q_first + first, q_first + min(first + ROWS, q_len))
            given = [x.clone().requires_grad_() for x in (q[:, rows], k[keys], v[keys])]
            with torch.enable_grad():
                part = _attention(given[0], given[1], given[2], kv_len - q_len + first)
                grads = torch.autograd.grad(part, given, grad[:, rows])
            out[:, rows], grad_q[:, rows] = part.detach(), grads[0]
            grad_k[keys] += grads[1]
            grad_v[keys] += grads[2]
        q_first, kv_first = q_first + q_len, kv_first + kv_len
    return out.transpose(0, 1), grad_q.transpose(0, 1), grad_k[:, None], grad_v[:, None]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int) -> torch.Tensor:
    """Query i sees the keys up to i + offset."""
    q_idx = torch.arange(q.shape[1], device=q.device)[:, None]
    seen = torch.arange(k.shape[0], device=q.device) <= q_idx + offset
    scores = (q @ k.T * HEAD_DIM**-0.5).masked_fill(~seen, -torch.inf)
    out: torch.Tensor = scores.softmax(-1) @ v
    return out


def error_of(results: Tensors, expected: Tensors) -> float:
    """The largest relative error, by norms, of the heads that are expected; NaN if not finite."""
    if not all(torch.isfinite(x).all() for x in results):
        return float("nan")
    pairs = zip(results, expected, strict=True)
    errors = ((x[:, -e.shape[1] :].double() - e).norm() / e.norm() for x, e in pairs)
    return max(float(error) for error in errors)


def new_row(packing: Packing) -> dict[str, Any]:
    """A packing before its first measurement."""
    named = {"packing": packing.title, "visible_pairs": packing.visible_pairs}
    return asdict(packing) | named | {"error": {}, "ms": {}, "backward_ms": {}, "unavailable": {}}


def measure(
    packing: Packing,
    row: dict[str, Any],
    device: torch.device,
    *,
    with_fa4: bool,
    reverse: bool,
    time_ms: Callable[[Callable[[], Any]], float] = queued_ms,
) -> None:
    """Adds the milliseconds of every implementation to a row of results.

    One that raises, or whose results are wrong, is noted with the reason; for flashgen, this is an
    error.
    """
    qkv, grad_out = tensors_of(packing, device)
    expected = None if row["error"] else exact(packing, qkv, grad_out)
    found = list(ways(packing, device, with_fa4))
    for name, call in reversed(found) if reverse else found:
        if name in row["unavailable"]:
            continue
        with noted(row, name):
            out = call(*qkv)
            out = out[0] if isinstance(out, tuple) else out

            def forward(call: Call = call) -> Any:
                with torch.no_grad():
                    return call(*qkv)

            def backward(out: torch.Tensor = out) -> Tensors:
                return torch.autograd.grad(out, qkv, grad_out, retain_graph=True)

            if expected is not None:
                error = error_of((out.detach(), *backward()), expected)
                if not error <= WRONG:
                    raise ValueError(f"wrong results, {error:.2g} off")
                row["error"][name] = float(f"{error:.3g}")
            for key, timed in (("ms", forward), ("backward_ms", backward)):
                row[key].setdefault(name, []).append(float(f"{time_ms(timed):.4g}"))


def prepare(name: str, packing: Packing, device_type: str = "cuda") -> str:
    """Calls one implementation once with short sequences, in a process of its own; its error."""
    lengths = (128, 896)
    kv_lens = lengths if packing.module == MODULE else (256, 1024)
    short = Packing(packing.name, lengths, kv_lens, packing.heads, packing.kv_heads)
    device = torch.device(device_type)
    try:
        qkv, grad_out = tensors_of(short, device)
        out = dict(ways(short, device, name == "FA4"))[name](*qkv)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out, qkv, grad_out)
    except Exception as error:
        return f"{name}, {packing.title}: {first_line(error)}"
    return ""


def compile_beforehand(jobs: int, with_fa4: bool) -> list[str]:
    """Fills the caches of kernels on disk; returns errors, which will recur when measuring."""
    kinds = {(packing.module, packing.kv_heads): packing for packing in PACKINGS}.values()
    tasks = [(OWN, packing) for packing in kinds]
    tasks += [("FA4", packing) for packing in kinds if packing.module == MODULE and with_fa4]
    os.environ[FA4_CACHE] = "1"
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return [error for error in pool.map(prepare, *zip(*tasks, strict=True)) if error]


def varlen_table(document: Document) -> str:
    """TFLOP/s of the forward and of the backward pass of each packing by each implementation."""
    rows = document["cells"]
    names = peers_of(rows)
    parts = [
        "TFLOP/s of the forward and of the backward pass of packed sequences; causal, head_dim "
        f"128, bfloat16; {caption(document)}."
    ]
    lines = header(["packing", *names])
    for row in rows:
        lines.append(line([row["packing"], *(_rates(row, name) for name in names)]))
    refused = {f"- {name}: {reason}" for row in rows for name, reason in row["unavailable"].items()}
    return "\n\n".join([*parts, "\n".join(lines), *sorted(refused)])


def _rates(row: dict[str, Any], name: str) -> str:
    if name not in row["ms"]:
        return "-"
    flops = row["visible_pairs"] * row["heads"] * HEAD_DIM
    times = {work: mean(row[key][name]) for key, work in WORK.items()}
    return ", ".join(f"{work * flops / ms / 1e9:.0f}" for work, ms in times.items())


def main() -> int:
    """Measures, and shows the table."""
    parser = make_parser("varlen", __doc__, with_fa4=True)
    parser.add_argument("--jobs", type=int, default=6, help="processes that compile beforehand")
    options = parser.parse_args()
    if not sees_gpu("varlen"):
        return 2
    build_own(MODULE, CROSS_MODULE)
    for problem in compile_beforehand(options.jobs, options.fa4):
        print(f"compiling beforehand: {problem}", file=sys.stderr)
    rows = in_both_orders(PACKINGS, new_row, measure, title="packing", with_fa4=options.fa4)
    made = environment(torch.device("cuda"))
    document = {"benchmark": "varlen", "environment": made, "cells": rows}
    tell(document, varlen_table, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

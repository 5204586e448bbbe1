"""Measuring: what each peer takes on a cell, and what it needs beside its tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from benchmarks.accuracy import Inputs, exact_heads, relative_error
from benchmarks.attentions import ATTENTIONS, Attention, visible_pairs
from benchmarks.cells import Cell
from benchmarks.peers import Call, Peer, make_block_mask

WARMUP_MS, REPETITION_MS = 50, 200
PAUSE_SECONDS = 0.2  # before each measurement, so that no peer inherits the heat of the last alone

Timer = Callable[[Call], float]


def measure(
    cell: Cell,
    row: dict[str, Any],
    peers: Mapping[str, Peer],
    repetition: int,
    device: torch.device,
    median_ms: Timer,
) -> None:
    """Measures every peer once on a cell and adds what came out to its row.

    A peer that raises is noted with its reason and left out from then on; flashgen's may not.
    """
    attention = ATTENTIONS[cell.attention](cell.seq_len, device)
    inputs = make_inputs(cell, device)
    expected = exact_heads(cell, attention, inputs)
    pairs = visible_pairs(attention, cell.seq_len, device)
    flops = cell.flops(pairs)
    row |= {"visible_pairs": pairs, "gflop": round(flops / 1e9, 1)}
    names = [name for name in peers if name not in row["unavailable"]]
    for name in reversed(names) if repetition % 2 else names:
        try:
            with torch.no_grad(), peers[name](cell, attention, inputs) as call:
                row["error"][name] = float(f"{relative_error(call(), expected):.3g}")
                ms = median_ms(call)
                if name == "flashgen" and device.type == "cuda":
                    row["extra_bytes"] = extra_bytes(call, cell)
        except Exception as error:
            if name == "flashgen":
                raise
            row["unavailable"][name] = _reason(error)
            continue
        row["ms"].setdefault(name, []).append(float(f"{ms:.4g}"))
        row["tflops"].setdefault(name, []).append(round(flops / ms / 1e9, 1))
    if "FlexAttention" in row["ms"] and attention.mask_mod and device.type == "cuda":
        row["block_mask"] = block_mask_cost(cell, attention, device)


def make_inputs(cell: Cell, device: torch.device) -> Inputs:
    """q, k and v from the standard normal distribution, the same in every repetition."""
    torch.manual_seed(0)

    def tensor(head_dim: int) -> torch.Tensor:
        shape = (cell.batch, cell.num_heads, cell.seq_len, head_dim)
        return torch.randn(shape, dtype=getattr(torch, cell.dtype), device=device)

    return tensor(cell.qk_head_dim), tensor(cell.qk_head_dim), tensor(cell.v_head_dim)


def extra_bytes(call: Call, cell: Cell) -> int:
    """Device memory that a call takes at its peak beyond its output and its log-sum-exp."""
    peak, out = peak_bytes(call)
    lse = 4 * cell.batch * cell.num_heads * cell.seq_len
    return peak - int(out.nbytes) - lse


def block_mask_cost(cell: Cell, attention: Attention, device: torch.device) -> dict[str, float]:
    """Milliseconds, and MiB of peak memory, of making the BlockMask that FlexAttention reads."""

    def make() -> Any:
        return make_block_mask(cell, attention, device)

    make()
    peak, _ = peak_bytes(make)
    ms = triton.testing.do_bench(make, warmup=25, rep=100, return_mode="median")
    return {"ms": float(f"{ms:.4g}"), "peak_mib": round(peak / 2**20, 1)}


def peak_bytes(call: Callable[[], Any]) -> tuple[int, Any]:
    """The most device memory that a call holds beyond what was held before, and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


def median_ms(call: Call) -> float:
    """Milliseconds of a call on the GPU, the L2 cache cleared before each."""
    torch.cuda.synchronize()
    time.sleep(PAUSE_SECONDS)
    ms: float = triton.testing.do_bench(
        call, warmup=WARMUP_MS, rep=REPETITION_MS, return_mode="median"
    )
    return ms


def _reason(error: Exception) -> str:
    """An exception's class and first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"

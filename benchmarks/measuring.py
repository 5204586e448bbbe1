"""Measuring: the time of each peer on a cell, and its memory beyond its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import triton

from benchmarks.accuracy import WRONG, WRONG_SUM_OF_PEER, Inputs, relative_error
from benchmarks.attentions import ATTENTIONS, Attention, visible_pairs
from benchmarks.cells import Cell
from benchmarks.figures import NORMAL
from benchmarks.inputs import make_inputs
from benchmarks.passes import FORWARD_PASS, Pass, as_results
from benchmarks.peers import Call, Peer, make_block_mask
from benchmarks.timing import Timer
from flashgen.errors import first_line


def measure(
    cell: Cell,
    row: dict[str, Any],
    peers: Mapping[str, Peer],
    repetition: int,
    device: torch.device,
    timers: Mapping[str, Timer],
    which: Pass = FORWARD_PASS,
) -> None:
    """Measures every peer on a cell, by one timer after the other, and adds the figures to its row.

    A timer has the name of its figures; the figures of ``ms`` are also stored as rates, in
    ``tflops``. The row names its inputs, of `benchmarks.inputs`; unnamed ones are normal. The
    peers belong to the measured pass. Results and memory are checked in the first repetition alone.
    A peer that raises is noted with its reason and left out from then on; for flashgen, this is an
    error.
    """
    attention = ATTENTIONS[cell.attention](cell.seq_len, device)
    inputs = make_inputs(cell, device, row.get("inputs", NORMAL))
    if repetition == 0:
        _look_at(cell, row, peers, attention, inputs, which)
    flops = which.work * cell.flops(row["visible_pairs"])
    for key, time_ms in timers.items():
        for name in list(peers)[:: -1 if repetition % 2 else 1]:
            if name in row["unavailable"]:
                continue
            with torch.no_grad(), noted(row, name), peers[name](cell, attention, inputs) as call:
                add_time(row, key, name, time_ms(call), flops)


def add_time(row: dict[str, Any], key: str, name: str, ms: float, flops: float) -> None:
    """Adds a time, and its rate, to a row."""
    row.setdefault(key, {}).setdefault(name, []).append(float(f"{ms:.4g}"))
    rates = row.setdefault(key.replace("ms", "tflops"), {})
    rates.setdefault(name, []).append(round(flops / ms / 1e9, 1))


def _look_at(
    cell: Cell,
    row: dict[str, Any],
    peers: Mapping[str, Peer],
    attention: Attention,
    inputs: Inputs,
    which: Pass,
) -> None:
    """Adds figures that are equal in every repetition: the work, the errors, the memory."""
    device = inputs[0].device
    pairs = visible_pairs(attention, cell.seq_len, device)
    gflop = which.work * cell.flops(pairs) / 1e9
    row |= {"visible_pairs": pairs, "gflop": round(gflop, 1)}
    expected = which.exact(cell, attention, inputs)
    for name, peer in peers.items():
        with torch.no_grad(), noted(row, name), peer(cell, attention, inputs) as call:
            results = as_results(call())
            if name != "flashgen" and attention.dropout_p:
                continue  # a peer drops other weights
            error = relative_error(results[:3], expected[:3])
            of_learned = relative_error(results[3:], expected[3:])
            if name != "flashgen" and not (error <= WRONG and of_learned <= WRONG_SUM_OF_PEER):
                raise ValueError(f"wrong output, {max(error, of_learned):.2g} off")
            row["error"][name] = float(f"{error:.3g}")
            if expected[3:]:
                row.setdefault("error_of_learned", {})[name] = float(f"{of_learned:.3g}")
            if name == "flashgen" and device.type == "cuda":
                row["extra_bytes"] = extra_bytes(call)
    if "FlexAttention" in row["error"] and attention.mask_mod and device.type == "cuda":
        row["block_mask"] = block_mask_cost(cell, attention, device)


@contextmanager
def noted(row: dict[str, Any], name: str, *, own: bool = False) -> Iterator[None]:
    """Notes why a peer is not available instead of raising.

    An error of flashgen is raised, unless ``own`` asks to note it too.
    """
    try:
        yield
    except Exception as error:
        if name.startswith("flashgen") and not own:
            raise
        row["unavailable"][name] = first_line(error)


def extra_bytes(call: Call) -> int:
    """Device memory that a call takes at its peak beyond its results."""
    peak, found = peak_bytes(call)
    return peak - sum(int(x.nbytes) for x in as_results(found))


def block_mask_cost(cell: Cell, attention: Attention, device: torch.device) -> dict[str, float]:
    """Milliseconds and MiB of peak memory for making the BlockMask that FlexAttention reads."""

    def make() -> Any:
        return make_block_mask(cell, attention, device)

    make()
    peak, _ = peak_bytes(make)
    ms = triton.testing.do_bench(make, warmup=25, rep=100, return_mode="median")
    return {"ms": float(f"{ms:.4g}"), "peak_mib": round(peak / 2**20, 1)}


def peak_bytes(call: Callable[[], Any]) -> tuple[int, Any]:
    """The peak device memory of a call beyond the memory held before, and its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result

"""Forward TFLOP/s of flashgen's modules beside FlexAttention and torch's SDPA, on one GPU.

    python -m benchmarks.forward --json benchmarks/results/forward-h200.json

Every peer runs on the same tensors, one after another within a cell. The whole table is measured
`--repeat` times, every second time in the reverse order. A time is the median of
triton.testing.do_bench, which clears the L2 cache before each call; clocks are left alone. Every
peer's output is compared with attention in float64 on two heads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.accuracy import Inputs, exact_heads, relative_error, wrong_cells
from benchmarks.cells import CELLS, Cell
from benchmarks.peers import (
    BENCHMARK_MODULES,
    PEERS,
    Call,
    Peer,
    load_module,
    make_block_mask,
    peers_of,
)
from benchmarks.table import full_table
from flashgen.build import Options, Progress, build
from flashgen.publish import read_seal

WARMUP_MS, REPETITION_MS = 50, 200
PAUSE_SECONDS = 0.2  # before each measurement, so that no peer inherits the heat of the last alone
SPECS = Path(__file__).parent / "specs"

Timer = Callable[[Call], float]


def main() -> int:
    """Runs the benchmark; status 1 where a module's output is wrong."""
    options = _arguments()
    if not torch.cuda.is_available():
        print("benchmarks.forward measures a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")  # float32 may use the tf32 units
    device = torch.device("cuda")
    _build_missing_modules()
    cells = [cell for cell in CELLS if options.only in cell.name]
    rows = [_new_row(cell) for cell in cells]
    document = {"environment": environment(device), "protocol": protocol(), "cells": rows}
    for repetition in range(options.repeat):
        for cell, row in zip(cells, rows, strict=True):
            names = peers_of(cell, options.fa4)
            peers = {name: PEERS[name] for name in names}
            measure(cell, row, peers, repetition, device, _median_ms)
            print(_progress(repetition, row), flush=True)
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(layout(document))  # after every cell: an interrupt keeps them
    print(f"\n{full_table(json.loads(options.json.read_text()))}")
    wrong = wrong_cells(rows)
    if wrong:
        print(f"WRONG OUTPUT of flashgen's module: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


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
    inputs = make_inputs(cell, device)
    expected = exact_heads(cell, inputs)
    names = [name for name in peers if name not in row["unavailable"]]
    for name in reversed(names) if repetition % 2 else names:
        try:
            with torch.no_grad(), peers[name](cell, inputs) as call:
                row["error"][name] = float(f"{relative_error(call(), expected):.3g}")
                ms = median_ms(call)
        except Exception as error:
            if name == "flashgen":
                raise
            row["unavailable"][name] = _reason(error)
            continue
        row["ms"].setdefault(name, []).append(float(f"{ms:.4g}"))
        row["tflops"].setdefault(name, []).append(round(cell.flops / ms / 1e9, 1))
    if "FlexAttention" in row["ms"] and cell.mask != "full" and device.type == "cuda":
        row["block_mask"] = block_mask_cost(cell, device)


def make_inputs(cell: Cell, device: torch.device) -> Inputs:
    """q, k and v from the standard normal distribution, the same in every repetition."""
    torch.manual_seed(0)

    def tensor(head_dim: int) -> torch.Tensor:
        shape = (cell.batch, cell.num_heads, cell.seq_len, head_dim)
        return torch.randn(shape, dtype=getattr(torch, cell.dtype), device=device)

    return tensor(cell.qk_head_dim), tensor(cell.qk_head_dim), tensor(cell.v_head_dim)


def block_mask_cost(cell: Cell, device: torch.device) -> dict[str, float]:
    """Milliseconds, and MiB of peak memory, of making the BlockMask that FlexAttention reads."""
    make_block_mask(cell, device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    make_block_mask(cell, device)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    ms = triton.testing.do_bench(
        lambda: make_block_mask(cell, device), warmup=25, rep=100, return_mode="median"
    )
    return {"ms": float(f"{ms:.4g}"), "peak_mib": round(peak / 2**20, 1)}


def environment(device: torch.device) -> dict[str, str]:
    """What the figures belong to."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": _cudnn_version(),
        "cuda": str(torch.version.cuda),
    }


def protocol() -> dict[str, Any]:
    """How the figures were taken."""
    return {
        "timer": "triton.testing.do_bench, median",
        "warmup_ms": WARMUP_MS,
        "repetition_ms": REPETITION_MS,
        "pause_s": PAUSE_SECONDS,
        "flops": "2 * batch * heads * visible (query, key) pairs * (qk_head_dim + v_head_dim)",
        "error": "relative to float64, Frobenius norm over two heads",
    }


def layout(document: Mapping[str, Any]) -> str:
    """JSON with a cell a line, for diffs and for people."""
    cells = ",\n".join(f"    {json.dumps(row)}" for row in document["cells"])
    head = {key: value for key, value in document.items() if key != "cells"}
    return json.dumps(head, indent=2)[:-2] + f',\n  "cells": [\n{cells}\n  ]\n}}\n'


def _new_row(cell: Cell) -> dict[str, Any]:
    module = load_module(cell.module)
    seal = read_seal(Path(str(module.__file__)))
    return {
        "cell": cell.name,
        "module": cell.module,
        "mask": cell.mask,
        "seq_len": cell.seq_len,
        "head_dim": [cell.qk_head_dim, cell.v_head_dim],
        "dtype": cell.dtype,
        "batch": cell.batch,
        "num_heads": cell.num_heads,
        "in_grid": cell.in_grid,
        "gflop": round(cell.flops / 1e9, 1),
        "kernel": seal.kernel if seal else None,
        "config": module.CONFIGS.get(_target()),
        "ms": {},
        "tflops": {},
        "error": {},
        "unavailable": {},
    }


def _build_missing_modules() -> None:
    """Builds and tunes the modules of benchmarks/specs; nothing to do where they are up to date."""
    for built in build([SPECS], Options(BENCHMARK_MODULES, (_target(),)), Progress()):
        print(f"{built.variant}: {'built' if built.chosen else 'up to date'}", flush=True)


def _target() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _median_ms(call: Call) -> float:
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


def _cudnn_version() -> str:
    """As people write it: torch gives 91900 for 9.19.0."""
    number: int = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _progress(repetition: int, row: Mapping[str, Any]) -> str:
    rates: dict[str, Sequence[float]] = row["tflops"]
    shown = "  ".join(f"{name} {values[-1]:.0f}" for name, values in rates.items())
    return f"[{repetition + 1}] {row['cell']:28} {shown}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--repeat", type=int, default=2, help="times to measure the whole table")
    parser.add_argument("--only", default="", help="a part of the names of the cells to measure")
    parser.add_argument("--fa4", action="store_true", help="FlashAttention 4 too, if installed")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("--repeat: at least 1")
    if not any(options.only in cell.name for cell in CELLS):
        parser.error(f"--only: no cell has {options.only!r} in its name")
    return options


if __name__ == "__main__":
    sys.exit(main())

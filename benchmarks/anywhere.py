"""Cells drawn at random: flashgen beside the best peer of each cell, on one GPU.

    python -m benchmarks.anywhere --seed 1 --cells 40 --json anywhere.json
    python -m benchmarks.anywhere --backward --seed 1 --json anywhere-backward.json
    python -m benchmarks.anywhere --show one.json two.json --json joined.json

`benchmarks.drawing` draws kinds, head dims, lengths, groups of heads, batches and inputs. Modules
have the model's configurations, without tuning. Peers are FlashAttention 4, SDPA's cuDNN and
FlexAttention; a peer that cannot run a cell, or computes something else, is left out of the cell,
and so is FlexAttention if FlashAttention 4 runs and has been faster (`beforehand.FA4_AHEAD`). Calls
take turns (`benchmarks.pairs`); a cell below the limit is measured again with all its contenders,
and all turns count. Nothing else is left out. A wrong output is reported, counts as behind, and
ends the run with status 1.

With --backward the same cells are drawn, and their backward pass alone is timed: gradients of q, k
and v, of an output whose forward pass has run once (`benchmarks.passes`).

Drawing does not depend on what is measured: --kinds and --head-dims select from the drawn cells,
and --limit-seconds ends the run with the cells measured so far.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.attentions import visible_pairs
from benchmarks.beforehand import Workers, own_module, own_peer, takes_part
from benchmarks.drawing import KINDS, Drawn, attention_of, draw
from benchmarks.drawn_tables import drawn_table, joined
from benchmarks.figures import OWN
from benchmarks.inputs import make_inputs
from benchmarks.measuring import noted
from benchmarks.pairs import best, first_turn, rivals, rounds
from benchmarks.passes import PASSES, Pass, as_results, differentiated
from benchmarks.peers import PEERS, Call, Peer
from benchmarks.record import environment, kernels_of, target
from benchmarks.script import make_parser, sees_gpu, tell, write_results
from benchmarks.slices import GradientSlices, Slices
from flashgen.errors import first_line

#: The check of a pass's results.
SLICES: dict[str, type[Slices] | type[GradientSlices]] = {
    "forward": Slices,
    "backward": GradientSlices,
}

#: Cells that are compiled before they are measured, in whole groups of one module.
TOGETHER = 40


def grouped(cells: Sequence[Drawn]) -> list[list[Drawn]]:
    """Cells in lots of `TOGETHER`, cells of a module in one lot; modules in drawn order."""
    modules: dict[str, list[Drawn]] = {}
    for cell in cells:
        modules.setdefault(cell.module, []).append(cell)
    lots: list[list[Drawn]] = []
    for of_one in modules.values():
        if not lots or len(lots[-1]) >= TOGETHER:
            lots.append([])
        lots[-1] += of_one
    return lots


def new_row(cell: Drawn, seed: int, number: int) -> dict[str, Any]:
    """A cell before it is measured."""
    return {
        "cell": cell.name,
        "seed": seed,
        "number": number,
        "kind": cell.kind,
        "module": cell.module,
        "seq_len": cell.seq_len,
        "head_dim": [cell.qk_head_dim, cell.v_head_dim],
        "dtype": cell.dtype,
        "batch": cell.batch,
        "num_heads": cell.num_heads,
        "num_kv_heads": cell.num_kv_heads,
        "width": cell.width,
        "starts": list(cell.starts),
        "inputs": cell.inputs,
        "first_ms": {},
        "ms": {},
        "median_ms": {},
        "error": {},
        "error_limit": None,
        "unavailable": {},
        "wrong": "",
        "again": False,
        "best": None,
        "ratio": None,
    }


def measure(
    cell: Drawn,
    row: dict[str, Any],
    peers: dict[str, Peer],
    device: torch.device,
    limit: float,
    which: Pass,
) -> None:
    """Checks every contender, then times flashgen beside the peers that may be the best."""
    attention = attention_of(cell, device)
    inputs = make_inputs(cell, device, cell.inputs)
    slices = SLICES[which.name](cell, attention, inputs)
    with ExitStack() as entered, torch.no_grad():
        calls: dict[str, Call] = {}
        for name, peer in peers.items():
            if not takes_part(name, cell, calls):
                continue
            with _told(row, name):
                call = entered.enter_context(peer(cell, attention, inputs))
                row["error"][name] = float(f"{slices.error(*as_results(call())):.3g}")
                calls[name] = call
        _judge(row, calls, slices)
        if row["wrong"]:
            return
        row["visible_pairs"] = visible_pairs(attention, cell.seq_len, device)
        for name in list(calls):
            with _told(row, name):
                row["first_ms"][name] = first_turn(calls[name])
        names = rivals(row["first_ms"], OWN)
        if row["wrong"] or not names:
            return
        chosen = {name: calls[name] for name in (OWN, *names)}
        _take(row, rounds(chosen, row["first_ms"]))
        if row["ratio"] < limit:
            row["again"] = True
            _take(row, rounds(chosen, row["first_ms"]))


@contextmanager
def _told(row: dict[str, Any], name: str) -> Iterator[None]:
    """As `noted`, but an error of flashgen counts as a wrong result, and the run goes on."""
    try:
        with noted(row, name):
            yield
    except Exception as error:
        row["wrong"] = first_line(error)


def _judge(row: dict[str, Any], calls: dict[str, Call], slices: Slices | GradientSlices) -> None:
    """Leaves out peers with wrong results, and notes whether flashgen's results are wrong."""
    others = [error for name, error in row["error"].items() if name != OWN]
    row["error_limit"] = most = float(f"{slices.limit(others):.3g}")
    for name, error in row["error"].items():
        if name == OWN and not error <= most:
            row["wrong"] = f"{error:.2g} off, at most {most:.2g} was expected"
        elif name != OWN and not error <= most:
            del calls[name]
            row["unavailable"][name] = f"wrong output, {error:.2g} off"


def _take(row: dict[str, Any], ms: dict[str, list[float]]) -> None:
    """Adds turns to a row, and updates the row's figures from all turns."""
    for name, times in ms.items():
        row["ms"].setdefault(name, []).extend(times)
    row["median_ms"] = {name: float(f"{median(times):.4g}") for name, times in row["ms"].items()}
    row["best"], ratio = best(row["ms"], OWN)
    row["ratio"] = round(ratio, 4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws, builds, compiles, measures, and shows the tables; status 1 if a result is wrong."""
    options = _arguments(arguments)
    if options.show:
        tell(
            joined([json.loads(path.read_text()) for path in options.show]),
            drawn_table,
            options.json,
        )
        return 0
    if not sees_gpu("anywhere"):
        return 2
    started = time.perf_counter()
    torch.set_float32_matmul_precision("high")  # part of FlexAttention's cache keys
    device = torch.device("cuda")
    drawn = draw(options.seed, options.cells)
    numbers = {id(cell): number for number, cell in enumerate(drawn)}
    wanted = [cell for cell in drawn if _is_asked(cell, options)]
    which = PASSES["backward" if options.backward else "forward"]
    document: dict[str, Any] = {
        "benchmark": "anywhere-backward" if options.backward else "anywhere",
        "environment": environment(device),
        "seeds": {str(options.seed): options.cells},
        "drawn": len(drawn),
        "left": len(drawn),
        "limit": options.limit,
        "cells": [],
    }

    def seconds_left() -> float:
        return float(options.limit_seconds - (time.perf_counter() - started))

    with tempfile.TemporaryDirectory() as scratch, Workers(options.jobs) as workers:
        peers = {OWN: own_peer(Path(scratch)), **{name: PEERS[name] for name in options.peers}}
        if options.backward:
            peers = {name: differentiated(name, peer) for name, peer in peers.items()}
        for lot in grouped(wanted):
            for problem in workers.compile(
                lot, options.peers, Path(scratch), seconds_left(), backward=options.backward
            ):
                print(f"compiling beforehand: {problem}", file=sys.stderr)
            for cell in lot:
                if seconds_left() <= 0:
                    break
                row = new_row(cell, options.seed, numbers[id(cell)])
                measure(cell, row, peers, device, options.limit, which)
                _note_kernel(row, cell, Path(scratch), which)
                document["cells"].append(row)
                document["left"] = len(drawn) - len(document["cells"])
                progress = _progress(cell, row, which)
                print(f"{time.perf_counter() - started:4.0f} s {progress}", flush=True)
                if options.json:  # after every cell: a run that is cut off keeps them
                    write_results(document, options.json)
                torch.cuda.empty_cache()
                torch.compiler.reset()  # FlexAttention's kernels of this shape; there is a limit
    print()
    tell(document, drawn_table, options.json)
    return 1 if any(row["wrong"] for row in document["cells"]) else 0


def _note_kernel(row: dict[str, Any], cell: Drawn, folder: Path, which: Pass) -> None:
    """The form, the digest and the configuration of the kernel that ran."""
    try:
        row |= kernels_of(own_module(cell, folder, target()), which)
    except Exception as error:  # it could not be built, which is reported
        row["wrong"] = row["wrong"] or first_line(error)


def _is_asked(cell: Drawn, options: argparse.Namespace) -> bool:
    head_dim = cell.module.partition("_d")[2]
    of_dim = not options.head_dims or head_dim.replace("_v", ",") in options.head_dims
    return cell.kind in options.kinds and of_dim


def _progress(cell: Drawn, row: dict[str, Any], which: Pass) -> str:
    """One line with the result of a cell, and its rate."""
    if row["wrong"]:
        return f"{cell.name}: WRONG, {row['wrong']}"
    if row["ratio"] is None:
        return f"{cell.name}: no peer has it"
    tflops = which.work * cell.flops(row["visible_pairs"]) / row["median_ms"][OWN] / 1e9
    again = ", measured again" if row["again"] else ""
    return f"{cell.name}: {row['ratio']:.3f} of {row['best']}, {tflops:.0f} TFLOP/s{again}"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("anywhere", __doc__)
    parser.add_argument("--seed", type=int, help="of the draw; one of chance if none is given")
    parser.add_argument(
        "--backward", action="store_true", help="measure the backward pass of the same cells"
    )
    parser.add_argument("--cells", type=int, default=40, help="to draw; 40 unless given")
    parser.add_argument("--kinds", nargs="+", choices=sorted({*KINDS}), default=sorted({*KINDS}))
    parser.add_argument(
        "--head-dims", nargs="+", default=[], metavar="D", help="as 128, or 192,128 for both"
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        default=["FA4", "SDPA cuDNN", "FlexAttention"],
        choices=["FA4", "SDPA cuDNN", "SDPA flash", "FlexAttention"],
    )
    parser.add_argument(
        "--limit", type=float, default=1.0, help="below it a cell is measured again; 1 unless given"
    )
    parser.add_argument(
        "--limit-seconds", type=float, default=float("inf"), help="after which no cell is begun"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(14, (os.cpu_count() or 2) - 1),
        help="processes that build and compile beforehand; 0 does it while measuring",
    )
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="results to join")
    options = parser.parse_args(arguments)
    if options.cells < 1:
        parser.error("--cells: at least 1")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    return options


if __name__ == "__main__":
    sys.exit(main())

"""A kernel's traffic by the GPU's counters, beside the account of flashgen explain.

    python -m benchmarks.counters --json benchmarks/results/counters-h200.json

One sequence of 16384 bfloat16 tokens, heads times head_dim 2048. Nsight Compute (ncu), which needs
the right to read counters, runs this module with --call a few times, and counts the traffic of the
attention kernel after equal calls: first between SMs and L2, then of DRAM in a single pass with L2
as the last call left it, then of DRAM again with L2 cleared beforehand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import ncu
from benchmarks.account_tables import counters_table
from benchmarks.attentions import ATTENTIONS
from benchmarks.cells import FORWARD, Cell
from benchmarks.compiling import compile_call
from benchmarks.inputs import make_inputs
from benchmarks.peers import load_module
from benchmarks.record import environment, layout, new_row
from benchmarks.script import make_parser, sees_gpu, tell
from flashgen.explain.account import Account, Work
from flashgen.explain.call import Asked
from flashgen.explain.variant import explain
from flashgen.kernels.base import ForwardKernel
from flashgen.kernels.registry import with_key

ROOT = Path(__file__).parent.parent

#: The modules whose account is compared with the counters, and the tokens of their sequence.
NAMES, TOKENS = ("causal_d128", "window_d128", "full_d64"), 16384

#: The forward kernels of modules, by form.
KERNELS = {"hopper": "_attention_hopper", "portable": "_attention_forward"}

#: Calls before the first that is counted, and between two of them.
WARM_UPS, BETWEEN = 5, 2

SECTOR = 32  # bytes

#: Bytes are counted where an SM reads or writes them, and where a slice of L2 takes the request. In
#: between, a coalescer merges requests of several SMs for a line. Hopper's L2 has two partitions:
#: requests from one to the other (ltcfabric) are in the sums over all slices, too, but not in the
#: requests of SMs (tex).
L2_METRICS = (
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "lts__t_sectors_srcunit_tex.sum",
    "lts__t_sectors_srcunit_tex_lookup_hit.sum",
    "lts__t_sectors_srcunit_tex_lookup_miss.sum",
    "lts__t_sectors_srcunit_ltcfabric.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_write.sum",
    "lts__t_bytes.sum",
    "lts__d_sectors_fill_device.sum",
    "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum",
    "l1tex__m_l1tex2xbar_write_bytes.sum",
    "gpu__time_duration.sum",
)

DRAM_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")


@dataclass(frozen=True)
class Run:
    """One run of ncu.

    Attributes:
        metrics: the metrics that it counts.
        cache_control: whether caches are cleared before each launch (``"all"``) or not.
        launches: the number of launches that it counts for each module.
    """

    metrics: tuple[str, ...]
    cache_control: str
    launches: int


#: The runs by the name of their figures in a file of results.
RUNS = {
    "l2": Run(L2_METRICS, "none", 1),
    "dram": Run(DRAM_METRICS, "none", 5),
    "dram_cold": Run(DRAM_METRICS, "all", 3),
}

#: Figures of the account.
ACCOUNTED = ("l2_read", "l2_written", "dram_read", "dram_written")

#: Their counters at SMs, L2 and DRAM: the run, the counter, bytes of its unit.
FIGURES = {
    "sm_read": ("l2", "l1tex__m_xbar2l1tex_read_bytes.sum", 1),
    "sm_written": ("l2", "l1tex__m_l1tex2xbar_write_bytes.sum", 1),
    "l2_read": ("l2", "lts__t_sectors_srcunit_tex_op_read.sum", SECTOR),
    "l2_written": ("l2", "lts__t_sectors_srcunit_tex_op_write.sum", SECTOR),
    "dram_read": ("dram", "dram__bytes_read.sum", 1),
    "dram_written": ("dram", "dram__bytes_write.sum", 1),
}


def cell_of(name: str) -> Cell:
    """The counted call of a module."""
    return next(cell for cell in FORWARD if (cell.module, cell.seq_len) == (name, TOKENS))


def account_of(cell: Cell, form: str) -> dict[str, int]:
    """The account of `flashgen explain` for a call: bytes between SMs and L2, and L2 and DRAM.

    Raises:
        ValueError: the module has no kernel of this form.
    """
    attention = ATTENTIONS[cell.attention](cell.seq_len, torch.device("cpu"))
    params = tuple((name, str(value)) for name, value in attention.parameters.items())
    asked = Asked(q_len=cell.seq_len, batch=cell.batch, heads=cell.num_heads, params=params)
    [account] = explain([ROOT / "specs" / f"{cell.module}.py"], None, asked, ROOT / "generated")
    work = _work(account, form)
    return {figure: getattr(work, figure) for figure in ACCOUNTED}


def _work(account: Account, form: str) -> Work:
    kernel = with_key(form)
    assert isinstance(kernel, ForwardKernel), form
    for work in account.works:
        if work.name == kernel.own:
            return work
    raise ValueError(f"{account.variant}: the account has no kernel of form {form!r}")


def figures_of(counted: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The account's figures by the counters, in bytes: medians over the launches.

    Figures whose counter is missing are left out.
    """
    return {
        figure: unit * median(counted[run][name])
        for figure, (run, name, unit) in FIGURES.items()
        if name in counted.get(run, {})
    }


def values_of(
    launches: Sequence[ncu.Launch], each: int, names: Sequence[str], kernels: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """The counts of each module, by metric, with a value for each of its launches.

    Args:
        launches: the launches of all modules in order.
        each: the number of launches of each module.
        names: the names of the modules.
        kernels: the kernel that each module should have launched.

    Raises:
        ncu.NcuError: the launches are not the expected ones.
    """
    found = [launch.kernel for launch in launches]
    expected = [kernel for kernel in kernels for _ in range(each)]
    if found != expected:
        raise ncu.NcuError(f"launches of {found} were counted, not of {expected}")
    parts = [launches[each * i : each * (i + 1)] for i in range(len(names))]
    return {
        name: {
            metric: [launch.values[metric] for launch in part]
            for metric in part[0].values
            if all(metric in launch.values for launch in part)
        }
        for name, part in zip(names, parts, strict=True)
    }


def call(names: Sequence[str], launches: int) -> None:
    """Calls modules, so that ncu sees the launches of each that it has to count."""
    device = torch.device("cuda")
    for name in names:
        cell = cell_of(name)
        attention = ATTENTIONS[cell.attention](cell.seq_len, device)
        inputs, function = make_inputs(cell, device), load_module(name).attention
        with torch.no_grad():

            def once() -> Any:
                # With the LSE, which the account counts.
                return function(*inputs, return_lse=True, **attention.parameters)  # noqa: B023

            for _ in range(WARM_UPS):
                once()
            for _ in range(launches):
                for _ in range(BETWEEN):
                    once()
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                once()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()


def measure(names: Sequence[str]) -> dict[str, Any]:
    """The document of results."""
    command, device = ncu.find_ncu(), torch.device("cuda")
    cells = [cell_of(name) for name in names]
    _compile(cells)
    rows = {cell.module: _row(cell) for cell in cells}
    kernels = [KERNELS[row["form"]] for row in rows.values()]
    known = ncu.known_metrics(command)
    protocol: dict[str, Any] = {}
    for name, run in RUNS.items():
        program = [sys.executable, "-m", "benchmarks.counters"]
        program += ["--call", *names, "--launches", str(run.launches)]
        print(f"ncu counts {name} ...", flush=True)
        counted = ncu.count(
            command, program, run.metrics, "|".join(KERNELS.values()), run.cache_control, known
        )
        values = values_of(counted.launches, run.launches, names, kernels)
        for module, row in rows.items():
            row["counted"][name] = values[module]
        protocol[name] = {
            "cache_control": run.cache_control,
            "launches": run.launches,
            "passes": list(counted.passes),
            "missing": list(counted.missing),
        }
    for row in rows.values():
        row["figures"] = figures_of(row["counted"])
    return {
        "benchmark": "counters",
        "environment": {
            **environment(device),
            "driver": _driver(),
            "ncu": ncu.version(command),
        },
        "protocol": protocol,
        "cells": list(rows.values()),
    }


def _row(cell: Cell) -> dict[str, Any]:
    row = new_row(cell)
    shown = ("cell", "module", "seq_len", "head_dim", "dtype", "batch", "num_heads")
    kept = {key: row[key] for key in (*shown, "form", "kernel", "config")}
    return {**kept, "account": account_of(cell, row["form"]), "counted": {}}


def _compile(cells: Sequence[Cell]) -> None:
    """Compiles in parallel, into the cache on disk, what ncu's runs would compile in sequence."""
    with ProcessPoolExecutor(len(cells), mp_context=get_context("spawn")) as pool:
        for problem in pool.map(compile_call, ["flashgen"] * len(cells), cells):
            if problem:
                raise RuntimeError(problem)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]


def main() -> int:
    """Counts, or makes the calls that are counted."""
    parser = make_parser("counters", __doc__)
    parser.add_argument("--call", nargs="+", choices=NAMES, help="what ncu runs: call these")
    parser.add_argument("--launches", type=int, default=1, help="with --call: to count of each")
    options = parser.parse_args()
    if not sees_gpu("counters"):
        return 2
    if options.call:
        call(options.call, options.launches)
        return 0
    try:
        found = measure(NAMES)
    except ncu.NcuError as error:
        print(f"benchmarks.counters: {error}", file=sys.stderr)
        return 1
    tell(json.loads(layout(found)), counters_table, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Linear attention beside fla (flash-linear-attention): milliseconds, bandwidth and memory.

    python -m benchmarks.linear [--json FILE] [--jobs N] [--limit-seconds N] [--cells PART ...]

bfloat16, 16 heads. fla-core has to be installed; without it flashgen is measured alone. Results are
first compared with the recurrence in float64 on a short sequence. A timing is the median of calls
that wait in the GPU's queue, so that the CPU's part of a call is not in it; the implementations of
a cell take turns, the second time in reverse order. Several processes compile kernels, and stand
still while a cell is measured; a cell for which fla's are late is measured for flashgen alone, and
again with fla once they are there. The share of bandwidth is the time in which q,
k and v would be read and the output written once, at the rate of a copy in the same run, over the
time of a forward call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy import WRONG, WRONG_SUM, WRONG_SUM_OF_PEER
from benchmarks.autotuned import compiles_part, tunes_briefly
from benchmarks.early import Early, Task
from benchmarks.figures import OWN, is_own
from benchmarks.forms import build_own
from benchmarks.linear_tables import linear_table
from benchmarks.linear_ways import (
    FLA,
    Cell,
    Tensors,
    exact,
    tensors_of,
    ways,
)
from benchmarks.measuring import peak_bytes
from benchmarks.record import environment
from benchmarks.script import make_parser, sees_gpu, tell, write_results
from benchmarks.timing import queued_ms
from benchmarks.turns import LATE, Plan, Turn, turns, with_room
from flashgen.bench_linear import copied_bytes
from flashgen.errors import first_line

TOKENS, MOST_TOKENS = 131072, 1048576

#: Tokens of the sequence whose results are checked.
CHECKED = 512

BESIDE_FLA = ("elu", "plain", "retention", "token", "gla")


def _cells() -> Iterator[Cell]:
    """The most important cells first, those of a head_dim together."""
    for head_dim in (128, 64):
        if head_dim == 128:
            yield from (Cell(variant, 128, 8, 2048, "cell") for variant in BESIDE_FLA)
        for seq_len in (2048, 131072, 8192, 32768):
            for variant in BESIDE_FLA:
                yield Cell(variant, head_dim, TOKENS // seq_len, seq_len)
        yield from (Cell(variant, head_dim, 1, 32768) for variant in BESIDE_FLA)
        for seq_len in (8192, 16384):
            yield Cell("favor", head_dim, 32768 // seq_len, seq_len, "softmax")
        if head_dim == 128:
            for variant in ("plain", "elu"):
                for seq_len in (4096, 65536, MOST_TOKENS):
                    yield Cell(variant, head_dim, MOST_TOKENS // seq_len, seq_len, "tokens")


CELLS = tuple(_cells())

#: The sizes for which our own modules are compiled beforehand: sequences of one segment and of
#: several; and the tokens for which fla's kernels are, which depend on the batch alone.
OWN_SIZES, FLA_TOKENS = ((8, 2048), (1, 32768), (64, 512), (1, 512)), 128


def prepare(
    name: str,
    cell: Cell,
    sizes: Sequence[tuple[int, int]],
    part: int,
    parts: int,
    device_type: str = "cuda",
) -> str:
    """Compiles a part of what one implementation needs for a variant, in a process of its own.

    Args:
        name: the implementation.
        cell: a cell of the variant.
        sizes: sequences and tokens of each, for each call.
        part: which part of the configurations of an autotuned kernel.
        parts: how many there are.
        device_type: where.

    Returns:
        Its error, or nothing.
    """
    device = torch.device(device_type)
    try:
        call = dict(ways(cell, device))[name]()
        cells = [replace(cell, batch=batch, seq_len=seq_len) for batch, seq_len in sizes]
        with compiles_part(part, parts):
            for given in cells:
                _forward(call, tensors_of(given, device)[0])()
            for given in cells:
                _training(call, *tensors_of(given, device))()
    except Exception as error:
        return first_line(error)
    return ""


def tasks_of(cells: Sequence[Cell], parts: int) -> list[Task]:
    """What is compiled: our own modules, then each part of each variant of fla.

    The implementations under torch.compile are not there: their kernels are those of fla, and torch
    compiles the rest in processes of its own.
    """
    own, theirs = list[Task](), list[Task]()
    for module in dict.fromkeys(cell.module for cell in cells):
        alike = [cell for cell in cells if cell.module == module]
        for name, _ in ways(alike[0], torch.device("cpu")):
            if is_own(name):
                own.append(Task(_key(name, module), prepare, (name, alike[0], OWN_SIZES, 0, 1)))
            elif name == FLA:
                batches = dict.fromkeys(cell.batch for cell in alike if cell.part != "tokens")
                sizes = tuple((batch, FLA_TOKENS) for batch in batches)
                theirs += [
                    Task(_key(name, module, part), prepare, (name, alike[0], sizes, part, parts))
                    for part in range(parts)
                ]
    return own + theirs


def plan_of(cell: Cell, parts: int) -> Plan[Cell]:
    """A cell with the keys of the tasks that it needs; all ways of fla have fla's kernels."""
    names = [name for name, _ in ways(cell, torch.device("cpu"))]
    theirs = [_key(FLA, cell.module, part) for part in range(parts)]
    return Plan(
        cell,
        [_key(name, cell.module) for name in names if is_own(name)],
        {name: theirs for name in names if not is_own(name)},
    )


def _key(name: str, module: str, part: int = 0) -> str:
    return f"{name}, {module}, {part}"


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    return copied_bytes(queued_ms, device) * 1e3


def new_row(cell: Cell) -> dict[str, Any]:
    """A cell before its first measurement."""
    kept = ("ms", "backward_ms", "mib", "training_mib", "unavailable")
    return asdict(cell) | {"cell": cell.title} | {key: {} for key in kept}


@contextmanager
def refused(row: dict[str, Any], name: str) -> Iterator[None]:
    """Notes why an implementation has no figure in a cell, flashgen's own too: others are kept."""
    try:
        yield
    except Exception as error:
        row["unavailable"][name] = first_line(error)
        print(f"{row['cell']}, {name}: {row['unavailable'][name]}", file=sys.stderr, flush=True)


def check(cell: Cell, device: torch.device, without: Collection[str] = ()) -> dict[str, Any]:
    """The errors of the output and of each gradient against the recurrence in float64.

    Each implementation is first called at the size of the cell: the autotuner keeps what is best
    at its first call, whatever later lengths are. Gradients of a peer may be less exact than ours.
    Those of ``without`` are not called.
    """
    of_size = tensors_of(cell, device)
    inputs, grad_out = tensors_of(replace(cell, batch=1, seq_len=CHECKED), device)
    doubled = tuple(x.detach().double().requires_grad_() for x in inputs)
    out = exact(cell, doubled)
    expected = (out.detach(), *torch.autograd.grad(out, doubled, grad_out.double()))
    row: dict[str, Any] = {"cell": f"{cell.module}, checked", "module": cell.module}
    row |= {"error": {}, "unavailable": {}}
    for name, load in ways(cell, device):
        if name in without:
            continue
        with refused(row, name):
            call = load()
            _forward(call, of_size[0])()
            found = call(*inputs)
            row["error"][name] = [_error(found.detach(), expected[0])]
            _refuse(row["error"][name], [WRONG])
        if name in row["unavailable"]:
            continue
        with refused(row, f"{name}, backward"):
            _training(call, *of_size)()
            grads = torch.autograd.grad(found, inputs, grad_out)
            errors = [_error(x, e) for x, e in zip(grads, expected[1:], strict=True)]
            row["error"][name] += errors
            limits = [WRONG] * 3 + [WRONG_SUM] if name == OWN else [WRONG_SUM_OF_PEER] * 4
            _refuse(errors, limits)
    return row


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm."""
    return float(f"{float((found.double() - expected).norm() / expected.norm()):.3g}")


def _refuse(errors: Sequence[float], limits: Sequence[float]) -> None:
    """Raises ValueError if an error is above its limit, or not a number."""
    if not all(error <= limit for error, limit in zip(errors, limits, strict=False)):
        raise ValueError(f"wrong results: {', '.join(map(str, errors))}")


def measure(
    cell: Cell,
    row: dict[str, Any],
    device: torch.device,
    time_ms: Callable[[Callable[[], Any]], float] = queued_ms,
    memory: Callable[[Callable[[], Any]], tuple[int, Any]] = peak_bytes,
) -> None:
    """Adds milliseconds and memory of every implementation to a row, in both orders.

    What the row has a reason against is left out.
    """
    inputs, grad_out = tensors_of(cell, device)
    calls: dict[str, Callable[..., torch.Tensor]] = {}
    for name, load in ways(cell, device):
        if name in row["unavailable"]:
            continue
        with refused(row, name):
            call = load()
            with torch.no_grad():
                call(*inputs)
            row["mib"][name] = round(memory(_forward(call, inputs))[0] / 2**20)
            calls[name] = call
    for reverse in (False, True):
        for name in list(calls)[:: -1 if reverse else 1]:
            with refused(row, name):
                ms = time_ms(_forward(calls[name], inputs))
                row["ms"].setdefault(name, []).append(float(f"{ms:.4g}"))
    for reverse in (False, True):
        for name in list(calls)[:: -1 if reverse else 1]:
            of_backward = f"{name}, backward"
            if name in row["unavailable"] or of_backward in row["unavailable"]:
                continue
            with refused(row, of_backward):
                if not reverse:
                    step = _training(calls[name], inputs, grad_out)
                    step()
                    row["training_mib"][name] = round(memory(step)[0] / 2**20)
                ms = time_ms(_backward(calls[name], inputs, grad_out))
                row["backward_ms"].setdefault(name, []).append(float(f"{ms:.4g}"))


def _forward(call: Callable[..., torch.Tensor], inputs: Tensors) -> Callable[[], Any]:
    def forward() -> torch.Tensor:
        with torch.no_grad():
            return call(*inputs)

    return forward


def _backward(
    call: Callable[..., torch.Tensor], inputs: Tensors, grad_out: torch.Tensor
) -> Callable[[], Any]:
    out = call(*inputs)
    return lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True)


def _training(
    call: Callable[..., torch.Tensor], inputs: Tensors, grad_out: torch.Tensor
) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(call(*inputs), inputs, grad_out)


def _set_caches(device: torch.device) -> None:
    """Gives this process, and those that it starts, one cache of kernels on disk.

    What torch.compile compiles first moves Triton's cache, and may choose another assembler.
    """
    os.environ.setdefault("FLA_CACHE_RESULTS", "1")  # the autotuner's choices stay on disk, too
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    try:
        torch.compile(lambda x: x + 1)(torch.ones(32, device=device))
    except Exception as error:  # a machine without a C compiler, say: noted where it matters
        print(f"torch.compile: {first_line(error)}", file=sys.stderr)


def _fla_version() -> dict[str, str]:
    try:
        return {"fla_core": version("fla-core")}
    except PackageNotFoundError:
        return {}


def run(
    cells: Sequence[Cell],
    document: dict[str, Any],
    early: Early,
    path: Path | None,
    device: torch.device,
    parts: int = 1,
) -> None:
    """Measures cells into a document, which is written after each.

    Args:
        cells: the cells, the most important first.
        document: the results; rows of cells that are measured replace those that it has of them.
        early: processes with their tasks, and the limit.
        path: a file for the results, or None.
        device: where.
        parts: of fla's kernels of a variant.
    """
    rows = {row["cell"]: row for row in document["cells"]}
    left = {cell.title: None for cell in cells}
    places = {cell.title: place for place, cell in enumerate(CELLS)}

    def say(*shown: Any) -> None:
        print(f"{early.passed:.0f} s:", *shown, flush=True)

    for turn in turns([plan_of(cell, parts) for cell in cells], early):
        refused_there = dict[str, str]()
        if turn.cell.part != "softmax" and OWN not in turn.without:
            known = {"cell": turn.cell.title, "unavailable": refused_there}
            with refused(known, OWN):  # where not even the recurrence can be computed
                refused_there |= _checked(turn, document["checks"], early, device)

        def measured(
            turn: Turn[Cell] = turn, reasons: dict[str, str] = refused_there
        ) -> dict[str, Any]:
            row = new_row(turn.cell) | {"unavailable": turn.without | reasons}
            if OWN not in turn.without:
                with refused(row, OWN):  # of tensors that do not fit, say
                    measure(turn.cell, row, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            return row

        row = rows[turn.cell.title] = with_room(early, measured)
        left.pop(turn.cell.title, None)
        document["cells"] = sorted(rows.values(), key=lambda row: places.get(row["cell"], 0))
        document["left_out"] = [*left]
        say(row["cell"], row["ms"], row["backward_ms"])
        if path:
            write_results(document, path)
    document["left_out"] = [*left]
    say("left out:", ", ".join(left) or "nothing")


def _checked(
    turn: Turn[Cell], checks: list[dict[str, Any]], early: Early, device: torch.device
) -> dict[str, str]:
    """Checks who takes part in a cell and has not been checked for its module; all reasons so far.

    Each is checked before it is timed: fla as soon as it is there, and what torch compiles in the
    first cell that has it.
    """
    module = turn.cell.module
    row = next((row for row in checks if row["module"] == module), None)
    known = {*row["error"], *row["unavailable"]} if row else set[str]()
    names = {name for name, _ in ways(turn.cell, device)} - turn.without.keys()
    if names - known:
        found = with_room(early, lambda: check(turn.cell, device, known | turn.without.keys()))
        if row is None:
            checks.append(found)
            row = found
        else:
            row["error"] |= found["error"]
            row["unavailable"] |= found["unavailable"]
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return dict(row["unavailable"]) if row else {}


def resumed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The results of an earlier run on the same GPU, for this run to go on with.

    Raises:
        ValueError: another GPU, or other versions.
    """
    for key in before["environment"].keys() - {"date"}:
        if before["environment"][key] != now["environment"].get(key):
            raise ValueError(
                f"--resume: {key} is {now['environment'].get(key)}, the file has "
                f"{before['environment'][key]}; write another file"
            )
    return {**before, "environment": now["environment"], "left_out": []}


def main() -> int:
    """Measures, and shows the table; status 1 if flashgen failed or was wrong somewhere."""
    began = time.perf_counter()
    parser = make_parser("linear", __doc__)
    jobs = os.cpu_count() or 2
    parser.add_argument("--jobs", type=int, default=jobs, help="processes that compile meanwhile")
    parser.add_argument("--limit-seconds", type=float, default=3600, help="of the whole run")
    parser.add_argument(
        "--cells", nargs="+", default=[""], metavar="PART", help="cells with one of these in a name"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the cells that the file of results has with all peers",
    )
    options = parser.parse_args()
    if not sees_gpu("linear"):
        return 2
    device = torch.device("cuda")
    _set_caches(device)
    build_own("linear")
    document: dict[str, Any] = {
        "benchmark": "linear",
        "environment": environment(device) | _fla_version(),
        "copy_rate": copy_rate(device),
        "checks": [],
        "left_out": [],
        "cells": [],
    }
    if options.resume and options.json and options.json.exists():
        document = resumed(json.loads(options.json.read_text()), document)
    done = {
        row["cell"]
        for row in document["cells"]
        if not any(reason.startswith(LATE) for reason in row["unavailable"].values())
    }
    cells = [
        cell
        for cell in CELLS
        if cell.title not in done and any(part in cell.title for part in options.cells)
    ]
    parts = max(options.jobs, 1)
    tasks = tasks_of(cells, parts)
    with tunes_briefly(), Early(tasks, options.jobs, options.limit_seconds, began) as early:
        run(cells, document, early, options.json, device, parts)
    tell(document, linear_table, options.json)
    rows = (*document["checks"], *document["cells"])
    failed = [row["cell"] for row in rows if any(map(is_own, row["unavailable"]))]
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Models of transformers by flashgen's attention, beside eager attention and torch's.

    python -m benchmarks.models [--json FILE] [--jobs N] [--limit-seconds N] [--models NAME ...]

bfloat16, random weights but for the encoder, whose package has to be on PYTHONPATH. Processes
compile kernels, one those of a model, and stand still while a model is measured, the first of the
list whose kernels are there; one whose kernels are late is left out. Each model is compared with
eager attention in float32: the output and the gradients of the timed sizes, and tokens that are
generated from few. A timing is the median of calls with all that a model does in Python, as its
users have it; the implementations take turns.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.early import Early, Task
from benchmarks.figures import OWN, Row
from benchmarks.measuring import noted
from benchmarks.model_cells import MODELS, ModelCell, attended_of, inputs_of, model_of
from benchmarks.model_tables import NAMES, models_table
from benchmarks.record import environment
from benchmarks.script import make_parser, sees_gpu, tell, write_results
from benchmarks.turns import Plan, turns, with_room
from flashgen.errors import first_line
from flashgen.integrations.transformers import NAME, register

#: Our name in tables, and that of each implementation in transformers.
IMPLEMENTATIONS = dict(zip(NAMES, (NAME, "sdpa", "eager"), strict=True))

#: Turns of each implementation, and how many steps of decoding are timed.
TURNS, STEPS = 5, 32

#: Tokens that are generated for the comparison.
GENERATED = 12

#: An error may be twice that of eager attention in the same type, or this, if that is more.
FACTOR, LEAST = 2.0, 0.01


def outputs(cell: ModelCell, model: torch.nn.Module, given: dict[str, torch.Tensor]) -> Any:
    """The output of a forward pass, without that of padding."""
    further = {"use_cache": False} if cell.generates else {}
    return attended_of(cell, given)(model(**given, **further)[0])


def gradients(
    cell: ModelCell, model: torch.nn.Module, given: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output of a pass and the gradients of all parameters, for a gradient drawn once."""
    model.zero_grad(set_to_none=True)
    out = outputs(cell, model, given)
    generator = torch.Generator(out.device).manual_seed(2)
    drawn = torch.randn(out.shape, generator=generator, device=out.device)
    (out * drawn.to(out.dtype)).sum().backward()
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    return out.detach(), grads


def generated(cell: ModelCell, model: Any, given: dict[str, torch.Tensor], count: int) -> Any:
    """So many tokens behind each sequence, the likeliest each time."""
    prompt = {key: x for key, x in given.items() if key != "decoder_input_ids"}
    found = model.generate(
        **prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, use_cache=True
    )
    return found[:, -count:]


def error_of(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """The norm of all differences over the norm."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, right, strict=True)]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    whole = sum(float(b.square().sum()) for _, b in pairs)
    return float(f"{(apart / whole) ** 0.5:.3g}")


def new_row(cell: ModelCell) -> Row:
    """A model before its comparison and its first measurement."""
    kept = ("ms", "unavailable", "error", "grad_error", "equal_tokens")
    return {"cell": cell.title} | {key: {} for key in kept}


def check(cell: ModelCell, row: Row, device: torch.device) -> None:
    """Adds the errors of output and gradients of each implementation, and equal tokens, to a row.

    The truth is eager attention in float32 for both. Sizes are the small ones: eager attention in
    float32 would hold gigabytes for each layer at those that are timed.

    Raises:
        ValueError: flashgen's error is above `FACTOR` times that of eager attention.
    """
    small = cell.small()
    exact = model_of(small, "eager", torch.float32, device)
    given = inputs_of(small, device, torch.float32)
    right = gradients(small, exact, given)
    tokens = generated(small, exact, given, GENERATED) if cell.generates else None
    for name, attention in reversed(IMPLEMENTATIONS.items()):  # eager first: it sets the limit
        with noted(row, name, own=True):
            model = model_of(small, attention, torch.bfloat16, device)
            found = gradients(small, model, inputs_of(small, device, torch.bfloat16))
            row["error"][name] = error_of(found[:1], right[:1])
            row["grad_error"][name] = error_of(found[1], right[1])
            if tokens is not None:
                same = model_of(small, attention, torch.float32, device)
                equal = generated(small, same, given, GENERATED) == tokens
                row["equal_tokens"][name] = f"{int(equal.sum())} of {equal.numel()}"
    for kind in ("error", "grad_error"):
        limit = max(FACTOR * row[kind]["eager"], LEAST)
        if OWN in row[kind] and not row[kind][OWN] <= limit:
            raise ValueError(f"{cell.name}: {kind} of {row[kind][OWN]}, where {limit} is allowed")
    if tokens is not None and OWN in row["equal_tokens"]:
        same_tokens = row["equal_tokens"][OWN].split(" of ")
        if same_tokens[0] != same_tokens[1]:
            raise ValueError(f"{cell.name}: {row['equal_tokens'][OWN]} tokens are eager's")


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds until the GPU has done a call."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def measure(cell: ModelCell, row: Row, device: torch.device) -> None:
    """Adds milliseconds of a forward pass, a training step and a step of decoding to a row."""
    given = inputs_of(cell, device, torch.bfloat16)
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for name, attention in IMPLEMENTATIONS.items():
        if name in row["unavailable"]:
            continue
        with noted(row, name, own=True):
            model = model_of(cell, attention, torch.bfloat16, device)
            calls[name] = steps_of(cell, model, given)
            for call in calls[name].values():
                call()
    for kind in ("forward", "training", "one token", "tokens"):
        turns: dict[str, list[float]] = {name: [] for name in calls if kind in calls[name]}
        for turn in range(TURNS):
            for name in list(turns)[:: -1 if turn % 2 else 1]:
                with noted(row, name, own=True):
                    turns[name].append(timed(calls[name][kind]))
        for name, ms in turns.items():
            if ms:
                row["ms"].setdefault(kind, {})[name] = float(f"{median(ms):.4g}")
    if "tokens" in row["ms"]:
        first = row["ms"].pop("one token")
        all_of = row["ms"].pop("tokens")
        row["ms"]["token"] = {
            name: float(f"{(ms - first[name]) / STEPS:.4g}") for name, ms in all_of.items()
        }


def steps_of(
    cell: ModelCell, model: torch.nn.Module, given: dict[str, torch.Tensor]
) -> dict[str, Callable[[], Any]]:
    """What is timed of a model."""

    def forward() -> None:
        with torch.no_grad():
            outputs(cell, model, given)

    steps: dict[str, Callable[[], Any]] = {
        "forward": forward,
        "training": lambda: gradients(cell, model, given),
    }
    if cell.generates:
        prompt = {key: x[:, : x.shape[1] // 2] for key, x in given.items()}
        if cell.padded == "left":  # the half that ends with tokens
            prompt = {key: x[:, x.shape[1] // 2 :] for key, x in given.items()}
        steps["one token"] = lambda: generated(cell, model, prompt, 1)
        steps["tokens"] = lambda: generated(cell, model, prompt, 1 + STEPS)
    return steps


def prepare(cell: ModelCell) -> str:
    """Calls all that is compared or timed once, in a process of its own; returns its error."""
    device = torch.device("cuda")
    register()
    try:
        check(cell, new_row(cell), device)
        model = model_of(cell, NAME, torch.bfloat16, device)
        for call in steps_of(cell, model, inputs_of(cell, device, torch.bfloat16)).values():
            call()
    except Exception as error:
        return first_line(error)
    return ""


def run(
    cells: Sequence[ModelCell],
    early: Early,
    document: dict[str, Any],
    device: torch.device,
    path: Path | None,
) -> bool:
    """Measures models into a document, which is written after each; whether one was wrong.

    Args:
        cells: the most important first.
        early: a process for each, by its name, and the limit.
        document: the results, with an empty list of cells, which are there in the order of these.
        device: where.
        path: a file for the results, or None.
    """
    wrong, rows = False, dict[int, Row]()
    for turn in turns([Plan(cell, [cell.name]) for cell in cells], early):
        errors: list[Exception] = []

        def measured(cell: ModelCell = turn.cell, errors: list[Exception] = errors) -> Row:
            errors.clear()
            row = new_row(cell)
            try:
                check(cell, row, device)
                measure(cell, row, device)
            except Exception as error:
                errors.append(error.with_traceback(None))  # which would hold tensors
                row["unavailable"][OWN] = first_line(error)
                print(f"{cell.name}: {first_line(error)}", file=sys.stderr, flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            return row

        if turn.without:  # its process died, and so would this one
            rows[turn.number] = new_row(turn.cell) | {"unavailable": turn.without}
            wrong = True
        else:
            rows[turn.number] = with_room(early, measured)
            wrong = wrong or any(not isinstance(x, ModuleNotFoundError) for x in errors)
        print(f"{early.passed:4.0f} s {rows[turn.number]}", file=sys.stderr, flush=True)
        document["cells"] = [rows[number] for number in sorted(rows)]
        if path:
            write_results(document, path)
    for number, cell in enumerate(cells):
        if number not in rows:
            print(f"no time for {cell.name}", file=sys.stderr)
    return wrong


def main() -> int:
    """Measures, and shows the table; status 1 if flashgen failed or was wrong somewhere."""
    began = time.perf_counter()
    parser = make_parser("models", __doc__)
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, len(MODELS)))
    parser.add_argument("--limit-seconds", type=float, default=600.0, help="of the whole run")
    parser.add_argument("--models", nargs="+", default=[""], help="those with these in their names")
    args = parser.parse_args()
    if not sees_gpu("models"):
        return 1
    import transformers

    transformers.logging.set_verbosity_error()
    register()
    cells = [cell for cell in MODELS if any(part in cell.name for part in args.models)]
    device = torch.device("cuda")
    document: dict[str, Any] = {
        "benchmark": "models",
        "environment": environment(device) | {"transformers": transformers.__version__},
        "cells": [],
    }
    tasks = [Task(cell.name, prepare, (cell,)) for cell in cells]
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("FLASHGEN_CACHE_DIR", str(Path(folder) / "flashgen"))
        with Early(tasks, args.jobs, args.limit_seconds, began) as early:
            wrong = run(cells, early, document, device, args.json)
    tell(document, models_table, args.json)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

"""The contents of a file of results: the machine, the protocol, and each cell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

from benchmarks.cells import Cell
from benchmarks.passes import FORWARD_PASS, Pass
from benchmarks.peers import load_module
from benchmarks.timing import LOAD_MS, PAUSE_SECONDS, REPETITION_MS, SUSTAINED_MS, WARMUP_MS
from flashgen.config import HOPPER
from flashgen.publish import Seal, read_seal


def environment(device: torch.device) -> dict[str, str]:
    """The machine and versions of the figures, with flash-attn-4 if it is installed."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": _cudnn_version(),
        "cuda": str(torch.version.cuda),
        **_flash_attn_4(),
    }


def protocol(which: Pass = FORWARD_PASS) -> dict[str, Any]:
    """How the figures were taken."""
    flops = "2 * batch * heads * visible (query, key) pairs * (qk_head_dim + v_head_dim)"
    return {
        "timer": "triton.testing.do_bench, median",
        "sustained_timer": "calls back to back after a load of the same, mean by CUDA events",
        "warmup_ms": WARMUP_MS,
        "repetition_ms": REPETITION_MS,
        "pause_s": PAUSE_SECONDS,
        "load_ms": LOAD_MS,
        "sustained_ms": SUSTAINED_MS,
        "flops": flops if which.work == 1.0 else f"{which.work} * {flops}",
        "error": "relative to float64, Frobenius norm over two heads",
    }


def kernels_of(
    module: ModuleType, which: Pass = FORWARD_PASS, published: Path | None = None
) -> dict[str, Any]:
    """The kernels of a module that run here: form, digests of their code, configurations.

    Args:
        module: the module.
        which: the pass.
        published: its file; None is the file that it was loaded from.
    """
    seal = read_seal(published or Path(str(module.__file__)))
    return (_kernel if which is FORWARD_PASS else _backward_kernels)(module, seal)


def new_row(cell: Cell, which: Pass = FORWARD_PASS) -> dict[str, Any]:
    """A cell before its first measurement."""
    return {
        "cell": cell.name,
        "module": cell.module,
        "mask": cell.attention,
        "title": cell.title,
        "seq_len": cell.seq_len,
        "head_dim": [cell.qk_head_dim, cell.v_head_dim],
        "dtype": cell.dtype,
        "batch": cell.batch,
        "num_heads": cell.num_heads,
        "in_grid": cell.in_grid,
        **kernels_of(load_module(cell.module), which),
        "ms": {},
        "tflops": {},
        "sustained_ms": {},
        "sustained_tflops": {},
        "error": {},
        "unavailable": {},
    }


def _kernel(module: ModuleType, seal: Seal | None) -> dict[str, Any]:
    """The kernel that runs here: its form, the digest of its code, and its configuration."""
    hopper = getattr(module, "HOPPER_CONFIG", None)
    if hopper and target() == HOPPER:
        return {"form": "hopper", "kernel": seal and seal.kernels.get("hopper"), "config": hopper}
    config = module.CONFIGS.get(target())
    return {"form": "portable", "kernel": seal and seal.kernels["portable"], "config": config}


def _backward_kernels(module: ModuleType, seal: Seal | None) -> dict[str, Any]:
    """The backward kernels that run here: the digests of their code, and their configurations."""
    hopper = getattr(module, "BACKWARD_HOPPER", None) if target() == HOPPER else None
    if hopper and not hasattr(module, "_launch_of_queries"):
        kernel = seal and seal.kernels.get("hopper_backward")
        return {"form": "hopper_backward", "kernel": kernel, "config": hopper}
    form, forms = "portable", {"keys": "backward_keys", "queries": "backward_queries"}
    if hopper:  # together with the portable kernel over queries
        form = "hopper_keys"
        forms = {"Gluon over keys": "hopper_backward", "portable over queries": "backward_queries"}
    configs = {
        "hopper_backward": hopper,
        "backward_keys": module.BACKWARD_OF_KEYS.get(target()),
        "backward_queries": module.BACKWARD_OF_QUERIES.get(target()),
    }
    return {
        "form": form,
        "kernel": seal and {name: seal.kernels.get(of) for name, of in forms.items()},
        "config": {name: configs[of] for name, of in forms.items()},
    }


def layout(document: Mapping[str, Any]) -> str:
    """JSON with one cell on each line, for diffs and for people; without cells, one entry."""
    if "cells" not in document:
        return json.dumps(document, indent=2) + "\n"
    cells = ",\n".join(f"    {json.dumps(row)}" for row in document["cells"])
    head = {key: value for key, value in document.items() if key != "cells"}
    return json.dumps(head, indent=2)[:-2] + f',\n  "cells": [\n{cells}\n  ]\n}}\n'


def target() -> str:
    """The architecture of the GPU that torch sees as its current one."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _flash_attn_4() -> dict[str, str]:
    try:
        return {"flash_attn_4": version("flash-attn-4")}
    except PackageNotFoundError:
        return {}


def _cudnn_version() -> str:
    """The version of cuDNN as text: torch gives 91900 for 9.19.0."""
    number: int = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

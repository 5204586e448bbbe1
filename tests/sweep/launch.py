"""Runs a module's kernel in the interpreter and holds it to float64."""

from __future__ import annotations

from types import ModuleType

import torch

from flashgen import AttentionSpec
from support.bits import with_bits
from support.cases import Case, inputs
from support.oracle import check


def sweep_dtype(spec: AttentionSpec) -> torch.dtype:
    """The spec's dtype; float16 for bfloat16, which the interpreter cannot compute with."""
    return torch.float32 if spec.dtype == "float32" else torch.float16


def check_kernel(
    module: ModuleType,
    spec: AttentionSpec,
    case: Case,
    *,
    BLOCK_M: int = 32,
    BLOCK_N: int = 16,
    USE_TMA: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Launches the kernel with these tile sizes on the case's data, and checks all it returns.

    The module's own reference is held to float64 on the way. Without a dtype it is `sweep_dtype`;
    of bfloat16 the launcher makes float32, as it always does in the interpreter.
    """
    config = {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "num_warps": 4,
        "num_stages": 2,
        "USE_TMA": USE_TMA,
    }
    tensors = inputs(case, spec, dtype or sweep_dtype(spec))
    params = case.arguments(spec)
    scale = case.scale or spec.scale or spec.qk_head_dim**-0.5
    given = with_bits(module, spec, *tensors[:2], params)
    out, lse = module._launch(*tensors, scale, *given, config)
    check(out, lse, tensors, spec, case)

    doubles = tuple(x.double() for x in tensors)
    out, lse = module.reference(*doubles, scale=case.scale, return_lse=True, **params)
    check(out, lse.float(), doubles, spec, case)

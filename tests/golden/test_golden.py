"""Rendered source beside its goldens: a change of the templates shows as a diff to review.

    pytest tests/golden --update-golden

The shipped variants have theirs in generated/, which `flashgen check` compares. Like those, the
goldens are linted and formatted as any other file is.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen import (
    AttentionSpec,
    Constant,
    Int,
    Tensor,
    alibi,
    block_sparse,
    causal,
    chunked,
    document,
    elu_plus_one,
    exp,
    exp2,
    favor,
    feature_sum,
    identity,
    linear,
    sink_tokens,
    sliding_window,
    softcap,
    softmax,
)
from flashgen.codegen.module import render_module
from flashgen.config import ChosenConfig, KernelChoice, KernelConfig
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.kernels.cache_triton.kernel import render_cache
from flashgen.kernels.forward_hopper.kernel import render_hopper
from flashgen.kernels.forward_triton.kernel import render_kernel
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from support.variants import (
    any_backward,
    any_configs,
    names_of_gluon,
    render_backward_hopper,
    rendered,
    shipped_specs,
)
from support.variety import HEAD_DIM_SPECS, MASK_SPECS

RENDERED = Path(__file__).parent / "rendered"

KERNELS = {
    "masks_nothing": MASK_SPECS["everything"],
    "rows_without_keys": MASK_SPECS["outside_window"],
    "two_runs_of_keys": MASK_SPECS["two_runs"],
    "run_time_parameter": MASK_SPECS["run_time_window"],
    "reads_head": MASK_SPECS["some_heads"],
    "not_affine": MASK_SPECS["dilated"],
    "block_table": MASK_SPECS["block_table"],
    "head_dim_in_segments": HEAD_DIM_SPECS["96"],
    "head_dim_padded": HEAD_DIM_SPECS["72"],
    "head_dims_of_two_sizes": HEAD_DIM_SPECS["32x80"],
}


# Of the kernel for a cache.
CACHE_KERNELS = {
    "cache_causal": AttentionSpec(64, mask=causal(align="bottom_right")),
    "cache_two_runs_and_sinks": AttentionSpec(
        72,
        mask=sliding_window(Int("left"), 0, align="bottom_right") | sink_tokens(4),
        score=alibi(Tensor("slopes", ("num_q_heads",)), align="bottom_right"),
        normaliser=softmax(sink=Tensor("sinks", ("num_q_heads",))),
    ),
}

OF_Q = Tensor("of_q", ("num_q_heads", 64, 32))
OF_K = Tensor("of_k", ("num_kv_heads", 64, 32), "bfloat16")
SHARED = Tensor("shared", ("num_kv_heads", 64, 32))

# Of linear attention: whole modules, since their launchers differ as their kernels do.
LINEAR_MODULES = {
    "linear_full_padded": AttentionSpec(
        (40, 24), "float32", normaliser=linear(lambda x: x * x + 1.0, normalise=False)
    ),
    "linear_identity": AttentionSpec(64, mask=causal(), normaliser=linear(identity())),
    "linear_decays": AttentionSpec(
        (40, 24),
        "float32",
        mask=causal(),
        normaliser=linear(
            identity(), decay=Tensor("log_decay", ("batch", "num_kv_heads", "kv_len"))
        ),
    ),
    "linear_feature_decays": AttentionSpec(
        64,
        mask=causal(),
        normaliser=linear(
            identity(),
            decay=Tensor("decay", ("batch", "num_kv_heads", "kv_len", 64)),
            normalise=False,
        ),
    ),
    "linear_retention": AttentionSpec(
        64,
        mask=causal(),
        normaliser=linear(elu_plus_one(), decay=lambda h: -exp2(-4.0 - h), normalise=False),
    ),
    "linear_documents": AttentionSpec(
        64,
        mask=document() & causal(),
        normaliser=linear(
            elu_plus_one(), decay=Tensor("log_decay", ("batch", "num_kv_heads", "kv_len"))
        ),
    ),
    "linear_chunks": AttentionSpec(
        40,
        "float32",
        mask=chunked(Int("chunk", 512, min=1)) & causal(),
        normaliser=linear(identity(), normalise=False),
    ),
    "linear_favor": AttentionSpec(64, mask=causal(), normaliser=linear(favor(256))),
    "linear_packed": AttentionSpec(
        40,
        mask=causal(),
        normaliser=linear(
            elu_plus_one(), decay=Tensor("log_decay", ("batch", "num_kv_heads", "kv_len"))
        ),
        forms=("dense", "varlen"),
    ),
    "linear_packed_full": AttentionSpec(
        64, normaliser=linear(identity(), normalise=False), forms=("dense", "varlen")
    ),
    "linear_matrices": AttentionSpec(
        (64, 40),
        mask=document() & causal(),
        normaliser=linear((lambda x: exp(x @ OF_Q), lambda x: exp(x @ OF_K))),
    ),
    "linear_packed_matrices": AttentionSpec(
        64,
        "float32",
        normaliser=linear(lambda x: x @ SHARED, normalise=False),
        forms=("dense", "varlen"),
    ),
    "linear_pairs": AttentionSpec(
        40,
        mask=document(),
        align="bottom_right",
        normaliser=linear(lambda x: [x / (feature_sum(x * x) + 1.0), x]),
    ),
    "linear_pairs_decays": AttentionSpec(
        64,
        mask=sliding_window(Int("left", 8), 0),
        normaliser=linear(
            elu_plus_one(), decay=Tensor("log_decay", ("batch", "num_kv_heads", "kv_len"))
        ),
    ),
    "linear_pieces": AttentionSpec(
        40,
        "float32",
        normaliser=linear(lambda x: [x / (feature_sum(x * x) + 1.0), x], normalise=False),
    ),
}

MODULES = ("module", "constants", *LINEAR_MODULES)

# Of the kernel in Gluon.
HOPPER_KERNELS = {
    "hopper_causal": shipped_specs()["causal_d128"],
    "hopper_runs_and_score": AttentionSpec(
        64,
        mask=causal() & (sink_tokens(4) | sliding_window(Int("left"), 0)),
        score=alibi(16),
    ),
}

# Of those of the backward pass: all widths, one run of queries and several, lists of tiles, a
# learned tensor; one kernel, and two.
HOPPER_BACKWARD_KERNELS = {
    "hopper_backward_causal": shipped_specs()["causal_d128"],
    "hopper_backward_runs_and_score": AttentionSpec(
        (56, 40),
        mask=causal() & (sink_tokens(4) | sliding_window(Int("left"), 0)),
        score=alibi(Tensor("slopes", ("num_q_heads",))),
    ),
    "hopper_backward_roles": shipped_specs()["causal_d256"],
    "hopper_backward_deterministic": AttentionSpec(
        128, mask=sliding_window(Int("left"), 0), score=softcap(30.0), deterministic=True
    ),
    "hopper_backward_lists": AttentionSpec(64, mask=causal() & block_sparse(block=32)),
}

HEAD = '"""A golden."""\n\nimport triton\nimport triton.language as tl\n\n\n'

HOPPER_HEAD = f'''"""A golden."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


{names_of_gluon(adds=False, clears=False)}
'''


HOPPER_BACKWARD_HEAD = f'''"""A golden."""

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


{names_of_gluon(adds=True, clears=False)}

'''


def _with_constants() -> AttentionSpec:
    """A layout of long rows, one for each head, and numbers."""
    layouts = [
        [[(3 * i + 5 * j + h) % 7 < 2 for j in range(100)] for i in range(4)] for h in (0, 1)
    ]
    slopes = Constant("slopes", [0.5, -0.0625], dims=("num_q_heads",), doc="What a step costs.")
    return AttentionSpec(
        16,
        mask=block_sparse(layouts, Int("size", 64, min=1)),
        score=alibi(slopes, align="bottom_right"),
    )


def _modules() -> dict[str, str]:
    spec = MASK_SPECS["run_time_window"]
    plan = lower(spec, "module")
    chosen = any_configs(plan)
    chosen["sm_90"] = ChosenConfig(
        KernelConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
        "measured",
        shared=98304,
        gpu="NVIDIA H200",
        triton="3.7.1",
        tflops=512.25,
    )
    constants = lower(_with_constants(), "constants")
    return {
        "module": render_module(plan, {"portable": KernelChoice(chosen), **any_backward(plan)}),
        "constants": rendered(constants),
        **{name: rendered(lower(spec, name)) for name, spec in LINEAR_MODULES.items()},
    }


@functools.cache
def _rendered() -> dict[str, str]:
    kernels = {name: HEAD + render_kernel(lower(spec, name)) for name, spec in KERNELS.items()}
    for name, spec in CACHE_KERNELS.items():
        kernels[name] = HEAD + render_cache(lower(spec, name))
    for name, spec in HOPPER_KERNELS.items():
        kernels[name] = HOPPER_HEAD + render_hopper(lower(spec, name)).lstrip("\n")
    for name, spec in HOPPER_BACKWARD_KERNELS.items():
        backward = backward_plan(lower(spec, name))
        kernel = render_backward_hopper(backward)
        divided = HopperBackward(backward).split
        kernels[name] = (HOPPER_HEAD + "\n" if divided else HOPPER_BACKWARD_HEAD) + kernel
    return {**kernels, **_modules()}


NAMES = (
    *KERNELS,
    *CACHE_KERNELS,
    *HOPPER_KERNELS,
    *HOPPER_BACKWARD_KERNELS,
    *MODULES,
)


@pytest.mark.parametrize("name", NAMES)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    file = RENDERED / f"{name}.py"
    rendered = _rendered()[name]
    if request.config.getoption("--update-golden"):
        RENDERED.mkdir(exist_ok=True)
        file.write_text(rendered)
    assert rendered == file.read_text(), f"review with git diff after --update-golden: {file.name}"


def test_no_golden_is_left_over() -> None:
    assert {file.stem for file in RENDERED.glob("*.py")} == set(NAMES)


def test_rendering_is_the_same_in_every_process() -> None:
    """Neither the order of sets nor a memory address reaches the source."""
    script = (
        "from support.quick_sympy import quicken_sympy\n"
        "quicken_sympy()\n"
        "from support.variants import any_hopper, any_hopper_backward, rendered, shipped_specs\n"
        "from support.variety import MASK_SPECS\n"
        "from flashgen.plan import lower\n"
        "for name, spec in {**shipped_specs(), **MASK_SPECS}.items():\n"
        "    plan = lower(spec, name)\n"
        "    print(rendered(plan, any_hopper(plan), any_hopper_backward(plan)))\n"
    )
    sources = []
    for seed in ("1", "2"):
        path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        sources.append(done.stdout)
    assert sources[0] == sources[1]
    assert sources[0].count("def attention(") == len(shipped_specs()) + len(MASK_SPECS)

"""What flashgen says of the backward kernels is what Triton's compiler says, without a GPU."""

from __future__ import annotations

import functools

import pytest

from compile.usage import AS_PTXAS_12_8_DOES, hold_never_below
from flashgen import (
    AttentionSpec,
    Tensor,
    additive_bias,
    alibi,
    bigbird,
    block_sparse,
    causal,
    document,
    relative_bias,
    t5_bias,
)
from flashgen.budget.occupancy import register_limit
from flashgen.budget.targets import get_target
from flashgen.config import BACKWARD_KERNELS, BackwardKernel, KernelConfig
from flashgen.kernels.backward_triton.kernel import render_backward
from flashgen.kernels.backward_triton.rank import rank_backward
from flashgen.kernels.backward_triton.shared_memory import backward_usage
from flashgen.kernels.backward_triton.space import backward_space
from flashgen.plan import KernelPlan, lower
from flashgen.plan.backward import BackwardPlan, backward_plan
from flashgen.plan.step_cost import tile_loads, unordered_comparisons
from support.compiling.backward import backward_shared_bytes, compile_backward
from support.compiling.compiler import FUSED
from support.compiling.kernel import function_in
from support.compiling.portable import IMPORTS
from support.compiling.report import report_of
from support.loads import kernel_spec
from support.turns import numbered, share
from support.variants import shipped_plan, shipped_specs

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

# sm_86 and sm_89 compile as sm_80 does: one configuration of each variant shows it.
COUSINS = ("sm_86", "sm_89")


@functools.cache
def shipped(name: str) -> BackwardPlan:
    return backward_plan(shipped_plan(name))


@functools.cache
def chosen(name: str, kernel: BackwardKernel, target: str) -> KernelConfig:
    """What a module would ship without any measurement."""
    plan = shipped(name).plan
    candidates = backward_space(plan, kernel, target).candidates
    return rank_backward(plan, kernel, target, candidates)[0]


def structure(name: str) -> tuple[object, ...]:
    """What a kernel's buffers depend on besides its configuration."""
    plan = shipped(name).plan
    fields = (plan.qk_segments, plan.v_segments, plan.torch_dtype, plan.input_precision)
    loads = (tile_loads(plan), unordered_comparisons(plan))
    return (*fields, plan.normaliser, bool(plan.code.score), *loads, plan.dropout)


def sweep(name: str, kernel: BackwardKernel, target: str) -> tuple[KernelConfig, ...]:
    """The whole space of the first variant of a structure, and what the others would ship."""
    first = next(other for other in shipped_specs() if structure(other) == structure(name))
    if name == first:
        return backward_space(shipped(name).plan, kernel, target).candidates
    return (chosen(name, kernel, target),)


def counted_twice(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: str
) -> int:
    """Bytes of p and ds of CDNA3, of which Triton 3.9 may need twice as many as others do."""
    if (target, kernel) != ("gfx942", "keys") or config.num_stages == 1:
        return 0
    return config.BLOCK_M * config.BLOCK_N * plan.itemsize


@pytest.mark.parametrize(
    ("turn", "name", "kernel", "target"), numbered(shipped_specs(), BACKWARD_KERNELS, TARGETS)
)
def test_the_space_needs_exactly_what_is_predicted(
    turn: int, name: str, kernel: BackwardKernel, target: str
) -> None:
    backward = shipped(name)
    for config in share(sweep(name, kernel, target), turn):
        for tma in {backward.plan.uses_tma(target), False}:
            predicted = backward_usage(backward.plan, kernel, config, get_target(target), tma=tma)
            needed = backward_shared_bytes(backward, kernel, config, target, tma=tma)
            more = counted_twice(backward.plan, kernel, config, target)
            assert 0 <= predicted.total - needed <= more, (config, tma, predicted.breakdown)


@pytest.mark.parametrize("target", COUSINS)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
@pytest.mark.parametrize("name", shipped_specs())
def test_targets_of_one_family_agree(name: str, kernel: BackwardKernel, target: str) -> None:
    backward, config = shipped(name), chosen(name, kernel, target)
    predicted = backward_usage(backward.plan, kernel, config, get_target(target))
    assert predicted.total == backward_shared_bytes(backward, kernel, config, target, tma=None)


# Tiles with as many queries, or keys, as there are threads, as of the forward kernel.
@pytest.mark.parametrize(
    ("target", "numbers"),
    [
        ("sm_80", (32, 128, 4, 2)),
        ("sm_90", (128, 64, 4, 2)),
        ("sm_90", (32, 128, 4, 2)),
        ("sm_100", (128, 64, 4, 1)),
        ("sm_100", (128, 64, 4, 2)),
    ],
)
def test_ids_out_of_order_need_exactly_what_is_predicted(
    target: str, numbers: tuple[int, int, int, int]
) -> None:
    plan, config = lower(AttentionSpec(64, mask=document() & causal()), "x"), KernelConfig(*numbers)
    predicted = backward_usage(plan, "keys", config, get_target(target))
    needed = backward_shared_bytes(backward_plan(plan), "keys", config, target, tma=None)
    assert predicted.total == needed, predicted.breakdown


def test_comparisons_in_one_condition_are_put_together_too() -> None:
    plan, config = lower(AttentionSpec(64, mask=~document()), "x"), KernelConfig(32, 128, 4, 2)
    predicted = backward_usage(plan, "keys", config, get_target("sm_90"))
    needed = backward_shared_bytes(backward_plan(plan), "keys", config, "sm_90", tma=None)
    assert predicted.total == needed, predicted.breakdown


def test_tables_of_blocks_beside_ids_out_of_order_are_never_below() -> None:
    plan = lower(AttentionSpec(64, mask=document() & block_sparse(block=64)), "x")
    hold_never_below(plan, "keys", "sm_100", [KernelConfig(32, 128, 4, 2)])


# What flashgen would not propose, and what no shipped variant has: the prediction may be above the
# compiler's figure, never below.
def _unusual() -> dict[str, KernelPlan]:
    specs = {
        "three_segments": AttentionSpec(112, "bfloat16", causal()),
        "wide_values": AttentionSpec((128, 192), "bfloat16", causal()),
        "tf32": AttentionSpec(80, "float32", causal(), input_precision="tf32"),
        "ieee": AttentionSpec(96, "float32", causal(), input_precision="ieee"),
        **{name: kernel_spec(name, 128) for name in ("bias", "ends", "shown", "sigmoid_keys")},
    }
    return {name: lower(spec, name) for name, spec in specs.items()}


UNUSUAL = _unusual()
UNUSUAL_CONFIGS: dict[BackwardKernel, tuple[KernelConfig, ...]] = {
    "keys": (KernelConfig(64, 64, 4, 2), KernelConfig(16, 16, 4, 1)),
    "queries": (KernelConfig(128, 32, 4, 2), KernelConfig(64, 64, 8, 1)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
@pytest.mark.parametrize("name", UNUSUAL)
def test_the_prediction_is_never_below(name: str, kernel: BackwardKernel, target: str) -> None:
    hold_never_below(UNUSUAL[name], kernel, target, UNUSUAL_CONFIGS[kernel])


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_nor_is_it_where_two_loops_leave_bytes_unused(target: str) -> None:
    """Of tiles without a mask and of others: the second loop's tiles start behind its barriers."""
    assert UNUSUAL["ends"].classifies
    hold_never_below(UNUSUAL["ends"], "queries", target, [KernelConfig(64, 64, 4, 2)])


_layout = Tensor("other", ("num_q_heads", None, None), "bool")
_by_row = Tensor("by_row", ("num_q_heads", "q_len"))
_by_key = Tensor("by_key", ("batch", "kv_len"), "bfloat16")

# By how gradients of a tensor are summed up, with warps that share the rows of a product.
LEARNING = {
    "heads": alibi(Tensor("slopes", ("num_q_heads",))),
    "rows": lambda s, b, h, q, kv: s * _by_row[h, q],
    "rows_alone": lambda s, b, h, q, kv: s + _by_row[h, q],  # left to the log-sum-exp
    "columns": lambda s, b, h, q, kv: s * _by_key[b, kv],
    "diagonals": relative_bias(64),
    "buckets": t5_bias(),
    "pairs": additive_bias(),
    "buckets_with_slopes": t5_bias().then(lambda s, b, h, q, kv: abs(s)),
}
TABLES = {
    "by_head": causal() & block_sparse(block=64),
    "with_others": bigbird(64),
    "two": block_sparse(block=64) | ~block_sparse(_layout, 128),
}
LEARNING_CONFIGS: dict[BackwardKernel, tuple[KernelConfig, ...]] = {
    "keys": (KernelConfig(64, 128, 8, 2), KernelConfig(32, 64, 4, 3)),
    "queries": (
        KernelConfig(128, 64, 8, 2),
        KernelConfig(64, 64, 4, 1),
        KernelConfig(128, 32, 8, 3),
    ),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_small_tiles_of_cdna3_are_never_below_either(kernel: BackwardKernel, dtype: str) -> None:
    """Products with a side of 16 are of other instructions than those of 32 x 32."""
    plan = lower(AttentionSpec(64, dtype, mask=causal()), "small")  # type: ignore[arg-type]
    configs = [KernelConfig(m, n, 4, 2) for m in (16, 32) for n in (16, 32)]
    hold_never_below(plan, kernel, "gfx942", configs)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
@pytest.mark.parametrize("name", LEARNING)
def test_what_is_learned_is_never_below_either(
    name: str, kernel: BackwardKernel, target: str
) -> None:
    spec = AttentionSpec(64, mask=causal(), score=LEARNING[name])  # type: ignore[arg-type]
    hold_never_below(lower(spec, name), kernel, target, LEARNING_CONFIGS[kernel])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
def test_tables_of_blocks_are_never_below_either(
    name: str, kernel: BackwardKernel, target: str, dropout: bool
) -> None:
    plan = lower(AttentionSpec(64, mask=TABLES[name], dropout=dropout), name)
    configs = (*LEARNING_CONFIGS[kernel], KernelConfig(64, 128, 8, 1))
    hold_never_below(plan, kernel, target, configs)


@pytest.mark.parametrize("target", TARGETS)
def test_transposed_lists_compile(target: str) -> None:
    from triton.compiler import ASTSource

    backward = backward_plan(lower(AttentionSpec(64, mask=TABLES["by_head"]), "transposed"))
    function = function_in(IMPORTS + render_backward(backward), "_transpose_lists")
    constants = {"BLOCK_M": 128, "CHUNK": 128}
    types = {"transposed_ptr": "*i32", "tiles_ptr": "*i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    source = ASTSource(function, signature, constexprs=constants)
    assert report_of(source, target, FUSED).shared <= 1024


@pytest.mark.parametrize("target", TARGETS)
def test_the_sums_of_diagonals_compile(target: str) -> None:
    from triton.compiler import ASTSource

    plan = lower(AttentionSpec(64, mask=causal(), score=relative_bias(64)), "diagonals")
    text = IMPORTS + render_backward(backward_plan(plan))
    function = function_in(text, "_sum_diagonals")
    constants = {"BLOCK_M": 128, "BLOCK_N": 64, "DISTANCES": 128}
    types = {"sums_ptr": "*fp32", "tiles_ptr": "*fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    source = ASTSource(function, signature, constexprs=constants)
    assert report_of(source, target, FUSED).shared <= 16 * 1024


# Variants whose kernels differ in more than the mask.
VARIANTS = (
    "full_d64", "causal_d80", "causal_d128", "causal_d192_v128", "causal_d256", "causal_fp32_d64",
    "softcap_d128", "dropout_causal_d64",
)  # fmt: skip

# Bytes of a thread that have no room in registers; of the others, none.
SPILLED: dict[tuple[str, BackwardKernel, str], int] = {
    ("full_d64", "keys", "sm_80"): 8,
    ("full_d64", "keys", "sm_90"): 136,
    ("causal_d80", "keys", "sm_80"): 264,
    ("causal_d80", "keys", "sm_100"): 560,
    ("causal_d128", "keys", "sm_80"): 72,
    ("causal_d128", "keys", "sm_90"): 32,
    ("causal_d128", "keys", "sm_100"): 192,
    ("causal_d192_v128", "keys", "sm_90"): 32,
    ("causal_d192_v128", "keys", "sm_100"): 456,
    ("causal_d192_v128", "queries", "sm_80"): 48,
    ("causal_d256", "keys", "sm_80"): 16,
    ("causal_d256", "keys", "sm_90"): 128,
    ("causal_d256", "queries", "sm_80"): 88,
    ("causal_fp32_d64", "keys", "sm_80"): 64,
    ("causal_fp32_d64", "keys", "sm_90"): 48,
    ("causal_fp32_d64", "keys", "sm_100"): 248,
    ("causal_fp32_d64", "keys", "gfx942"): 504,
    ("softcap_d128", "keys", "sm_80"): 296,
    ("softcap_d128", "keys", "sm_90"): 168,
    ("softcap_d128", "keys", "sm_100"): 232,
    ("dropout_causal_d64", "keys", "sm_80"): 48,
    ("dropout_causal_d64", "keys", "sm_90"): 64,
    ("dropout_causal_d64", "keys", "sm_100"): 248,
    ("dropout_causal_d64", "queries", "sm_80"): 8,
}


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_choice_spills_no_more_than_is_known(
    name: str,
    kernel: BackwardKernel,
    target: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    backward, config = shipped(name), chosen(name, kernel, target)
    compiled = compile_backward(backward, kernel, config, target, tma=None)
    assert compiled.spilled <= SPILLED.get((name, kernel, target), 0), config
    assert compiled.registers <= register_limit(config, get_target(target))
    predicted = backward_usage(backward.plan, kernel, config, get_target(target))
    more = counted_twice(backward.plan, kernel, config, target)
    assert 0 <= predicted.total - compiled.shared <= more, predicted.breakdown

"""What the Gluon kernel needs, as algebra; tests/compile holds it to the compiler."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import (
    AttentionSpec,
    Tensor,
    additive_bias,
    block_sparse,
    causal,
    full,
    sliding_window,
    softcap,
)
from flashgen.budget.buffers import MEANINGS
from flashgen.config import KernelConfig
from flashgen.kernels.forward_hopper.captures import captured_bytes
from flashgen.kernels.forward_hopper.shape import hopper_shape
from flashgen.kernels.forward_hopper.shared_memory import (
    TARGET,
    hopper_usage,
    live_registers,
    partitions,
    spills,
    worst_hopper_usage,
)
from flashgen.plan import KernelPlan, lower
from flashgen.symbols import evaluate
from support.loads import kernel_spec
from support.vocabulary import VOCABULARY


@functools.cache
def plan(head_dim: int | tuple[int, int] = 128, **fields: object) -> KernelPlan:
    return lower(AttentionSpec(head_dim, "bfloat16", **({"mask": causal()} | fields)), "x")


LATE = causal(align="bottom_right")
WINDOW = plan(mask=sliding_window(1024, 0))
#: Of rows with ends of their own, without lists of tiles, which modules of a cache do not have.
UNLISTED = lower(replace(kernel_spec("ends", 64), forms=("dense", "cache")), "x")
#: Of listed tiles of keys, two consumers compute tiles of queries one beside the other.
LISTED = plan(mask=block_sparse() & causal())


def config(block_m: int, block_n: int, stages: int) -> KernelConfig:
    return KernelConfig(block_m, block_n, num_warps=block_m // 16, num_stages=stages)


PLANS = {
    "d16": plan(16),
    "d64": plan(64),
    "d80": plan(80),
    "d128": plan(128),
    "window": WINDOW,
    "listed": LISTED,
    "d128_v64": plan((128, 64)),
    "d256": plan(256),
    "d192_v128": plan((192, 128)),
    **{name: lower(kernel_spec(name), "x") for name in ("ends", "two_biases")},
    "full": lower(VOCABULARY["full"].spec("float16", 64), "x"),
    "bigbird": lower(VOCABULARY["bigbird"].spec("float16", 128), "x"),
}
CONFIGS = st.builds(
    config,
    st.sampled_from([128, 192]),
    st.sampled_from([16, 32, 64, 128, 256]),
    st.integers(1, 8),
)
A_PLAN = st.sampled_from(sorted(PLANS)).map(PLANS.get)


def test_causal_by_hand() -> None:
    usage = hopper_usage(plan(), config(192, 64, 4))
    # Four descriptors and three tiles, as the output has those of the queries; lse, six arrays of
    # barriers and what is handed over; of the call six numbers and qk_scale; votes, outgrown; the
    # counter, heads_together.
    captures = 4 * 8 + 3 * 28 + 8 + 6 * 16 + 16 + 6 * 4 + 4 + 16 + 16 + 8 + 4
    assert captures == captured_bytes(plan()) == 308
    assert dict(usage.parts) == {
        "Q": 2 * 192 * 128 * 2,
        "K": 4 * 64 * 128 * 2,
        "V": 4 * 64 * 128 * 2,
        "captures": captures + 12,  # the bytes of twelve warps
        "tiles handed over": 2 * (5 + 3 * 3) * 4,  # twice five numbers, and three of each consumer
        "growth": 192 + 6 * 4 + 12,  # votes of 192 rows, six numbers; what follows is aligned
        # Two arrays of six, two of four and two of two, each from a multiple of 16 on.
        "barriers": 2 * 48 + 2 * 32 + 2 * 16 + 8,
    }
    assert usage.total == 230236
    assert usage.limit == 232448


def test_a_window_by_hand() -> None:
    usage = hopper_usage(WINDOW, config(192, 64, 4))
    # As above, but for heads_together, and left.
    assert captured_bytes(WINDOW) == captured_bytes(plan())
    causal_usage = dict(hopper_usage(plan(), config(192, 64, 4)).parts)
    # A tile begins somewhere; each consumer has one end more of the keys that all its queries see.
    more = {"tiles handed over": 2 * (1 + 3) * 4}
    assert dict(usage.parts) == {name: n + more.get(name, 0) for name, n in causal_usage.items()}
    assert usage.total == 230268


def test_listed_tiles_by_hand() -> None:
    usage = hopper_usage(LISTED, config(128, 128, 2))
    # Four tiles, one barrier and two arrays of them more than above; four sizes and strides of the
    # table, its address and that of the list.
    captures = captured_bytes(LISTED)
    assert captures == captured_bytes(plan()) + 28 + 12 + 8 + 8 + 6 * 4 + 2 * 16
    assert dict(usage.parts) == {
        "Q": 128 * 128 * 2,
        "K": 3 * 128 * 128 * 2,
        "V": 2 * 128 * 128 * 2,
        "output": 128 * 128 * 2,
        "captures": captures + 8,  # the bytes of eight warps
        "tiles handed over": 2 * 7 * 4,  # twice seven numbers
        # Votes of 128 rows, four numbers, and a barrier, which starts at a multiple of 16.
        "growth": 128 + 4 * 4 + 8 + 12,
        # Six arrays of two and two of three, each from a multiple of 16 on.
        "barriers": 6 * 16 + 2 * 32 + 8,
    }
    assert usage.total == 230192
    assert usage.limit == 232448


@pytest.mark.parametrize(
    ("kernel", "numbers", "figure"),
    [
        (plan(64, mask=full()), (192, 128, 2), 140108),
        (plan(64, mask=LATE), (192, 128, 2), 140188),
        (plan(64, mask=LATE), (192, 128, 4), 205788),
        (plan(80, mask=causal(align="top_left")), (192, 64, 4), 144332),
        (plan(mask=full()), (192, 64, 4), 230156),
        (plan((128, 64)), (192, 64, 4), 222060),
        (WINDOW, (128, 128, 2), 197320),
        (plan(256, mask=LATE), (128, 64, 2), 230024),
        (plan((192, 128), mask=LATE), (128, 64, 2), 180984),
        (lower(kernel_spec("softcap", 64), "x"), (128, 128, 2), 115464),
        (lower(kernel_spec("ends", 64), "x"), (128, 128, 2), 115520),
        (UNLISTED, (128, 128, 2), 115608),
        # Three consumers that reduce over rows leave no room for the producer's atomic.
        (UNLISTED, (192, 128, 3), 173180),
    ],
)
def test_figures_that_the_compiler_gave(
    kernel: KernelPlan, numbers: tuple[int, int, int], figure: int
) -> None:
    assert hopper_usage(kernel, config(*numbers)).total == figure


BIAS = Tensor("bias", ("batch", 1, 1, "kv_len"), "float16")


def test_captures_are_what_the_kernel_reads() -> None:
    plain = captured_bytes(plan(score=softcap(30.0)))
    # An address, four sizes, and one stride of four: two of them are of dimensions of one element,
    # and the last one is 1.
    assert captured_bytes(plan(score=additive_bias(BIAS))) == plain + 8 + 4 * 4 + 4
    everywhere = additive_bias(Tensor("bias", ("batch", "num_q_heads", "q_len", "kv_len")))
    assert captured_bytes(plan(score=everywhere)) == plain + 8 + 4 * 4 + 3 * 4
    # kv_len is read where it is not known to be q_len.
    assert captured_bytes(plan(mask=LATE)) == captured_bytes(plan()) + 4


def test_a_tensor_that_is_not_contiguous_needs_another_stride() -> None:
    kernel, numbers = lower(kernel_spec("two_biases"), "x"), config(128, 64, 2)
    more = captured_bytes(kernel, contiguous=False) - captured_bytes(kernel)
    assert more == 2 * 4
    usual, most = hopper_usage(kernel, numbers).total, worst_hopper_usage(kernel, numbers).total
    assert usual <= most <= usual + 16


def test_triton_36_captures_the_stride_of_1_of_all_tensors_once() -> None:
    kernel = lower(kernel_spec("two_biases"), "x")
    assert captured_bytes(kernel, ones=True) == captured_bytes(kernel) + 4
    assert captured_bytes(plan(), ones=True) == captured_bytes(plan())


@settings(deadline=None)
@given(kernel=A_PLAN, config=CONFIGS)
def test_the_worst_is_the_most(kernel, config) -> None:
    most = worst_hopper_usage(kernel, config).total
    assert most >= hopper_usage(kernel, config, ones=True).total
    assert most >= hopper_usage(kernel, config).total


@settings(deadline=None)
@given(kernel=A_PLAN, config=CONFIGS)
def test_parts_and_formula_say_the_same(kernel, config) -> None:
    usage = hopper_usage(kernel, config)
    assert sum(size for _, size in usage.parts) == usage.total > 0
    assert all(size > 0 for _, size in usage.parts)
    assert usage.meanings.items() <= MEANINGS.items()
    segments = {f"qk_{i}": width for i, width in enumerate(kernel.qk_segments)}
    segments |= {f"v_{i}": width for i, width in enumerate(kernel.v_segments)}
    values = {**config.as_dict(), **segments, "itemsize": kernel.itemsize}
    assert {symbol.name for symbol in usage.formula.free_symbols} <= values.keys()
    assert evaluate(usage.formula, values) == usage.total
    for (name, size), (part, formula) in zip(usage.parts, usage.formulas, strict=True):
        assert name == part
        skipped = size - evaluate(formula, values)  # to where the next buffer may start
        assert skipped == 0 if name in ("Q", "K", "V", "output") else 0 <= skipped < 160


@settings(deadline=None)
@given(kernel=A_PLAN, config=CONFIGS)
def test_tiles_are_counted_in_full(kernel, config) -> None:
    parts = dict(hopper_usage(kernel, config).parts)
    row = config.BLOCK_N * kernel.itemsize
    stages = config.num_stages + hopper_shape(kernel).k_extra
    assert parts["K"] == stages * row * sum(kernel.qk_segments)
    assert parts["V"] == config.num_stages * row * sum(kernel.v_segments)
    queries = config.BLOCK_M * sum(kernel.qk_segments) * kernel.itemsize
    assert parts["Q"] in (queries, 2 * queries)


@pytest.mark.parametrize("block_m", [128, 192])
def test_partitions_share_the_registers_of_an_sm(block_m: int) -> None:
    parts = partitions(config(block_m, 64, 2))
    assert [part.warps for part in parts] == [4] * (block_m // 64) + [1]
    # setmaxnreg is of a warp group, so the producer's four warps have those of one.
    used = sum(128 * part.registers for part in parts)
    assert TARGET.registers_per_sm - 8 * 128 * len(parts) < used <= TARGET.registers_per_sm


@pytest.mark.parametrize(
    ("kernel", "numbers", "live", "spilled"),
    [
        (plan(64), (192, 128, 2), 32 + 64 + 32, False),
        (plan(64, dropout=True), (192, 128, 2), 32 + 64 + 32 + 8, True),
        (plan(80), (192, 128, 2), 40 + 64 + 32, True),
        (plan(64, score=additive_bias()), (192, 128, 2), 32 + 64 + 32 + 64, True),
        (plan(64, score=additive_bias()), (192, 64, 2), 32 + 32 + 16 + 32, False),
        (plan(128, score=additive_bias()), (192, 64, 2), 64 + 32 + 16 + 32, True),
        (plan(128, score=additive_bias()), (128, 64, 2), 64 + 32 + 16 + 32, False),
        (plan(), (192, 64, 2), 64 + 32 + 16, False),
        (WINDOW, (192, 64, 2), 64 + 32 + 16, False),
        (LISTED, (128, 128, 2), 64 + 64 + 32 + 32, False),
        (LISTED, (192, 64, 2), 64 + 32 + 16 + 32, True),
        (plan(256), (128, 64, 2), 128 + 32 + 16, False),
        (plan(256), (128, 128, 2), 128 + 64 + 32, True),
    ],
)
def test_live_registers(
    kernel: KernelPlan, numbers: tuple[int, int, int], live: int, spilled: bool
) -> None:
    assert live_registers(kernel, config(*numbers)) == live
    assert spills(kernel, config(*numbers)) is spilled


def test_there_are_two_or_three_consumers() -> None:
    with pytest.raises(KeyError):
        partitions(KernelConfig(64, 64, num_warps=4, num_stages=2))

"""What the Gluon kernels of the backward pass need, and which configurations are candidates."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from flashgen import AttentionSpec, Blocks, Tensor, additive_bias, alibi, causal, full
from flashgen.budget.buffers import MEANINGS
from flashgen.config import KernelConfig
from flashgen.kernels.backward_hopper import space as tuning
from flashgen.kernels.backward_hopper.captures import backward_captured_bytes
from flashgen.kernels.backward_hopper.shared_memory import (
    hopper_backward_usage,
    worst_hopper_backward_usage,
)
from flashgen.kernels.backward_hopper.space import rank_hopper_backward
from flashgen.kernels.backward_hopper_split import queries as hopper_queries
from flashgen.kernels.backward_hopper_split.captures import queries_captured_bytes
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.shared_memory import queries_usage, worst_queries_usage
from flashgen.kernels.backward_hopper_split.space import split_space
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.symbols import evaluate
from support.loads import kernel_spec
from support.variants import any_hopper_backward, rendered, why_no_backward

WIDEST = KernelConfig(64, 64, num_warps=8, num_stages=2)
NARROW = {stages: KernelConfig(128, 128, num_warps=8, num_stages=stages) for stages in (2, 3)}
WIDE = {stages: KernelConfig(64, 128, num_warps=8, num_stages=stages) for stages in (2, 3)}


@functools.cache
def names(head_dim: int | tuple[int, int] = 128, dtype: str = "bfloat16") -> HopperBackwardSplit:
    return of(AttentionSpec(head_dim, dtype, mask=causal()))


def of(spec: AttentionSpec) -> HopperBackwardSplit:
    return HopperBackwardSplit(backward_plan(lower(spec, "x")))


def captured(**fields: Any) -> int:
    return backward_captured_bytes(of(AttentionSpec(128, **fields)))


def test_causal_by_hand() -> None:
    usage = hopper_backward_usage(names(), WIDE[2])
    # Nine descriptors, of parts too, and the counter; tiles of q, grad_out, k and v, of rows, of ds
    # and dq; five arrays of barriers and one of numbers; num_q_heads, num_kv_heads, kv_len,
    # rows_len, num_tiles and scale; heads_together, as tiles are uneven; num_whole, num_parts and
    # parts_together, as some may come in parts; q_len, which the queries that see a tile of keys,
    # and its mask, depend on.
    captures = 10 * 8 + 4 * 28 + 24 + 2 * 20 + 5 * 16 + 16 + 6 * 4 + 5 * 4
    assert captures == backward_captured_bytes(names()) == 396
    assert dict(usage.parts) == {
        "Q tiles": 2 * 64 * 128 * 2,
        "dO tiles": 2 * 64 * 128 * 2,
        "K tiles": 2 * 128 * 128 * 2,
        "V tile": 128 * 128 * 2,
        "dS tiles": 2 * 128 * 64 * 2,
        "dQ tiles": 2 * 64 * 64 * 4,
        "LSE, delta": 2 * 2 * 64 * 4,
        "captures": captures + 8,  # the bytes of eight warps
        "barriers": 5 * 16 + 4,  # from multiples of 16 on, the first behind 404 bytes
        "tiles handed over": 2 * 4,
    }
    assert usage.total == 230896
    assert usage.limit == 232448


def test_segments_by_hand() -> None:
    """Of 80 columns: each tile has a buffer of 64 and one of 16, and room for the next values."""
    usage = hopper_backward_usage(names(80), WIDE[2])
    # Two descriptors of each of q, k, v, grad_out, grad_k, grad_v and parts, one of the rows, and
    # one of the second consumer's sums of dq; the counter; two of each kind of tiles. The rest is
    # what causal masks of 128 columns take.
    captures = (7 * 2 + 2) * 8 + 8 + 2 * 4 * 28 + 24 + 2 * 20 + 5 * 16 + 16 + 6 * 4 + 5 * 4
    assert captures == backward_captured_bytes(names(80)) == 564
    sizes = dict(usage.parts)
    assert {name: sizes[name] for name in ("Q tiles", "dO tiles", "K tiles", "V tiles")} == {
        "Q tiles": 2 * 64 * (64 + 16) * 2,
        "dO tiles": 2 * 64 * (64 + 16) * 2,
        "K tiles": 2 * 128 * (64 + 16) * 2,
        "V tiles": 2 * 128 * (64 + 16) * 2,
    }
    assert sum(sizes.values()) == usage.total == 190112


def test_roles_by_hand() -> None:
    """Where one consumer computes the gradient of values, the other that of keys."""
    usage = hopper_backward_usage(names(256), WIDEST)
    # Six descriptors; tiles of q, grad_out, k and v, of rows, of factors; two arrays of barriers
    # and a barrier; no rows_len, which sums of dq alone are placed by; q_len and kv_len.
    captures = 6 * 8 + 4 * 28 + 24 + 16 + 2 * 16 + 12 + 6 * 4 + 2 * 4
    assert captures == backward_captured_bytes(names(256)) == 276
    assert dict(usage.parts) == {
        "Q tiles": 2 * 64 * 256 * 2,
        "dO tiles": 2 * 64 * 256 * 2,
        "K tile": 64 * 256 * 2,
        "V tile": 64 * 256 * 2,
        "factors": 64 * 64 * 4,
        "LSE, delta": 2 * 2 * 64 * 4,
        "captures": captures + 8,
        "barriers": 4 + 2 * 16 + 8 + 8,  # from multiples of 16 on, the first behind 276 bytes
    }
    assert usage.total == 214352


def test_queries_by_hand() -> None:
    """The kernel that computes the gradient of q alone."""
    usage = queries_usage(names(256))
    # Five descriptors and the rows; four kinds of tiles; four arrays of barriers and a barrier;
    # num_q_heads, num_kv_heads, rows_len, scale, batch, head, q_first; q_len, where queries end.
    captures = 5 * 8 + 8 + 4 * 28 + 4 * 16 + 12 + 7 * 4 + 4
    assert captures == queries_captured_bytes(names(256)) == 268
    parts = dict(usage.parts)
    assert {name: parts[name] for name in ("Q tile", "dO tile", "K tiles", "V tiles")} == {
        "Q tile": 128 * 256 * 2,
        "dO tile": 128 * 256 * 2,
        "K tiles": 2 * 64 * 256 * 2,
        "V tiles": 64 * 256 * 2,
    }
    assert usage.total == 229728 and sum(parts.values()) == 229728


@pytest.mark.parametrize(
    ("kernel", "config", "figure"),
    [
        (names(), WIDE[3], 264224),
        (names(80), WIDE[2], 190112),
        (names((72, 104), "float16"), WIDE[3], 221312),
        (names(64), NARROW[2], 231888),
        (names((16, 40)), NARROW[2], 231888),
        (names(64), NARROW[3], 265712),
        (of(kernel_spec("ends", 64)), NARROW[2], 231936),
        (of(kernel_spec("shown", 128)), WIDE[2], 230912),
        (names((192, 128)), WIDEST, 140704),
        (names(192), WIDEST, 165344),
        (of(AttentionSpec(64, mask=causal(), deterministic=True)), NARROW[2], 100672),
        (of(AttentionSpec(128, mask=causal(), deterministic=True)), WIDE[2], 132416),
    ],
)
def test_figures_that_the_compiler_gave(
    kernel: HopperBackwardSplit, config: KernelConfig, figure: int
) -> None:
    assert hopper_backward_usage(kernel, config).total == figure


@pytest.mark.parametrize(
    ("spec", "figure"),
    [
        (AttentionSpec((192, 128), mask=causal()), 164272),
        (AttentionSpec(192, mask=causal()), 197120),
        (AttentionSpec(64, mask=causal(), deterministic=True), 98656),
        (AttentionSpec(128, mask=causal(), deterministic=True), 196960),
    ],
)
def test_figures_of_queries_that_it_gave(spec: AttentionSpec, figure: int) -> None:
    assert queries_usage(of(spec)).total == figure


SLOPES = Tensor("slopes", ("num_q_heads",))
BIAS = Tensor("bias", ("batch", 1, 1, "kv_len"), "float16")


def test_captures_are_what_the_kernel_reads() -> None:
    plain = captured(mask=causal())
    # q_len alone says where the queries end; kv_len where the keys do, whatever the mask. How many
    # tiles are shared is one number, and so is how many heads are side by side. Parts of tiles have
    # three numbers and a descriptor more.
    assert captured(mask=full()) == plain - 3 * 4 - 8
    # An address, a size and the sums that its gradient is made of.
    assert captured(mask=causal(), score=alibi(SLOPES)) == plain + 8 + 4 + 8
    # An address, four sizes, one stride of four, and the sums.
    assert captured(mask=causal(), score=additive_bias(BIAS)) == plain + 8 + 4 * 4 + 4 + 8


def test_what_may_be_needed_is_not_below_what_is() -> None:
    for kernel in (names(), of(AttentionSpec(128, score=additive_bias(BIAS)))):
        worst = worst_hopper_backward_usage(kernel, WIDE[3]).total
        for ones in (False, True):
            assert worst >= hopper_backward_usage(kernel, WIDE[3], ones=ones).total
    for ones in (False, True):
        assert worst_queries_usage(names(256)).total >= queries_usage(names(256), ones=ones).total
    strided = of(AttentionSpec(128, score=additive_bias(BIAS)))
    assert (
        backward_captured_bytes(strided, contiguous=False) == backward_captured_bytes(strided) + 4
    )
    assert backward_captured_bytes(strided, ones=True) == backward_captured_bytes(strided) + 4


@pytest.mark.parametrize(("kernel", "configs"), [(names(), WIDE), (names(40), NARROW)])
def test_parts_and_formula_say_the_same(
    kernel: HopperBackwardSplit, configs: dict[int, KernelConfig]
) -> None:
    for config in configs.values():
        usage = hopper_backward_usage(kernel, config)
        assert sum(size for _, size in usage.parts) == usage.total
        assert usage.meanings.items() <= MEANINGS.items()
        values = {**config.as_dict(), "itemsize": 2, "qk_0": kernel.width, "v_0": kernel.width}
        assert evaluate(usage.formula, values) == usage.total


def test_those_of_queries_too() -> None:
    usage = queries_usage(names((192, 128)))
    assert usage.meanings.items() <= MEANINGS.items()
    tiles = {"BLOCK_M": 128, "BLOCK_N": 64, "itemsize": 2}
    values = {**tiles, "qk_0": 128, "qk_1": 64, "v_0": 128}
    assert evaluate(usage.formula, values) == usage.total


def test_the_candidates() -> None:
    assert split_space(names()).candidates == (WIDE[2],)
    assert split_space(names(64)).candidates == (NARROW[2],)
    assert split_space(names(256)).candidates == (WIDEST,)
    assert split_space(names(80)).candidates == (WIDE[2], WIDE[3])
    assert split_space(names(96)).candidates == (WIDE[2],)
    assert rank_hopper_backward(WIDE.values()) == [WIDE[2], WIDE[3]]
    assert rank_hopper_backward([WIDE[3], WIDE[2]]) == [WIDE[2], WIDE[3]]


def test_what_does_not_fit_says_what_it_consists_of() -> None:
    assert split_space(names(64)).rejected == (
        (
            NARROW[3],
            "needs 265,712 B of shared memory, sm_90 has 232,448 B (Q tiles 49,152 + dO tiles "
            "49,152 + K tiles 32,768 + V tiles 32,768 + dS tiles 65,536 + dQ tiles 32,768 + "
            "LSE, delta 3,072 + captures 388 + barriers 100 + tiles handed over 8)",
        ),
    )


def test_pins_say_nothing_of_it() -> None:
    pinned = of(AttentionSpec(128, mask=causal(), blocks=Blocks(BLOCK_M=64, num_stages=4)))
    assert split_space(pinned) == split_space(names())


def test_the_kernel_of_queries_has_to_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hopper_queries.V_STAGES, 256, 2)
    assert "needs 262,496 B" in why_no_backward(names(256))


def test_a_module_says_what_both_kernels_need() -> None:
    plan = names(256).backward.plan
    module = rendered(plan, any_hopper_backward(plan))
    assert "bytes; that of the one over queries 229,728." in module.replace("\n# ", " ")


def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_backward(names()) == ""
    wide = names(320)
    assert why_no_backward(wide) == wide.why_not != ""
    assert split_space(wide).candidates == split_space(wide).rejected == ()
    monkeypatch.setattr(tuning, "STAGES", (4,))
    assert why_no_backward(names()).startswith(
        "BLOCK_M=64 BLOCK_N=128 num_warps=8 num_stages=4: needs 297,504 B of shared memory"
    )

"""The Gluon kernels of the backward pass: shared memory as predicted, machine code that is fast.

Every candidate of every shipped variant, and one of every mask, score and normaliser, is taken as
far as the pass that allots shared memory. What each module would ship without a measurement becomes
machine code. Where another kernel computes the gradient of q, as of wide heads and of deterministic
gradients, that one too.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from compile.usage import AS_PTXAS_12_8_DOES, check_backward_usage
from flashgen import (
    AttentionSpec,
    Mask,
    Tensor,
    alibi,
    block_sparse,
    causal,
    document,
    full,
    relative_bias,
    sigmoid_attention,
    sliding_window,
    softcap,
)
from flashgen.config import KernelConfig
from flashgen.kernels.backward_hopper.space import rank_hopper_backward
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.space import split_space
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from support.compiling.backward_hopper import (
    compile_backward_hopper,
    compile_queries,
)
from support.compiling.predicted import OLDER
from support.compiling.report import Report
from support.loads import kernel_spec
from support.turns import some
from support.variants import shipped_plan, shipped_specs, why_no_backward
from support.vocabulary import VOCABULARY


def machine_code(names: HopperBackwardSplit) -> list[Report]:
    """Of each kernel, with the candidate that comes first."""
    config = rank_hopper_backward(split_space(names).candidates)[0]
    of_both = compile_backward_hopper(names.backward, config)
    return [of_both, compile_queries(names.backward)] if names.both_in_gluon else [of_both]


def of(spec: AttentionSpec) -> HopperBackwardSplit:
    return HopperBackwardSplit(backward_plan(lower(spec, "x")))


@functools.cache
def shipped(name: str) -> HopperBackwardSplit:
    return HopperBackwardSplit(backward_plan(shipped_plan(name)))


SHIPPED = tuple(name for name in shipped_specs() if not why_no_backward(shipped(name)))

SPACES = [
    pytest.param(name, config, id=f"{name}-s{config.num_stages}")
    for name in SHIPPED
    for config in split_space(shipped(name)).candidates
]

#: Why shipped variants have none; of every other there is one.
WITHOUT = {
    "causal_fp32_d64": "float32",
}


@pytest.mark.parametrize("name", shipped_specs())
def test_which_shipped_variants_have_one(name: str) -> None:
    reason = why_no_backward(shipped(name))
    assert reason.startswith(WITHOUT[name]) if name in WITHOUT else not reason


@pytest.mark.parametrize(("name", "config"), SPACES)
def test_every_candidate_needs_exactly_what_is_predicted(name: str, config: KernelConfig) -> None:
    check_backward_usage(shipped(name), config)


@pytest.mark.parametrize("dim", some((64, 256), every=2))
def test_extremes_of_a_tile_take_no_shared_memory(dim: int) -> None:
    """Each warp holds all positions of the tile that they are extremes over."""
    # A spec with the form of a cache has no lists of tiles.
    forms = ("dense", "cache")
    names = of(AttentionSpec(dim, mask=VOCABULARY["document_unsorted"].mask, forms=forms))
    assert names.backward.q_tiles.reduce_rows
    for config in split_space(names).candidates:
        check_backward_usage(names, config)


#: Bytes of a thread's numbers that may have no room in registers. A few rest between tiles, or are
#: read once a tile; what spills from a loop's products takes hundreds.
FEW = 256

#: With dropout, numbers of Philox are made while both products of scores are in registers: of the
#: 1,452 instructions of a step 32 store what as many read again.
SPILLED = {"dropout_causal_d64": 856 if OLDER else 740}


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("name", SHIPPED)
def test_what_would_be_shipped_is_fast_machine_code(name: str) -> None:
    for compiled in machine_code(shipped(name)):
        assert compiled.spilled <= SPILLED.get(name, FEW)
        assert compiled.warnings == ()
        assert compiled.unset == []


#: Variants whose masks are comparisons of positions, with masked steps for both consumers.
COMPARED = ("causal_d64", "causal_d128", "window_d128", "documents_d128", "prefix_d128",
            "sink_window_d128", "sinks_softmax_d64")  # fmt: skip


@pytest.mark.parametrize("name", some(COMPARED, every=4))
def test_one_instruction_takes_several_bits(name: str) -> None:
    """An element has one selection and no comparison of its own."""
    names = shipped(name)
    (compiled,) = machine_code(names)
    found = compiled.opcodes
    elements = 2 * 64 * names.block_m // 128  # of a thread, in two consumers
    assert found["FSEL"] == elements
    assert found["R2P"] >= elements // 8
    # Where ids are out of order, a branch of its own compares them, a bit at a time.
    branches = 2 if names.text.code.promise is not None else 1
    # So do those that clear hidden rows, a row at a time.
    branches += 3 * bool(names.backward.plan.hidden.names)
    assert found["ISETP"] < branches * elements


#: Bytes of nine words that have no room with a window, by columns.
SPILLED_BY_WINDOWS = {96: 36}


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("mask", [causal(), full(), sliding_window(1024, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [72, 80, 96, (96, 64), 160, 192, (192, 128)])
def test_segments_leave_registers_free(head_dim: int | tuple[int, int], mask: Mask) -> None:
    """Padded to 128 columns, gradients of 96 took all of them, and a few values spilled."""
    names = of(AttentionSpec(head_dim, mask=mask))
    assert names.segmented
    for config in split_space(names).candidates:
        check_backward_usage(names, config)
    for compiled in machine_code(names):
        windowed = "window" in str(mask) and isinstance(head_dim, int)
        assert compiled.spilled <= (SPILLED_BY_WINDOWS.get(head_dim, 0) if windowed else 0)
        assert compiled.warnings == ()


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("name", SHIPPED)
def test_so_is_what_deterministic_gradients_take(name: str) -> None:
    names = of(replace(shipped_specs()[name], deterministic=True))
    for config in split_space(names).candidates:
        check_backward_usage(names, config)
    for compiled in machine_code(names):
        assert compiled.spilled <= FEW
        assert compiled.warnings == ()


@pytest.mark.parametrize("number", range(len(VOCABULARY)), ids=list(VOCABULARY))
def test_masks_scores_and_normalisers_need_what_is_predicted(number: int) -> None:
    name, entry = list(VOCABULARY.items())[number]
    head_dim, dtype = ((64, "bfloat16"), (128, "float16"))[number % 2]
    names = HopperBackwardSplit(backward_plan(lower(entry.spec(dtype, head_dim), name)))
    assert why_no_backward(names) == ""
    for config in split_space(names).candidates:
        check_backward_usage(names, config)


@pytest.mark.parametrize("number", range(len(VOCABULARY)), ids=list(VOCABULARY))
def test_so_do_two_kernels(number: int) -> None:
    """Of wide heads with roles, or of narrow ones where gradients are deterministic."""
    entry = list(VOCABULARY.values())[number]
    wide = number % 2 == 0
    names = of(replace(entry.spec("bfloat16", 256 if wide else 128), deterministic=not wide))
    assert why_no_backward(names) == ""
    for config in split_space(names).candidates:
        check_backward_usage(names, config)


#: Of the vocabulary, what differs in more than where a run of queries starts: several runs, tables,
#: lists of tiles, gathers beside the score, slopes of their own, and learned tensors of heads and
#: of keys.
DIFFERENT = ("document_cross", "longformer", "natten_2d", "sink_by_head", "alibi_table",
             "additive_bias_of_keys", "relative_bias_static", "sink_and_softcap",
             "block_sparse", "causal_blocks", "bigbird_run_time")  # fmt: skip


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_becomes_machine_code(name: str, head_dim: int) -> None:
    names = of(VOCABULARY[name].spec("bfloat16", head_dim))
    for compiled in machine_code(names):
        assert compiled.warnings == ()
        assert compiled.unset == []


#: Scores that the kernel over queries learns, beside the one over keys, or a single pass.
LEARNED = ("relative_bias", "additive_bias", "temperature", "softcap_by_head",
           "composed")  # fmt: skip

#: Those that a single pass learns.
OF_ONE_PASS = {("relative_bias", 64), ("relative_bias", 128), ("temperature", 64),
               ("softcap_by_head", 64), ("additive_bias", 64), ("additive_bias", 128)}  # fmt: skip

#: Bytes that kernels over queries spill at 192 columns, most of them for the score (224 without
#: sums), and the single pass at 128, with elements of pairs that it gathers.
SPILLED = {("relative_bias", 192): 360, ("relative_bias", 128): 260, ("additive_bias", 128): 440}


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned_takes_few_registers(name: str, head_dim: int) -> None:
    names = of(VOCABULARY[name].spec("bfloat16", head_dim))
    assert names.queries_learn == ((name, head_dim) not in OF_ONE_PASS)
    *others, learns = machine_code(names)
    assert len(others) == names.queries_learn
    assert all(compiled.spilled <= FEW for compiled in others)
    assert learns.spilled <= SPILLED.get((name, head_dim), FEW)
    for compiled in (*others, learns):
        assert compiled.warnings == ()
        assert compiled.unset == []


_BIASES = Tensor("biases", ("batch", "kv_len"))
_TILTS = Tensor("tilts", ("batch", "q_len"))
_SLOPES = Tensor("slopes", ("num_q_heads",))


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(192, mask=causal(), score=lambda s, b, h, q, kv: s + _BIASES[b, kv]),
        AttentionSpec(
            192, mask=document(), score=lambda s, b, h, q, kv: s * (1 + h) + _BIASES[b, kv] * q
        ),
        AttentionSpec(256, score=lambda s, b, h, q, kv: s + _BIASES[b, kv] * _TILTS[b, q]),
        AttentionSpec(256, mask=block_sparse(), score=lambda s, b, h, q, kv: s + _BIASES[b, kv]),
    ],
)
def test_so_does_what_keys_learn_beside_roles(spec: AttentionSpec) -> None:
    names = of(spec)
    assert names.has_roles and names.text.input_gradients
    check_backward_usage(names, split_space(names).candidates[0])
    for compiled in machine_code(names):
        assert compiled.spilled <= FEW
        assert compiled.unset == []


#: With dropout, the bytes that the kernel over keys may spill, then the one over queries, if any.
DROPPED = {
    "wide": (AttentionSpec(192, mask=causal(), dropout=True), FEW, FEW),
    "same_bits": (AttentionSpec(128, mask=causal(), dropout=True, deterministic=True), FEW, FEW),
    "sigmoid": (AttentionSpec(256, normaliser=sigmoid_attention(), dropout=True), FEW, FEW),
    "scaled": (
        AttentionSpec(256, score=lambda s, b, h, q, kv: s * (1 + h), dropout=True), FEW, 300
    ),
    "slopes": (AttentionSpec(128, mask=causal(), score=softcap(9.0), dropout=True), 560, FEW),
    "learned": (AttentionSpec(128, mask=causal(), score=alibi(_SLOPES), dropout=True), 300, FEW),
    "distances": (AttentionSpec(64, score=relative_bias(9), dropout=True), FEW),
    "same_distances": (
        AttentionSpec(64, score=relative_bias(9), dropout=True, deterministic=True), FEW, FEW
    ),
    "wide_learned": (AttentionSpec(256, score=alibi(_SLOPES), dropout=True), FEW, FEW),
}  # fmt: skip


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("name", DROPPED)
def test_two_kernels_drop_weights(name: str) -> None:
    spec, *bounds = DROPPED[name]
    names = of(spec)
    check_backward_usage(names, split_space(names).candidates[0])
    for compiled, bound in zip(machine_code(names), bounds, strict=True):
        assert compiled.spilled <= bound
        assert compiled.warnings == ()
        assert compiled.unset == []


@AS_PTXAS_12_8_DOES
def test_a_narrow_sigmoid_has_too_few_registers() -> None:
    """Known: p is needed again after the product of weights, and ptxas makes products wait."""
    spec = VOCABULARY["sigmoid"].spec("bfloat16", 64)
    names = HopperBackwardSplit(backward_plan(lower(spec, "sigmoid")))
    compiled = compile_backward_hopper(names.backward, split_space(names).candidates[0])
    assert compiled.spilled <= 512
    assert all("C7512" in line for line in compiled.warnings)


# What a spec can ask for besides.
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        ("shown", 64),
        ("shown", 96),
        ("ends", 80),
        ("softcap", (56, 96)),
        ("half_keys", 128),
        ("half_keys", (96, 72)),
        ("ends", (192, 80)),
    ],
)
def test_the_unusual_is_predicted_too(name: str, head_dim: int | tuple[int, int]) -> None:
    names = HopperBackwardSplit(backward_plan(lower(kernel_spec(name, head_dim), name)))
    assert why_no_backward(names) == ""
    for config in split_space(names).candidates:
        check_backward_usage(names, config)


_LENGTHS = Tensor("lengths", ("batch",), "int32")
_BY_HEAD = Tensor("lengths_by_head", ("num_q_heads",), "int32")

#: Keys, queries or both that are hidden by their position alone.
HIDDEN = {
    "keys": lambda b, h, q, kv: kv < _LENGTHS[b],
    "queries": lambda b, h, q, kv: q < _LENGTHS[b],
    "both": lambda b, h, q, kv: (q < _LENGTHS[b]) & (kv < _LENGTHS[b]),
    "by_head": lambda b, h, q, kv: (q < _LENGTHS[b]) & (kv < _BY_HEAD[h]),
}


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize(
    ("head_dim", "deterministic"),
    [(64, False), (128, True), (256, False), (80, False), ((80, 96), True), ((192, 80), False)],
)
def test_so_are_hidden_rows(
    hidden: str, head_dim: int | tuple[int, int], deterministic: bool
) -> None:
    mask = causal() & Mask(HIDDEN[hidden], hidden)
    names = of(AttentionSpec(head_dim, mask=mask, deterministic=deterministic))
    assert why_no_backward(names) == ""
    for config in split_space(names).candidates:
        check_backward_usage(names, config)


_SHARED = Tensor("layout", (None, None), "bool")


@pytest.mark.parametrize("mask", [block_sparse(_SHARED, 16), causal() & block_sparse(_SHARED, 8)])
@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, False), (64, True), (256, False)])
def test_so_are_lists_that_all_heads_share(mask: Mask, head_dim: int, deterministic: bool) -> None:
    names = of(AttentionSpec(head_dim, mask=mask, deterministic=deterministic))
    check_backward_usage(names, split_space(names).candidates[0])

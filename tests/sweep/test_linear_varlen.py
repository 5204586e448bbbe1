"""Linear attention of packed sequences in Triton's interpreter, and defects that the calls find."""

from __future__ import annotations

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Tensor,
    causal,
    elu_plus_one,
    full,
    identity,
    linear,
    softmax_features,
)
from support import linear_lengths
from support.linear_packed import PackedCall, check_packed
from support.slip import with_slip
from support.variants import rendered_module
from support.vector_maps import both_signs

FORMS = ("dense", "varlen")
DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))


def shifted(x):
    """A feature map which is not 0 at 0 and may be negative."""
    return 0.5 * x + 1.0


ELU = AttentionSpec(
    32, "float32", mask=causal(), normaliser=linear(elu_plus_one()), forms=FORMS
)  # fmt: skip
PLAIN = AttentionSpec(
    16, mask=causal(), normaliser=linear(identity(), normalise=False), forms=FORMS
)  # fmt: skip
TOKENS = AttentionSpec(
    (40, 24), "float32", mask=causal(), normaliser=linear(elu_plus_one(), decay=DECAY), forms=FORMS
)
PLAIN_TOKENS = AttentionSpec(
    16, mask=causal(), normaliser=linear(identity(), decay=DECAY, normalise=False), forms=FORMS
)
MAPPED_TOKENS = AttentionSpec(
    16, "float32", mask=causal(), normaliser=linear(
        shifted, decay=DECAY, normalise=False
    ), forms=FORMS
)  # fmt: skip
RETENTION = AttentionSpec(
    24, "float32", mask=causal(), normaliser=linear(
        identity(), decay=lambda h: -(h + 1) / 16, normalise=False
    ), forms=FORMS
)  # fmt: skip
VECTORS = AttentionSpec(
    24, "float32", mask=causal(), normaliser=linear(softmax_features(), decay=DECAY), forms=FORMS
)
TILES = AttentionSpec(
    (128, 16), "float32", mask=causal(), normaliser=linear(both_signs, decay=DECAY), forms=FORMS
)
BIDIRECTIONAL = AttentionSpec(
    (24, 40), "float32", mask=full(), normaliser=linear(elu_plus_one()), forms=FORMS
)
UNDIVIDED = AttentionSpec(
    24, "float32", mask=full(), normaliser=linear(shifted, normalise=False), forms=FORMS
)
VECTORS_OF_ALL = AttentionSpec(
    16, "float32", mask=full(), normaliser=linear(softmax_features()), forms=FORMS
)

#: Chunks have 16 rows, and a GPU four programs: so a segment has several sequences, and some
#: sequences are in several segments. Some are empty, others whole chunks.
LENS = (5, 0, 16, 33, 1, 70, 0)
CALLS = {
    "sums": (ELU, PackedCall(LENS, states=True)),
    "neither features nor sums": (PLAIN, PackedCall(LENS, states=True, strided=True)),
    "decays": (TOKENS, PackedCall(LENS, q_heads=4, kv_heads=2)),
    "decays and states": (TOKENS, PackedCall(LENS, kv_heads=2, states=True)),
    "steep decays": (TOKENS, PackedCall(LENS, states=True, steep=True)),
    "one sequence": (TOKENS, PackedCall((131,), q_heads=1, states=True)),
    "a sequence from segment to segment": (TOKENS, PackedCall((40, 100, 40), states=True)),
    "nothing but padding": (TOKENS, PackedCall((0, 0), states=True)),
    "decays without sums": (PLAIN_TOKENS, PackedCall(LENS, states=True)),
    "decays of mapped keys": (MAPPED_TOKENS, PackedCall(LENS, states=True, padding=40)),
    "decays of heads": (RETENTION, PackedCall(LENS, kv_heads=2, states=True)),
    "vectors": (VECTORS, PackedCall(LENS, states=True)),
    "tiles of features": (TILES, PackedCall((20, 0, 33), q_heads=1, states=True)),
    "all keys": (BIDIRECTIONAL, PackedCall(LENS, q_heads=4, kv_heads=2)),
    "other keys": (BIDIRECTIONAL, PackedCall(LENS, (7, 3, 0, 40, 17, 64, 5))),
    "some of the keys": (
        UNDIVIDED, PackedCall((9, 33, 4), (20, 3, 0), room=(30, 0, 17), q_heads=1)
    ),
    "vectors of all keys": (VECTORS_OF_ALL, PackedCall(LENS)),
}  # fmt: skip

#: Defects of the functions for packed sequences: the text, what stands in its place, the call that
#: finds it.
DEFECTS = {
    "a state that outlives its sequence": (
        "goes_on = position > 0", "goes_on = position >= 0", "a sequence from segment to segment"),
    "no state of earlier segments": ("goes_on = position > 0", "goes_on = position < 0", "decays"),
    "a chunk at another token": (
        "start = first_row + (chunk - done) * CHUNK",
        "start = first_row + (chunk - done) * CHUNK + (done > 0)", "sums"),
    "a chunk in reverse at another token": (
        "start = last_row - i * CHUNK", "start = last_row - i * CHUNK + (i > 0)", "sums"),
    "a chunk that reaches into the next sequence": (
        "first + length, first + room", "first + length + 1, first + room", "decays"),
    "what is behind the last sequence": (
        "length = tl.where(tl.load(entry + 5) > 0, room, 0)", "length = room",
        "decays of mapped keys"),
    "a first state without its first decay": (
        "mask=offs_n < length, other=0.0)", "mask=(offs_n < length) & (offs_n > start), other=0.0)",
        "decays and states"),
    "no first state": (
        "state += tl.load(first_kv_ptr", "state += 0.0 * tl.load(first_kv_ptr", "sums"),
    "the first state of another sequence": (
        "at = tl.maximum(sequence, 0).to(", "at = tl.maximum(sequence - 1, 0).to(", "sums"),
    "no gradient of last states": (
        "state += tl.load(grad_last_kv_ptr", "state += 0.0 * tl.load(grad_last_kv_ptr", "sums"),
    "a gradient that outlives its sequence": (
        "goes_on = last_row + CHUNK < stored", "goes_on = last_row + CHUNK < stored + CHUNK",
        "a sequence from segment to segment"),
    "a gradient of the first state too early": (
        "position == (left - 1 - until) * CHUNK", "position >= 0",
        "a sequence from segment to segment"),
    "segments that go on from others": (
        'tl.where(starts, float("-inf"), of_segment)', "of_segment",
        "a sequence from segment to segment"),
    "segments that never go on": (
        'tl.where(log == float("-inf"), 0.0, state * tl.math.exp2(log))', "0.0 * state",
        "one sequence"),
    "a state of the segment's other sequences": (
        "begin = tl.maximum(begin, end - position // CHUNK)", "begin = begin + 0",
        "a sequence from segment to segment"),
    "a state of queries behind the sequence": (
        "end = tl.minimum(end, behind)", "end = end + 0", "a sequence from segment to segment"),
    "decays beyond other sequences": (
        "(sequence[None, :] == sequence[:, None]) & ", "", "decays"),
    "nothing beyond a segment": (
        "behind += tl.where(sequence == following, beyond, 0.0)", "behind += 0.0 * beyond",
        "one sequence"),
    "nothing at the ends of sequences": (
        "behind += tl.load(at_end", "behind += 0.0 * tl.load(at_end", "decays and states"),
    "a scale less at the ends of sequences": (
        ".sum((-2, -1)) * scale", ".sum((-2, -1)) * 1.0", "decays without sums"),
    "a part less": ("sequence * 2 + 1) + 1", "sequence * 2 + 1)", "all keys"),
    "parts of the first segment alone": (
        "tl.store(of_sequence + 1, segment,", "tl.store(of_sequence + 1, 0 * segment,",
        "all keys"),
    "queries for keys": ("slots_ptr, left - 1, True", "slots_ptr, left - 1, False", "other keys"),
    "sequences without a chunk": ("tl.maximum(positions, 1)", "positions", "sums"),
    "last states that are not written": (
        "+ (until - done) * CHUNK >= stored)", "+ (until - done) * CHUNK > stored)", "sums"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    spec, call = CALLS[name]
    check_packed(rendered_module(spec), spec, call)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    old, new, call = DEFECTS[name]
    spec, found_by = CALLS[call]
    module = rendered_module(spec, edit_source=with_slip(old, new))
    with pytest.raises(AssertionError, match="error"):
        check_packed(module, spec, found_by)


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_any_chunk_gives_the_same(chunk: int) -> None:
    module = rendered_module(TOKENS)
    for table in (module.CONFIGS, module.CONFIGS_OF_GRADIENTS):
        for config in table.values():
            config["CHUNK"] = chunk
    check_packed(module, TOKENS, PackedCall((150, 3, 64, 0, 65), states=True, steep=True))


@pytest.mark.parametrize("name", linear_lengths.SPECS)
def test_broken_lengths_are_nan_and_no_other_changes(name: str) -> None:
    linear_lengths.check_broken(rendered_module(linear_lengths.SPECS[name]), name)


def test_nan_of_a_sequence_stays_in_it() -> None:
    linear_lengths.check_nan(rendered_module(linear_lengths.SPECS["decays"]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('tl.where(log == float("-inf"), 0.0, state * tl.math.exp2(log))',
         "state * tl.math.exp2(log)"),
        ("mask=goes_on, other=0.0)", "mask=position >= 0, other=0.0) * goes_on"),
    ],
)  # fmt: skip
def test_nan_that_is_multiplied_by_0_is_found(old: str, new: str) -> None:
    spec = linear_lengths.SPECS["decays"]
    module = rendered_module(spec, edit_source=with_slip(old, new))
    with pytest.raises(AssertionError):
        linear_lengths.check_nan(module)


@pytest.mark.parametrize("name", ["decays", "plain"])
def test_step_goes_on_from_a_returned_state(name: str) -> None:
    linear_lengths.check_steps(rendered_module(linear_lengths.SPECS[name]), name)


def test_no_sequence_and_no_token() -> None:
    linear_lengths.check_nothing(rendered_module(linear_lengths.SPECS["decays"]))


@pytest.mark.parametrize("name", linear_lengths.SPECS)
def test_torch_compile(name: str) -> None:
    """Both passes, through the operators, are what eager calls compute."""
    module, given = rendered_module(linear_lengths.SPECS[name]), linear_lengths.drawn(name)
    leaves = [given[x].requires_grad_() for x in ("q", "k", "v", "decay") if x in given]
    torch._dynamo.reset()
    compiled = torch.compile(module.varlen_attention, fullgraph=True, backend="aot_eager")
    outs = [f(**given) for f in (compiled, module.varlen_attention)]
    grads = [torch.autograd.grad(x.sum(), leaves) for x in outs]
    torch.testing.assert_close(*outs, rtol=0, atol=0)
    torch.testing.assert_close(*grads, rtol=0, atol=0)

"""The kernels of linear attention in Triton's interpreter, and defects that the calls find."""

from __future__ import annotations

import pytest

from flashgen import AttentionSpec, causal, elu_plus_one, full, identity, linear, relu
from support.recurrence import LinearCall, check_linear
from support.variants import linear_specs, rendered_module


def square(x):
    """A feature map of a user's own, which is 0 at 0 and has a slope that changes its sign."""
    return x * x


def shifted(x):
    """Another one, which is not 0 at 0 and may be negative."""
    return 0.5 * x + 1.0


ELU = AttentionSpec(32, "float32", mask=causal(), normaliser=linear(elu_plus_one()))
UNEQUAL = AttentionSpec((40, 24), "float32", mask=causal(), normaliser=linear(relu()))
PLAIN = AttentionSpec(16, mask=causal(), normaliser=linear(identity(), normalise=False))
BIDIRECTIONAL = AttentionSpec((24, 40), "float32", mask=full(), normaliser=linear(elu_plus_one()))
SHIFTED = AttentionSpec(24, "float32", mask=full(), normaliser=linear(shifted, normalise=False))
SQUARE = AttentionSpec(16, mask=causal(), normaliser=linear(square))

#: Chunks have 16 rows, and a GPU four programs: so 83 rows of one head are two segments or more.
CALLS = {
    "several segments": (ELU, LinearCall(83, 83, batch=2)),
    "one key": (ELU, LinearCall(1, 1)),
    "whole chunks": (ELU, LinearCall(64, 64, strided=True)),
    "heads that share keys": (UNEQUAL, LinearCall(75, 75, batch=1, q_heads=6, kv_heads=2)),
    "segments of shared keys": (UNEQUAL, LinearCall(83, 83, q_heads=3)),
    "neither features nor sums": (PLAIN, LinearCall(83, 83, q_heads=2, kv_heads=1)),
    "all keys": (BIDIRECTIONAL, LinearCall(50, 83, q_heads=2, kv_heads=1)),
    "fewer keys": (SHIFTED, LinearCall(83, 35, batch=2)),
    "a map of the user's": (SQUARE, LinearCall(49, 49)),
    "through pointers": (UNEQUAL, LinearCall(40, 40, strided=True, tma=False)),
}

#: Defects: the text, what stands in its place, and the call that finds it. A text that stands in
#: several places is one in each of them.
DEFECTS = {
    "a query does not see its own key": ("<= offs_n[None, :]", "< offs_n[None, :]",
                                         "several segments"),
    "a value does not get its own query": (">= offs_n[None, :]", "> offs_n[None, :]",
                                           "several segments"),
    "a segment less": ("for i in range(0, segment)", "for i in range(1, segment)",
                       "several segments"),
    "a segment of queries less": ("for i in range(segment, num_states)",
                                  "for i in range(segment + 1, num_states)", "several segments"),
    "all segments of keys but one": ("for i in range(0, num_states)",
                                     "for i in range(1, num_states)", "all keys"),
    "a state that is not carried on": ("state = tl.dot(tl.trans(v), phi_k, state)",
                                       "tl.dot(tl.trans(v), phi_k, state)",
                                       "neither features nor sums"),
    "sums of the chunk alone": ("sums = tl.sum(phi_q.to(tl.float32) * total[None, :], 1)",
                                "sums = 0.0 * tl.sum(phi_q.to(tl.float32) * total[None, :], 1)",
                                "several segments"),
    "sums of earlier chunks alone": ("sums += tl.sum(weights, 0)", "sums += 0.0",
                                     "several segments"),
    "features beyond the end": ("phi = tl.where(inside, _features(x), 0.0)",
                                "phi = _features(x)", "all keys"),
    "no slope of q": ("acc *= _slopes(q)", "acc *= 1.0", "a map of the user's"),
    "no slope of k": ("grad *= _slopes(k)", "grad *= 1.0", "a map of the user's"),
    "a state of one head's queries": ("head = kv_head * group + step % group",
                                      "head = kv_head * group", "segments of shared keys"),
    "queries that are not divided": (" * tl.where(sums == 0.0, 0.0, 1.0 / sums)[:, None]", "",
                                     "several segments"),
    "no gradient of sums": ("delta = sums * tl.load(", "delta = 0.0 * tl.load(",
                            "several segments"),
    "no gradient by the output": ("delta -= tl.sum(", "delta -= 0.0 * tl.sum(",
                                  "several segments"),
    "sums of chunks of another head": ("((batch * num_q_heads + head).to(tl.int64) * num_chunks",
                                       "((batch * num_q_heads).to(tl.int64) * num_chunks",
                                       "heads that share keys"),
    "keys of another head": ("kv_head = head // (num_q_heads // num_kv_heads)",
                             "kv_head = head % num_kv_heads", "heads that share keys"),
    "one head of those that share a key": ("for member in range(0, group)",
                                           "for member in range(0, 1)",
                                           "neither features nor sums"),
    "no scale of gradients": ("grad *= scale", "grad *= 1.0", "neither features nor sums"),
    "no scale": ("acc *= scale", "acc *= 1.0", "fewer keys"),
    "states of one segment too many": ("begin = (segment + first) * segment_chunks",
                                       "begin = segment * segment_chunks", "several segments"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    spec, call = CALLS[name]
    check_linear(rendered_module(spec), spec, call)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    old, new, call = DEFECTS[name]

    def edit(source: str) -> str:
        assert old in source, old
        return source.replace(old, new)

    spec, found_by = CALLS[call]
    with pytest.raises(AssertionError, match="error"):
        check_linear(rendered_module(spec, edit_source=edit), spec, found_by)


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_any_chunk_gives_the_same(chunk: int) -> None:
    module = rendered_module(ELU)
    for table in (module.CONFIGS, module.CONFIGS_OF_GRADIENTS):
        for config in table.values():
            config["CHUNK"] = chunk
    check_linear(module, ELU, LinearCall(150, 150))


@pytest.mark.parametrize("name", linear_specs())
def test_shipped(name: str) -> None:
    spec = linear_specs()[name]
    check_linear(rendered_module(spec, name=name), spec, LinearCall(37, 37, q_heads=2, kv_heads=2))

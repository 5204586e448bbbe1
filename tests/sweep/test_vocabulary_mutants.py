"""The sweep of the vocabulary can fail: kernels of slightly wrong scores and tables do not pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Float,
    Score,
    Tensor,
    additive_bias,
    alibi,
    block_sparse,
    causal,
    clamp,
    document,
    exp2,
    kv_len,
    q_len,
    relative_bias,
    sigmoid_attention,
    sliding_window,
    softcap,
    softmax,
    softmax_off_by_one,
    t5_bias,
    tanh,
    temperature,
)
from support.cases import Case
from support.variants import rendered_module
from sweep.launch import check_kernel

WINDOW = sliding_window(17, 3, align="bottom_right")
CASES = [
    Case(37, 45, batch=2, q_heads=4, kv_heads=2, layout="padded"),
    Case(50, 21, batch=1, q_heads=3, kv_heads=1),
    Case(33, 33, batch=2, q_heads=2, kv_heads=2, layout="unaligned"),
]

_cap = Float("cap", 3.0, above=0)
_heat = Tensor("heat", ("num_q_heads",))
_bias = Tensor("bias", ("batch", "num_q_heads", "q_len", "kv_len"))
_near = Tensor("near", ("num_q_heads", 11))
_sinks = Tensor("sinks", ("num_q_heads",))


def _spec(score: Any = None, **fields: Any) -> AttentionSpec:
    return AttentionSpec(16, "float16", score=score, **{"mask": WINDOW, **fields})


def _static(
    flipped: tuple[int, int] | None = None, block: int = 16, transposed: bool = False
) -> AttentionSpec:
    """A table of blocks that is known, one of its entries flipped."""
    table = [[(2 * i + j) % 3 != 1 for j in range(4)] for i in range(4)]
    if flipped is not None:
        table[flipped[0]][flipped[1]] ^= True
    layout = list(zip(*table, strict=True)) if transposed else table
    return _spec(mask=block_sparse(layout, block))


def _survives(module: ModuleType, spec: AttentionSpec) -> bool:
    """Whether the kernel passes every case. Its reference is not the one under test."""
    try:
        for case in CASES:
            heat = 0.5 + torch.arange(case.q_heads)
            check_kernel(module, spec, replace(case, params={"heat": heat}))
    except AssertionError:
        return False
    return True


RIGHT: dict[str, AttentionSpec] = {
    "softcap": _spec(softcap(_cap)),
    "temperature": _spec(temperature(_heat)),
    "alibi": _spec(alibi(4, align="bottom_right")),
    "relative": _spec(relative_bias(5, _near, align="bottom_right")),
    "t5": _spec(t5_bias(num_buckets=16, max_distance=30, align="bottom_right")),
    "bias": _spec(additive_bias(_bias)),
    "composed": _spec(softcap(_cap).then(alibi(4, align="bottom_right"))),
    "sink": _spec(normaliser=softmax(sink=_sinks)),
    "sigmoid": _spec(normaliser=sigmoid_attention()),
    "documents": _spec(mask=document(align="bottom_right")),
    "static": _static(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_kernel_survives(name: str) -> None:
    assert _survives(rendered_module(RIGHT[name]), RIGHT[name])


def _distance(q_idx: Any, kv_idx: Any) -> Any:
    """As with align="bottom_right"."""
    return kv_idx - q_idx - (kv_len - q_len)


def _score(score_mod: Callable[..., Any]) -> AttentionSpec:
    return _spec(Score(score_mod, "wrong"))


WRONG: dict[str, tuple[str, AttentionSpec]] = {
    "cap not divided by": ("softcap", _score(lambda s, b, h, q, kv: _cap * tanh(s))),
    "cap not multiplied by": ("softcap", _score(lambda s, b, h, q, kv: tanh(s / _cap))),
    "cap of 3.1": ("softcap", _spec(softcap(3.1))),
    "times a temperature": ("temperature", _score(lambda s, b, h, q, kv: s * _heat[h])),
    "temperature of head 0": ("temperature", _score(lambda s, b, h, q, kv: s / _heat[0 * h])),
    "slopes with a wrong sign": (
        "alibi",
        _score(lambda s, b, h, q, kv: s - exp2(-2.0 * (h + 1)) * _distance(q, kv)),
    ),
    "slopes of the next head": (
        "alibi",
        _score(lambda s, b, h, q, kv: s + exp2(-2.0 * (h + 2)) * _distance(q, kv)),
    ),
    "slopes by another power": ("alibi", _spec(alibi(8, align="bottom_right"))),
    "distance from the other end": ("alibi", _spec(alibi(4, align="top_left"))),
    "distance without the key": (
        "alibi",
        _score(lambda s, b, h, q, kv: s - exp2(-2.0 * (h + 1)) * q),
    ),
    "table one off": (
        "relative",
        _score(
            lambda s, b, h, q, kv: s + _near[h, clamp(clamp(_distance(q, kv), -5, 5) + 6, 0, 10)]
        ),
    ),
    "table the wrong way": (
        "relative",
        _score(lambda s, b, h, q, kv: s + _near[h, clamp(-_distance(q, kv), -5, 5) + 5]),
    ),
    "table clipped too early": (
        "relative",
        _score(lambda s, b, h, q, kv: s + _near[h, clamp(_distance(q, kv), -4, 4) + 5]),
    ),
    "table of head 0": (
        "relative",
        _score(lambda s, b, h, q, kv: s + _near[0 * h, clamp(_distance(q, kv), -5, 5) + 5]),
    ),
    "buckets too wide": (
        "t5",
        _spec(t5_bias(num_buckets=16, max_distance=60, align="bottom_right")),
    ),
    "buckets of the other direction": (
        "t5",
        _spec(t5_bias(num_buckets=16, max_distance=30, bidirectional=False, align="bottom_right")),
    ),
    "bias of the next key": (
        "bias",
        _score(lambda s, b, h, q, kv: s + _bias[b, h, q, clamp(kv - 1, 0, 10**6)]),
    ),
    "bias of sequence 0": ("bias", _score(lambda s, b, h, q, kv: s + _bias[0 * b, h, q, kv])),
    "bias twice": ("bias", _score(lambda s, b, h, q, kv: s + 2 * _bias[b, h, q, kv])),
    "bias subtracted": ("bias", _score(lambda s, b, h, q, kv: s - _bias[b, h, q, kv])),
    "composed the other way": (
        "composed",
        _spec(alibi(4, align="bottom_right").then(softcap(_cap))),
    ),
    "no sink": ("sink", _spec()),
    "sink of 0": ("sink", _spec(normaliser=softmax_off_by_one())),
    "sink of head 0": ("sink", _spec(normaliser=softmax(sink=lambda b, h: _sinks[0 * h]))),
    "sink with a wrong sign": ("sink", _spec(normaliser=softmax(sink=lambda b, h: -_sinks[h]))),
    "softmax for sigmoid": ("sigmoid", _spec()),
    "a block shown": ("static", _static((0, 1))),
    "a block hidden": ("static", _static((2, 2))),
    "blocks of 17": ("static", _static(block=17)),
    "keys' blocks for queries'": ("static", _static(transposed=True)),
    "another document": ("documents", _spec(mask=causal(align="bottom_right"))),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_functions_are_caught(mistake: str) -> None:
    """The kernel of another function, called with the parameters of the right one."""
    name, wrong = WRONG[mistake]
    right, module = RIGHT[name], rendered_module(wrong)
    launch, taken = module._launch, [param.name for param in wrong.params]

    def launch_with_what_it_takes(q: Any, k: Any, v: Any, scale: float, *rest: Any) -> Any:
        given = dict(zip((p.name for p in right.params), rest, strict=False))
        return launch(q, k, v, scale, *(given[param] for param in taken), rest[-1])

    module._launch = launch_with_what_it_takes
    assert not _survives(module, right)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("sink", "l_i = tl.math.exp2(sink - m_i)", "l_i = tl.zeros([BLOCK_M], tl.float32)"),
        ("sink", "+ 1.4426950408889634 * _at_1d(sinks", "+ _at_1d(sinks"),
        ("sigmoid", "tl.math.exp2(-scores", "tl.math.exp2(scores"),
        ("sigmoid", "lse = tl.where(l_i == 0.0", "lse = tl.where(l_i != 0.0"),
        ("bias", "* stride_3", "* 1"),
        ("bias", "* stride_0", "* stride_1"),
        ("softcap", "scale / cap", "scale"),
        ("documents", "rank <= sought", "rank < sought"),
        ("static", 'cell == "x"', 'cell == "."'),
        ("static", ".reshape(sizes)", ".reshape(sizes).mT"),
        ("static", "shown_rows |= (q_idx // 16", "shown_rows |= (kv_idx // 16"),
        ("documents", "kv_idx >= row_document_ids_begin", "kv_idx > row_document_ids_begin"),
        ("documents", "kv_idx < row_document_ids_end", "kv_idx <= row_document_ids_end"),
    ],
)
def test_wrong_source_is_caught(name: str, right: str, wrong: str) -> None:
    def edit(source: str) -> str:
        kernel, rest = source.split("\ndef attention(", 1)
        launcher = rest.index("def _launch(")
        rest, launch = rest[:launcher], rest[launcher:]
        assert right in kernel + launch, "it no longer reads so: bring this test up to date"
        edited = kernel.replace(right, wrong), rest + launch.replace(right, wrong)
        return "\ndef attention(".join(edited)

    assert not _survives(rendered_module(RIGHT[name], edit_source=edit), RIGHT[name])

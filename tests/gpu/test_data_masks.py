"""Masks that only the data knows on the GPU: their tiles, the elements that go with them, lists."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec
from gpu.launch import native
from support.cases import Case, inputs
from support.contract import check_gradients
from support.data_masks import DATA_MASKS, data_case, data_mask
from support.oracle import check
from support.variants import rendered_module

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

#: Three consumers with scores of 64 and of 128 keys, two of wide heads; both types.
KINDS = {
    "d64": (64, "bfloat16"),
    "d128": (128, "bfloat16"),
    "f16": (128, "float16"),
    "d192": (192, "bfloat16"),
}

#: Of tiles of 64, 128 and 192, with a part of a last one, and of several tiles to a program.
LENGTHS = (65, 1000, 4061)

#: Masks whose elements the producer hands over: of 32 bits, of 8, floats, and one by head.
HANDED = ("islands", "flags", "padding", "heat")


@functools.cache
def _module(mask: str, kind: str) -> tuple[AttentionSpec, ModuleType]:
    head_dim, dtype = KINDS[kind]
    spec = AttentionSpec(head_dim, dtype=dtype, mask=data_mask(mask))
    return spec, rendered_module(spec, hopper=True)


def _call(mask: str, length: int) -> Case:
    batch = 3 if mask in ("islands", "padding") else 1
    return data_case(mask, length, batch=batch, heads=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", DATA_MASKS)
def test_both_passes(mask: str, kind: str) -> None:
    spec, module = _module(mask, kind)
    for length in LENGTHS[:2] if mask == "dense" else LENGTHS:
        case = _call(mask, length)
        tensors = inputs(case, spec, native(spec), "cuda")
        out, lse = module.attention(*tensors, return_lse=True, **case.arguments(spec, "cuda"))
        check(out, lse, tensors, spec, case, gluon=True)
        if length <= 1000:
            check_gradients(module, spec, case, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", HANDED)
def test_steep_scores(mask: str, kind: str) -> None:
    """Tiles whose weights leave their range are handed out again, by lists looked up ahead."""
    spec, module = _module(mask, kind)
    case = _call(mask, 2000)
    q, k, v = inputs(case, spec, native(spec), "cuda")
    k[:, :, 700] *= 60.0
    for factor in (1.0, 16.0):
        given = q * factor, k, v
        out, lse = module.attention(*given, return_lse=True, **case.arguments(spec, "cuda"))
        check(out, lse, given, spec, case, gluon=True)


@pytest.mark.parametrize("kind", ["d64", "d128"])
def test_a_race_would_show(kind: str) -> None:
    """A hundred calls of many tiles have the same bits."""
    spec, module = _module("islands", kind)
    case = replace(_call("islands", 4061), q_heads=16, kv_heads=2)
    tensors = inputs(case, spec, native(spec), "cuda")
    params: dict[str, Any] = case.arguments(spec, "cuda")
    with torch.no_grad():
        first = module.attention(*tensors, **params)
        for _ in range(100):
            assert torch.equal(first, module.attention(*tensors, **params))


@pytest.mark.parametrize("mask", HANDED)
def test_layers_share_tiles(mask: str) -> None:
    """On two streams, whose lists are their own; and after another call with other tiles."""
    spec, module = _module(mask, "d128")
    case = _call(mask, 1000)
    tensors = [x.requires_grad_() for x in inputs(case, spec, native(spec), "cuda")]
    params = case.arguments(spec, "cuda")

    def results(**tiles: Any) -> list[torch.Tensor]:
        out = module.attention(*tensors, **params, **tiles)
        return [out, *torch.autograd.grad(out, tensors, torch.ones_like(out))]

    alone = results()
    tiles = module.tiles(*tensors[:2], **params)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in (*streams, *streams):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = results(tiles=tiles)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        assert torch.equal(found[0], alone[0])
        for a, b in zip(found[1:], alone[1:], strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=2**-6, atol=2**-6)
    assert {key[-1] for key in tiles.bits.lists} == {stream.cuda_stream for stream in streams}

"""`tiles` of a module, and what calls accept of it: on the CPU, without a kernel."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Float, Int, Mask, Tensor, alibi, causal, kv_len
from support.variants import rendered_module

IMG = Tensor("img", ("batch", "kv_len"), "int32")
HEAT = Tensor("heat", ("kv_len",))
WIDTH, LEAST = Int("width", 8), Float("least", 0.5)

SPEC = AttentionSpec(
    16,
    "float32",
    mask=Mask(
        lambda b, h, q, kv: (IMG[b, q] == IMG[b, kv]) & (abs(q - kv) <= WIDTH) | (HEAT[kv] > LEAST),
        "near",
        equal_lengths=True,
    ),
    score=alibi(Tensor("slopes", ("num_q_heads",))),
)


@functools.cache
def _module() -> ModuleType:
    return rendered_module(SPEC, name="near")


def _call(length: int = 20, batch: int = 2) -> tuple[list[torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, 2, length, 16, generator=generator) for _ in range(3))
    img = torch.randint(0, 3, (batch, length), generator=generator).int()
    heat = torch.rand(length, generator=generator)
    return [q, k, v], {"img": img, "heat": heat}


def test_a_call_with_tiles_is_the_same_call() -> None:
    module, (qkv, params) = _module(), _call()
    tiles = module.tiles(*qkv[:2], **params)
    slopes = torch.tensor([0.1, 0.2])
    for options in ({}, {"return_lse": True}):
        expected = module.attention(*qkv, **params, slopes=slopes, **options)
        found = module.attention(*qkv, **params, slopes=slopes, tiles=tiles, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_other_layers_may_have_other_scores_and_heads() -> None:
    module, (qkv, params) = _module(), _call()
    tiles = module.tiles(*qkv[:2], **params)
    wider = [x.repeat(1, 2, 1, 1) for x in qkv]
    module.attention(*wider, **params, slopes=torch.rand(4), tiles=tiles)


def test_half_precision_is_read_as_it_is_passed() -> None:
    module, (qkv, params) = _module(), _call()
    params["heat"] = params["heat"].bfloat16()
    tiles = module.tiles(*qkv[:2], **params)
    module.attention(*qkv, **params, slopes=torch.rand(2), tiles=tiles)


def _written(params: dict[str, Any]) -> None:
    params["img"][0, 0] = 7


def _cloned(params: dict[str, Any]) -> None:
    params["heat"] = params["heat"].clone()


def _wider(params: dict[str, Any]) -> None:
    params["width"] = 9


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "written": (_written, "tiles: img was written to since they were made; make others"),
    "cloned": (_cloned, "tiles: of another tensor heat than the call's; make others for it"),
    "wider": (
        _wider,
        "tiles: of (device, batch, q_len, kv_len, width, least) (device(type='cpu'), 2, 20, 20, 8, "
        "0.5), the call has (device(type='cpu'), 2, 20, 20, 9, 0.5); make others",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tiles_of_another_mask_are_refused(name: str) -> None:
    module, (qkv, params) = _module(), _call()
    tiles = module.tiles(*qkv[:2], **params)
    change, message = REFUSED[name]
    change(params)
    with pytest.raises(ValueError) as error:
        module.attention(*qkv, **params, slopes=torch.rand(2), tiles=tiles)
    assert str(error.value) == message


def test_tiles_of_other_lengths_are_refused() -> None:
    module, (qkv, params) = _module(), _call()
    tiles = module.tiles(*qkv[:2], **params)
    others, _ = _call(length=24)
    with pytest.raises(ValueError, match=r"tiles: of .* 2, 20, 20, .* the call has .* 2, 24, 24"):
        module.attention(*others, **params, slopes=torch.rand(2), tiles=tiles)


def test_what_is_no_tiles_of_this_module_is_refused() -> None:
    module, (qkv, params) = _module(), _call()
    other = rendered_module(SPEC, name="near")
    for given in (other.tiles(*qkv[:2], **params), torch.zeros(1), True):
        with pytest.raises(TypeError, match=r"tiles: got \w+; pass what `tiles` returned"):
            module.attention(*qkv, **params, slopes=torch.rand(2), tiles=given)


def test_tensors_are_checked_when_tiles_are_made() -> None:
    module, (qkv, params) = _module(), _call()
    with pytest.raises(TypeError, match=r"img: got torch.int64; pass torch.int32"):
        module.tiles(*qkv[:2], **{**params, "img": params["img"].long()})
    with pytest.raises(ValueError, match="heat: got shape"):
        module.tiles(*qkv[:2], **{**params, "heat": params["heat"][:3]})
    with pytest.raises(TypeError, match=r"q: pass a torch.Tensor of "):
        module.tiles(None, qkv[1], **params)
    with torch.inference_mode():
        made = params["img"].clone()
    with pytest.raises(ValueError, match="torch counts no writes to tensors of inference_mode"):
        module.tiles(*qkv[:2], **{**params, "img": made})


def test_compiled_calls_refuse_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (qkv, params) = _module(), _call()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tiles = module.tiles(*qkv[:2], **params)

    def attend(q: torch.Tensor) -> Any:
        return module.attention(q, *qkv[1:], **params, slopes=torch.ones(2), tiles=tiles)

    with pytest.raises(Exception, match=r"torch.compile cannot check what they are of"):
        torch.compile(attend, backend="eager", fullgraph=True)(qkv[0])


def test_compiled_calls_without_tiles_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (qkv, params) = _module(), _call()
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def attend(q: torch.Tensor) -> Any:
        return module.attention(q, *qkv[1:], **params, slopes=torch.ones(2))

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    leaf = qkv[0].clone().requires_grad_()
    torch.testing.assert_close(compiled(leaf), attend(leaf))
    (found,) = torch.autograd.grad(compiled(leaf).sum(), leaf)
    (expected,) = torch.autograd.grad(attend(leaf).sum(), leaf)
    torch.testing.assert_close(found, expected)


def test_masks_that_algebra_solves_take_no_tiles() -> None:
    module = rendered_module(AttentionSpec(16, "float32", mask=causal()), name="causal")
    assert not hasattr(module, "tiles")
    with pytest.raises(TypeError, match="tiles"):
        module.attention(*_call()[0], tiles=None)


def test_sizes_of_tensors_may_depend_on_numbers() -> None:
    size = Int("size", 4, min=1)
    ids = Tensor("ids", ((kv_len + size - 1) // size,), "int32")
    mask = Mask(lambda b, h, q, kv: ids[kv // 8] == ids[q // 8], "blocks", equal_lengths=True)
    module = rendered_module(AttentionSpec(16, "float32", mask=mask), name="blocks")
    (q, k, v), _ = _call()
    given = {"ids": torch.zeros(3, dtype=torch.int32), "size": 8}
    module.attention(q, k, v, **given, tiles=module.tiles(q, k, **given))
    with pytest.raises(ValueError, match="ids: got shape"):
        module.tiles(q, k, ids=given["ids"])

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
    of_other, behind = (
        other.tiles(*qkv[:2], **params),
        "; pass what `tiles` of this module returned",
    )
    given = {f"Tiles of {other.__name__}": of_other, "Tensor": torch.zeros(1), "bool": True}
    for name, tiles in given.items():
        with pytest.raises(TypeError) as error:
            module.attention(*qkv, **params, slopes=torch.rand(2), tiles=tiles)
        assert str(error.value) == f"tiles: got {name}{behind}"


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


def _attended(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Two layers that share tiles, which `within` makes if they are None."""
    monkeypatch.setitem(sys.modules, module.__name__, module)
    _, k, v = _call()[0]

    def attend(
        q: torch.Tensor, img: torch.Tensor, heat: torch.Tensor, tiles: Any, within: bool = False
    ) -> Any:
        if within:
            tiles = module.tiles(q, k, img=img, heat=heat)
        for _ in range(2):
            q = module.attention(q, k, v, img=img, heat=heat, slopes=torch.ones(2), tiles=tiles)
        return q

    return attend


def _compiled(attend: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(attend, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("made", ["never", "outside", "within"])
def test_compiled_calls_with_tiles_are_right(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (qkv, params) = _module(), _call()
    attend = _attended(module, monkeypatch)
    tiles = module.tiles(*qkv[:2], **params) if made == "outside" else None
    leaf = qkv[0].clone().requires_grad_()
    found = _compiled(attend)(leaf, **params, tiles=tiles, within=made == "within")
    expected = attend(leaf, **params, tiles=None)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(x.sum(), leaf)[0] for x in (found, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_makes_its_own_tiles(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, (qkv, params) = _module(), _call()
    attend = _attended(module, monkeypatch)

    class Layers(torch.nn.Module):
        def forward(self, q: torch.Tensor, img: torch.Tensor, heat: torch.Tensor) -> Any:
            return attend(q, img, heat, None, within=True)

    inputs = (qkv[0], *params.values())
    program = torch.export.export(Layers(), inputs, strict=strict).module()
    params["img"].add_(1)[0, 0] = 9
    torch.testing.assert_close(program(*inputs), attend(qkv[0], **params, tiles=None))


def _refusals(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What each call says, in one compiled function, that brings tiles of another mask."""
    attend = _attended(module, monkeypatch)
    compiled, said = _compiled(attend), {}
    (q, k, _), params = _call()

    def call(name: str, tiles: Any, **others: Any) -> None:
        try:
            compiled(q, **{**params, **others}, tiles=tiles)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    tiles = module.tiles(q, k, **params)
    call("right", tiles)
    call("another tensor", tiles, img=params["img"].clone())
    params["img"][0, 0] = 7
    call("written to", tiles)
    tiles = module.tiles(q, k, **params)
    call("right again", tiles)
    torch.compile(lambda: params["heat"].add_(1), backend="aot_eager")()
    call("written to by compiled code", tiles)
    tiles = module.tiles(q, k, **params)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_is_capturing", lambda q: True)
        call("in a CUDA graph", tiles)
        captured = module.tiles(q, k, **params)
    call("of a CUDA graph", captured)
    return said


REFUSED_IF_COMPILED = {
    "another tensor": "of another tensor img than the call's",
    "written to": "a tensor was written to since they were made",
    "written to by compiled code": "a tensor was written to since they were made",
    "in a CUDA graph": "a CUDA graph takes those of its capture",
    "of a CUDA graph": "made for a CUDA graph; make others outside of it",
}


def test_compiled_calls_refuse_tiles_of_another_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _refusals(_module(), monkeypatch)
    assert said.keys() == REFUSED_IF_COMPILED.keys()
    assert all(REFUSED_IF_COMPILED[name] in said[name] for name in said), said


#: Checks left out, and what is accepted then.
UNCHECKED = {
    "any_tensor": ("x is not known", "False", "another tensor"),
    "any_version": ("_check_bits(bits, of)\n", "pass\n", "written to by compiled code"),
    "any_graph": ("len(of) > 0 and _is_capturing(bits)", "False", "in a CUDA graph"),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_check_that_is_left_out_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, without, accepted = UNCHECKED[name]

    def edited(source: str) -> str:
        assert source.count(check) == 1
        return source.replace(check, without)

    module = rendered_module(SPEC, name="near", edit_source=edited)
    assert accepted not in _refusals(module, monkeypatch)


def test_a_function_writes_to_what_its_tiles_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled calls see what was written, since they decide tiles of what they are given."""
    module, (qkv, params) = _module(), _call()
    attend = _attended(module, monkeypatch)

    def written(q: torch.Tensor, img: torch.Tensor, heat: torch.Tensor) -> Any:
        tiles = module.tiles(q, qkv[1], img=img, heat=heat)
        img[0, 3:9] = 7
        return attend(q, img, heat, tiles)

    found = _compiled(written)(qkv[0], **params)
    assert (params["img"][0, 3:9] == 7).all()
    torch.testing.assert_close(found, attend(qkv[0], **params, tiles=None))


def test_tiles_that_compiled_code_returns_serve_no_eager_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, (qkv, params) = _module(), _call()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tiles = _compiled(module.tiles)(*qkv[:2], **params)
    with pytest.raises(ValueError, match=r"made where torch\.compile compiled"):
        module.attention(*qkv, **params, slopes=torch.rand(2), tiles=tiles)


@pytest.mark.parametrize("captured", [False, True])
def test_a_graph_takes_tiles_of_its_capture_alone(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, (qkv, params) = _module(), _call()
    slopes = torch.rand(2)
    monkeypatch.setattr(module, "_is_capturing", lambda q: captured)
    tiles = module.tiles(*qkv[:2], **params)
    module.attention(*qkv, **params, slopes=slopes, tiles=tiles)
    monkeypatch.setattr(module, "_is_capturing", lambda q: not captured)
    with pytest.raises(ValueError, match="a CUDA graph takes those of its capture"):
        module.attention(*qkv, **params, slopes=slopes, tiles=tiles)


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

"""Lists of chosen blocks, as calls pass them: what is refused, and what tiles are of."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Tensor, causal, chosen_blocks, q_len
from flashgen.errors import MaskError
from flashgen.forms.registry import why_no_form
from flashgen.plan import lower
from support.variants import rendered_module

COUNTS = Tensor("top", ("batch", "num_kv_heads", (q_len + 63) // 64), "int32")

#: ``top`` has another name inside of the module.
SPEC = AttentionSpec(16, "float32", mask=chosen_blocks(counts=COUNTS) & causal())


@functools.cache
def _module() -> ModuleType:
    return rendered_module(SPEC, name="chosen")


def _call(length: int = 200) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, length, 16, generator=generator) for h in (4, 2, 2))
    lists, blocks = -(-length // 64), -(-length // 64)
    index = torch.randint(-1, blocks, (2, 2, lists, 3), generator=generator).int()
    return [q, k, v], {"chosen": index, "top": torch.full((2, 2, lists), 2, dtype=torch.int32)}


def test_a_call_with_tiles_is_the_same_call() -> None:
    module, (qkv, params) = _module(), _call()
    expected = module.attention(*qkv, **params)
    found = module.attention(*qkv, **params, tiles=module.tiles(*qkv[:2], **params))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(module.reference(*qkv, **params), expected)


def test_a_list_is_a_set() -> None:
    module, (qkv, params) = _module(), _call()
    expected = module.attention(*qkv, **params)
    index = params["chosen"]
    doubled = torch.cat([index[..., :2].flip(-1), index[..., :1], index[..., 1:2]], -1)
    found = module.attention(*qkv, chosen=doubled, top=params["top"] + 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_tiles_of_other_lists_are_refused() -> None:
    module, (qkv, params) = _module(), _call()
    tiles = module.tiles(*qkv[:2], **params)
    with pytest.raises(ValueError, match="tiles: of another tensor chosen than the call's"):
        module.attention(*qkv, **{**params, "chosen": params["chosen"].clone()}, tiles=tiles)
    params["top"][0] = 1
    with pytest.raises(ValueError, match="tiles: top was written to since they were made"):
        module.attention(*qkv, **params, tiles=tiles)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no_tensor": ({"chosen": None}, r"chosen: got NoneType; pass a torch.Tensor"),
    "dtype": ({"chosen": torch.zeros(2, 2, 4, 3)}, r"chosen: got torch.float32; pass torch.int32"),
    "heads": (
        {"chosen": torch.zeros(2, 4, 4, 3, dtype=torch.int32)},
        r"chosen: got shape \(2, 4, 4, 3\); pass \(2, 2, 4, any\)",
    ),
    "counts": (
        {"top": torch.zeros(2, 2, 3, dtype=torch.int32)},
        r"top: got shape \(2, 2, 3\); pass \(2, 2, 4\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_lists_are_refused(name: str) -> None:
    module, (qkv, params) = _module(), _call()
    change, message = REFUSED[name]
    for call in (module.attention, module.reference, lambda q, k, v, **x: module.tiles(q, k, **x)):
        with pytest.raises((TypeError, ValueError), match=message):
            call(*qkv, **{**params, **change})


def test_what_only_the_device_knows_is_told_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (qkv, params) = _module(), _call()
    index, counts = params["chosen"], params["top"]
    module.attention(*qkv, **params)
    outside = index.masked_fill(index == 0, 4)
    broken = {
        "chosen: an entry is neither a block of the 4 nor -1": (outside, counts),
        "chosen: counts are not from 0 to the 3 entries": (index, counts + 2),
    }
    for message, (wrong, of) in broken.items():
        monkeypatch.delenv("FLASHGEN_CHECK", raising=False)
        assert module.attention(*qkv, chosen=wrong, top=of).isfinite().all()
        monkeypatch.setenv("FLASHGEN_CHECK", "1")
        with pytest.raises(ValueError) as error:
            module.attention(*qkv, chosen=wrong, top=of)
        assert str(error.value) == message
    module.attention(*qkv, **params)


def _layers(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Two layers that share tiles, made within if asked; then some lists may be written to."""
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def attend(
        *qkv: torch.Tensor,
        tiles: Any = None,
        within: bool = False,
        write: bool = False,
        **lists: Any,
    ) -> torch.Tensor:
        q, k, v = qkv
        if within:
            tiles = module.tiles(q, k, **lists)
        if write:
            lists["chosen"][..., 0] = 0
        for _ in range(2):
            q = module.attention(q, k, v, **lists, tiles=tiles)
        return q

    return attend


def _compiled(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("made", ["never", "outside", "within"])
def test_compiled_calls_are_right(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (qkv, params) = _module(), _call()
    attend = _layers(module, monkeypatch)
    tiles = module.tiles(*qkv[:2], **params) if made == "outside" else None
    leaves = [x.requires_grad_() for x in qkv]
    results = []
    for call, options in (
        (_compiled(attend), {"tiles": tiles, "within": made == "within"}),
        (attend, {}),
    ):
        out = call(*leaves, **params, **options)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right)


def test_compiled_calls_refuse_tiles_of_other_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (qkv, params) = _module(), _call()
    compiled = _compiled(_layers(module, monkeypatch))
    tiles = module.tiles(*qkv[:2], **params)
    compiled(*qkv, **params, tiles=tiles)
    with pytest.raises(Exception, match="of another tensor chosen than the call's"):
        compiled(*qkv, **{**params, "chosen": params["chosen"].clone()}, tiles=tiles)
    params["top"][0] = 1
    with pytest.raises(ValueError, match="a tensor was written to since they were made"):
        compiled(*qkv, **params, tiles=tiles)


def test_a_compiled_function_sees_lists_that_it_writes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its tiles were made before: nothing there tells that they are of other lists."""
    module, (qkv, params) = _module(), _call()
    attend = _layers(module, monkeypatch)
    before = attend(*qkv, **params)
    found = _compiled(attend)(*qkv, **params, within=True, write=True)
    right = attend(*qkv, **params)
    torch.testing.assert_close(found, right)
    assert not torch.allclose(before, right)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_makes_its_own_tiles(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, (qkv, params) = _module(), _call()
    attend = _layers(module, monkeypatch)

    class Layers(torch.nn.Module):
        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: Any, top: Any
        ) -> torch.Tensor:
            return attend(q, k, v, chosen=chosen, top=top, within=True)

    inputs = (*qkv, *params.values())
    program = torch.export.export(Layers(), inputs, strict=strict).module()
    params["chosen"][..., 0] = 0
    torch.testing.assert_close(program(*inputs), attend(*qkv, **params))


@pytest.mark.parametrize("form", ["varlen", "cache", "mesh"])
def test_other_forms_refuse_lists(form: str) -> None:
    plan = lower(SPEC, "chosen")
    assert why_no_form(form, plan) == (
        f"{form!r} takes no lists of chosen blocks: the dense form alone does"
    )


ROWS = (q_len + 63) // 64
OF = ("batch", "num_kv_heads", ROWS, None)
DECLARED: dict[str, tuple[dict[str, Any], str]] = {
    "block": ({"block": 48}, "block=48; give 16, 32 or a multiple of 64"),
    "query_block": ({"query_block": 32}, "query_block=32; give 1 or a multiple of 64"),
    "name": ({"index": "chosen"}, "index='chosen'; give a declared tensor, as Tensor"),
    "dtype": ({"index": Tensor("x", OF, "bool")}, r"index=Tensor\('x', .*'bool'.*declare it as"),
    "lists": ({"index": Tensor("x", (*OF[:2], q_len, None), "int32")}, "declare it as"),
    "entries": ({"index": Tensor("x", OF[:3], "int32")}, "declare it as"),
    "counts": ({"counts": Tensor("x", (1, *OF[1:3]), "int32")}, "give it the same dimensions but"),
}


@pytest.mark.parametrize("name", DECLARED)
def test_other_declarations_are_refused(name: str) -> None:
    given, message = DECLARED[name]
    with pytest.raises(MaskError, match=f"chosen_blocks: .*{message}"):
        chosen_blocks(**given)

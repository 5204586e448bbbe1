"""NaN and infinities in keys, values, queries and gradients that a mask hides by position alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Mask,
    Tensor,
    block_sparse,
    causal,
    document,
    sigmoid_attention,
    softmax,
)
from flashgen.plan import lower
from support.bits import with_bits
from support.cases import Case, inputs
from support.gluon import interpreted
from support.gluon.modules import start_over
from support.slip import with_slip
from support.turns import in_turns, some
from support.variants import (
    any_hopper,
    any_hopper_backward,
    first_on_hopper,
    imported,
    rendered,
    rendered_module,
)
from sweep.backward import check_backward
from sweep.launch import check_kernel

LENGTH = 100

_KEYS = Tensor("keys_of", ("batch",), "int32")
_QUERIES = Tensor("queries_of", ("batch",), "int32")
_KEYS_BY_HEAD = Tensor("keys_by_head", ("num_q_heads",), "int32")
_Q_IDS, _IDS = (
    Tensor(name, ("batch", length), "int32", sorted=True)
    for name, length in (("q_ids", "q_len"), ("ids", "kv_len"))
)
_ANY_IDS = Tensor("ids", ("batch", "kv_len"), "int32")
_KEPT = Tensor("kept", ("batch", "kv_len"), "bool")
_BIAS = Tensor("bias", ("num_q_heads", "kv_len"))
_SINKS = Tensor("sinks", ("num_q_heads",))

_keys = Mask(lambda b, h, q_idx, kv_idx: kv_idx < _KEYS[b], "keys")
_queries = Mask(lambda b, h, q_idx, kv_idx: q_idx < _QUERIES[b], "queries")
_by_head = Mask(lambda b, h, q_idx, kv_idx: kv_idx < _KEYS_BY_HEAD[h], "by_head")
_kept = Mask(lambda b, h, q_idx, kv_idx: _KEPT[b, kv_idx], "kept")


def _biased(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return 20.0 * (score / 20.0).tanh() + _BIAS[h, kv_idx]


SPECS = {
    "keys": AttentionSpec(64, "float16", mask=_keys),
    "causal": AttentionSpec(64, "float16", mask=causal() & _keys & _queries),
    "by_head": AttentionSpec(64, "float16", mask=_by_head & _queries),
    "kept": AttentionSpec(80, "float16", mask=causal() & _kept),
    "wide": AttentionSpec((192, 128), "float16", mask=_keys & _queries),
    "biased": AttentionSpec(64, "float16", mask=_keys & _queries, score=_biased),
    "sinks": AttentionSpec(
        64, "float16", mask=causal() & _keys & _queries, normaliser=softmax(sink=_SINKS)
    ),
    "sigmoid": AttentionSpec(64, "float32", mask=_keys & _queries, normaliser=sigmoid_attention()),
    "listed": AttentionSpec(128, "float16", mask=_keys & _queries & block_sparse(block=16)),
    "documents": AttentionSpec(64, "float16", mask=document() & causal()),
    "documents_both_sides": AttentionSpec(64, "float16", mask=document()),
    "documents_of_two": AttentionSpec(64, "float16", mask=document(_Q_IDS, _IDS)),
    "documents_unsorted": AttentionSpec(64, "float16", mask=document(_ANY_IDS) & causal()),
    "dropped": AttentionSpec(64, "float16", mask=causal() & _keys & _queries, dropout=True),
}

#: Of two entries the first shows 37 keys to 70 queries, the second all but the last 20.
_LENGTHS = {"keys_of": [37, 80], "queries_of": [70, 80], "keys_by_head": [50, 83]}

#: Padding behind documents, and before them; then between them, and documents that come twice.
IDS = {
    "in_order": [[0] * 30 + [1] * 40 + [-1] * 30, [-1] * 35 + [3] * 65],
    "in_none": [[4] * 30 + [-1] * 40 + [5] * 30, [2] * 30 + [1] * 30 + [-1] * 20 + [2] * 20],
}

POISON = {"nan": torch.nan, "inf": torch.inf, "minus_inf": -torch.inf}


def _case(spec: AttentionSpec, order: str = "in_order", times: int = 1, kv_heads: int = 1) -> Case:
    ids = {
        p.name: torch.tensor(IDS[order], dtype=torch.int32).repeat_interleave(times, 1)
        for p in spec.params
        if "ids" in p.name
    }
    params = {p.name: _LENGTHS[p.name] for p in spec.params if p.name in _LENGTHS}
    params = {
        name: torch.tensor(value, dtype=torch.int32) * times for name, value in params.items()
    }
    length = times * LENGTH
    return Case(length, length, batch=2, q_heads=2, kv_heads=kv_heads, params=params | ids)


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name])


def _shown(
    params: dict[str, torch.Tensor], length: int = LENGTH
) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, 1, length, 1): queries, and keys, that something is shown of."""
    at, everything = torch.arange(length), torch.ones(2, length, dtype=torch.bool)
    queries = at < params["queries_of"][:, None] if "queries_of" in params else everything
    keys = at < params["keys_of"][:, None] if "keys_of" in params else everything
    if "kept" in params:
        keys = params["kept"]
    if "keys_by_head" in params:
        keys = (at < params["keys_by_head"].max()).expand(2, length)
    for name in params:
        if "ids" in name:
            queries = keys = params[name] != -1
    return queries[:, None, :, None], keys[:, None, :, None]


def _config(**sizes: int | bool) -> dict[str, int | bool]:
    return {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2, "USE_TMA": False} | sizes


@pytest.mark.parametrize(("name", "poison"), in_turns(SPECS, list(POISON), every=3))
def test_forward(name: str, poison: str) -> None:
    """Bits are those of a call that hides ordinary numbers."""
    spec, module, case = SPECS[name], _module(name), _case(SPECS[name])
    params = case.arguments(spec)
    queries, keys = _shown(params)
    clean = inputs(case, spec, getattr(torch, spec.dtype))
    dirty = [
        x.where(shown, POISON[poison])
        for x, shown in zip(clean, (queries, keys, keys), strict=True)
    ]
    given = with_bits(module, spec, *clean[:2], params)
    expected, got = (
        module._launch(*tensors, spec.qk_head_dim**-0.5, *given, _config())
        for tensors in (clean, dirty)
    )
    for x, y in zip(expected, got, strict=True):
        assert torch.equal(x, y)


#: Those that have a Gluon kernel: of three consumers and of two, with fused pairs and without.
_IN_GLUON = [name for name, spec in SPECS.items() if spec.dtype == "float16"]


def _forward_in_gluon(name: str, poison: float, edit: Callable[[str], str] = str) -> list[bool]:
    """Whether outputs, and LSEs, are those of a call that hides ordinary numbers."""
    spec = SPECS[name]
    module = rendered_module(spec, hopper=True, edit_source=lambda x: interpreted(edit(x)))
    case, config = _case(spec), first_on_hopper(spec).as_dict()
    params = case.arguments(spec)
    shown = (*_shown(params), _shown(params)[1])
    clean = inputs(case, spec, torch.float16)
    dirty = [x.where(rows, poison) for x, rows in zip(clean, shown, strict=True)]
    given = with_bits(module, spec, *clean[:2], params)
    found = (
        module._launch_hopper(*x, spec.qk_head_dim**-0.5, *given, config) for x in (clean, dirty)
    )
    return [torch.equal(x, y) for x, y in zip(*found, strict=True)]


@pytest.mark.parametrize(("name", "poison"), in_turns(_IN_GLUON, list(POISON), every=3))
def test_forward_in_gluon(name: str, poison: str) -> None:
    assert _forward_in_gluon(name, POISON[poison]) == [True, True]


#: Slips in what notes and clears: (the variant, what stands there, what stands there instead).
SLIPS = {
    "nothing is cleared": ("keys", "if first > ALL_SHOWN:", "if first > 2**30:"),
    "no fence": ("keys", "        fence_async_shared()\n        _barrier()", "        _barrier()"),
    "half of a tile is cleared": ("keys", "static_range(0, ROWS, 16)", "static_range(0, 64, 16)"),
    "rows are cleared from elsewhere on": ("wide", "(first + row + ", "(first + "),
    "another buffer is noted": (
        "keys", "_note_hidden_keys(hiding.index(number)", "_note_hidden_keys(hiding.index(0)",
    ),
    "keys are noted, not values": ("wide", "index(number), v_row", "index(number), row"),
    "the next tile's batch entry": ("listed", "hiding, done, call)", "hiding, place, call)"),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_in_gluon_are_found(slip: str) -> None:
    name, right, wrong = SLIPS[slip]

    try:
        held = _forward_in_gluon(name, torch.nan, with_slip(right, wrong))
    except AssertionError:  # the machine's: read without a fence
        return
    assert held != [True, True]


def _softcap(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return 20.0 * (score / 20.0).tanh()


#: What has Gluon kernels for gradients: one pass, of tiles of either width, or a split one, whose
#: consumers have their own keys or, of wide heads, roles; slopes of products.
GRADIENTS = {
    name: spec
    for name, spec in SPECS.items()
    if spec.dtype == "float16" and name not in ("kept", "documents_unsorted")
} | {
    "wider": AttentionSpec(128, "float16", mask=_keys & _queries),
    "wider_documents": AttentionSpec(128, "float16", mask=document()),
    "pair": replace(SPECS["causal"], deterministic=True),
    "pair_of_documents": AttentionSpec(128, "float16", mask=document(), deterministic=True),
    "capped": AttentionSpec(64, "float16", mask=_keys & _queries, score=_softcap),
    "capped_wide": AttentionSpec((192, 128), "float16", mask=document(), score=_softcap),
}

Gradients = tuple[torch.Tensor, ...]


def _case_of_gradients(name: str) -> Case:
    """Of two tiles of keys, where a program may have one that no query sees before others."""
    return _case(GRADIENTS[name], times=2, kv_heads=2 if name == "wider" else 1)


@functools.cache
def _source(name: str) -> tuple[str, dict[str, int | bool]]:
    """A module with Gluon kernels, and the configuration of the backward ones."""
    plan = lower(GRADIENTS[name], name)
    choice = any_hopper_backward(plan)
    [chosen] = choice["hopper_backward"].configs.values()
    return rendered(plan, any_hopper(plan), choice), chosen.config.as_dict()


def _gradients_in_gluon(name: str, hidden: float, edit: Callable[[str], str] = str) -> Gradients:
    """Gradients where hidden rows hold a value."""
    spec = GRADIENTS[name]
    source, config = _source(name)
    module = imported(name, interpreted(edit(source)))
    case = _case_of_gradients(name)
    params = case.arguments(spec)
    queries, keys = _shown(params, case.q_len)
    q, k, v = inputs(case, spec, torch.float16)
    plain = (x.where(rows, 0.0).float() for x, rows in ((q, queries), (k, keys), (v, keys)))
    out, lse = module.reference(*plain, **params, return_lse=True)
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(out.shape, generator=generator).half()
    grad_lse = torch.randn(lse.shape, generator=generator)
    if name != "sinks":
        grad_lse = grad_lse.where(queries[..., 0], hidden)
    start_over(1)  # sums may come in another order in another course
    found = module._backward_kernels_hopper(
        *(x.where(rows, hidden) for x, rows in ((q, queries), (k, keys), (v, keys))),
        spec.qk_head_dim**-0.5,
        *params.values(),
        out.half(),
        lse,
        grad_out.where(queries, hidden),
        grad_lse,
        config,
    )
    assert isinstance(found, tuple)
    return found


@functools.cache
def _clean_gradients_in_gluon(name: str) -> Gradients:
    return _gradients_in_gluon(name, 0.0)


def _hold_gradients(name: str, found: Gradients) -> None:
    expected = _clean_gradients_in_gluon(name)
    assert [torch.equal(x, y) for x, y in zip(found, expected, strict=True)] == [True] * len(found)
    case = _case_of_gradients(name)
    queries, keys = _shown(case.arguments(GRADIENTS[name]), case.q_len)
    for x, shown in zip(found[:3], (queries, keys, keys), strict=True):
        assert torch.equal(x.where(~shown, 0.0), torch.zeros_like(x))


@pytest.mark.parametrize(("name", "poison"), in_turns(GRADIENTS, list(POISON), every=9))
def test_backward_in_gluon(name: str, poison: str) -> None:
    _hold_gradients(name, _gradients_in_gluon(name, POISON[poison]))


#: The same of what notes and clears in the backward kernels.
BACKWARD_SLIPS = {
    "no keys are cleared": ("keys", "range(len(tiles))", "range(1, len(tiles))"),
    "no values are cleared": ("keys", "range(len(tiles))", "range(1)"),
    "no queries are cleared": ("causal", "tile = q_tiles", "tile = grad_out_tiles"),
    "nor is the output's gradient": ("causal", "tile = grad_out_tiles", "tile = q_tiles"),
    "no fence": ("causal", "  fence_async_shared()\n        _barrier()", "  _barrier()"),
    "the other consumer still reads": ("causal", "        _meet()  # the other", "        #"),
    "both clear the first rows": ("wider", "first + OFFSET", "first"),
    "other keys are noted": ("wider", "key_notes.index(number), kv", "key_notes.index(0), kv"),
    "other queries are noted": ("wider", "query_notes.index(stage)", "query_notes.index(0)"),
    "the next values are cleared": ("wider", "if visits > 0:  # otherwise", "if True:  #"),
    "slopes of no numbers": ("capped", "-1e18), 1e18)", "-1e18), 1e18) + scores"),
    "a pair clears no values": ("pair", "range(len(tiles))", "range(0)"),
    "roles clear no values": ("wide", "_clear_own_keys(v, key", "_clear_own_keys((), key"),
    "one role clears": ("wide", "  if more:\n        _clear", "  if False:\n        _clear"),
    "but for a head's first queries": (
        "wide", "if visits > 0:\n            _clear", "if False:\n            _clear",
    ),
    "by queries, no keys are cleared": ("wide", "of_keys((k_0, k_1, v)", "of_keys((v,)"),
    "by queries, no values are cleared": ("pair", "of_keys((k, v)", "of_keys((k,)"),
    "by queries, no gradient is cleared": ("pair", "_noted(query_notes, 0) > ALL_SHOWN", "False"),
    "slopes by queries": ("capped_wide", "-1e18), 1e18)", "-1e18), 1e18) + scores"),
}  # fmt: skip


@pytest.mark.parametrize("slip", some(BACKWARD_SLIPS, every=2))
def test_slips_in_gluon_gradients_are_found(slip: str) -> None:
    name, right, wrong = BACKWARD_SLIPS[slip]

    with pytest.raises(AssertionError):  # also the machine's: read without a fence, a deadlock
        _hold_gradients(name, _gradients_in_gluon(name, torch.nan, with_slip(right, wrong)))


_DOCUMENTS = [name for name in SPECS if name.startswith("documents")]


@pytest.mark.parametrize("order", IDS)
@pytest.mark.parametrize("name", _DOCUMENTS)
def test_padding_of_documents(name: str, order: str) -> None:
    """Rows of an id of -1 are empty, and what they hold touches no other."""
    spec, module, case = SPECS[name], _module(name), _case(SPECS[name], order)
    check_kernel(module, spec, case)
    check_backward(module, spec, case)
    params = case.arguments(spec)
    shown, _ = _shown(params)
    tensors = [x.where(shown, torch.nan) for x in inputs(case, spec, torch.float16)]
    given = with_bits(module, spec, *tensors[:2], params)
    out, lse = module._launch(*tensors, 0.125, *given, _config())
    expected, expected_lse = module.reference(*tensors, **params, return_lse=True)
    empty = ~shown[..., 0].expand(lse.shape)
    for rows, of in ((out, lse), (expected, expected_lse)):
        assert torch.equal(rows[empty], torch.zeros_like(rows[empty]))
        assert torch.equal(of == -torch.inf, empty)
    assert torch.allclose(out, expected, atol=2e-3)


@pytest.mark.parametrize(("name", "poison"), in_turns(SPECS, list(POISON), every=3))
def test_backward(name: str, poison: str) -> None:
    """The same of gradients, where those of the output are hidden as well."""
    spec, module, case = SPECS[name], _module(name), _case(SPECS[name])
    params = case.arguments(spec)
    queries, keys = _shown(params)
    dtype = getattr(torch, spec.dtype)
    q, k, v = inputs(case, spec, dtype)
    scale = spec.qk_head_dim**-0.5
    given = with_bits(module, spec, q, k, params)
    out, lse = module._launch(q, k, v, scale, *given, _config())
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(out.shape, generator=generator).to(dtype)
    grad_lse = torch.randn(lse.shape, generator=generator)
    found = []
    for value in (0.0, POISON[poison]):
        tensors = [x.where(shown, value) for x, shown in ((q, queries), (k, keys), (v, keys))]
        grads = module._backward_kernels(
            *tensors,
            scale,
            *given,
            out,
            lse,
            grad_out.where(queries, value),
            grad_lse if name == "sinks" else grad_lse.where(queries[..., 0], value),
            _config(),
            _config(BLOCK_M=16, BLOCK_N=32),
        )
        if name == "sinks":
            grads = module._with_sink(grads, lse, params["sinks"])
        found.append(grads)
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
    for x, shown in zip(found[1][:3], (queries, keys, keys), strict=True):
        assert torch.equal(x.where(~shown, 0.0), torch.zeros_like(x))


@pytest.mark.parametrize("name", ["causal", "by_head", "kept", "sinks", "sigmoid", "documents"])
def test_reference(name: str) -> None:
    """The same of what CPU tensors run, and of its gradients."""
    spec, module, case = SPECS[name], _module(name), _case(SPECS[name])
    params = case.arguments(spec)
    queries, keys = _shown(params)
    clean = [x.float() for x in inputs(case, spec, getattr(torch, spec.dtype))]
    grad_out = torch.randn(
        2, 2, LENGTH, spec.v_head_dim, generator=torch.Generator().manual_seed(1)
    )
    found = []
    for value in (0.0, torch.nan):
        tensors = [
            x.where(shown, value).requires_grad_()
            for x, shown in zip(clean, (queries, keys, keys), strict=True)
        ]
        out, lse = module.reference(*tensors, **params, return_lse=True)
        grads = torch.autograd.grad(out, tensors, grad_out.where(queries, value))
        found.append((out.detach(), lse.detach(), *grads))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", SPECS)
def test_ordinary_numbers(name: str) -> None:
    check_kernel(_module(name), SPECS[name], _case(SPECS[name]))
    if not SPECS[name].dropout:
        check_backward(_module(name), SPECS[name], _case(SPECS[name]))


def test_rows_behind_a_tile_of_documents_change_nothing() -> None:
    """A tile of queries that ends with its document is loaded with rows behind it, here of NaN."""
    spec = AttentionSpec(128, "bfloat16", mask=document() & causal())
    module = rendered_module(spec, hopper=True, edit_source=interpreted)
    ids = torch.arange(1000, dtype=torch.int32)[None] // 150
    ids[:, 667:] = -1
    tensors = inputs(Case(1000, 1000, params={"document_ids": ids}), spec, torch.bfloat16)
    shown = (ids != -1)[:, None, :, None]
    config = dict(module.HOPPER_CONFIG)
    found = (
        module._launch_hopper(*x, 128**-0.5, ids, config)
        for x in (tensors, [x.where(shown, torch.nan) for x in tensors])
    )
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)

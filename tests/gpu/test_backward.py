"""Gradients on the GPU: lengths, layouts, heads, tiles, the vocabulary, the same bits twice."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, Tensor, block_sparse, causal
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.space import split_space
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from gpu.launch import (
    backward_module_of,
    native,
    nothing_is_zero_by_chance,
    on_hopper,
    poison,
)
from support.cases import LAYOUTS, Case, inputs
from support.contract import check_gradients
from support.gradients import leaves_of
from support.runs import noted
from support.variants import rendered_module, shipped_specs
from support.vocabulary import VOCABULARY

pytestmark = pytest.mark.gpu

SPECS = shipped_specs()

#: Of every remainder around the tiles of 64 and 128 rows.
LENGTHS = (1, 2, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 200, 255, 256, 257, 333)
UNEQUAL = ((1, 1), (1, 200), (200, 1), (100, 300), (300, 100), (64, 128), (65, 129), (129, 640))

#: Some of them divided: two kernels add nothing up in any order, as of wide heads.
DIVIDED = {
    **{name: SPECS[name] for name in ("causal_d256", "causal_d192_v128")},
    **{
        f"{name}_deterministic": replace(SPECS[name], deterministic=True)
        for name in ("causal_d64", "window_d128", "documents_d128", "softcap_d128")
    },
}

#: Layouts that TMA cannot read: the portable kernels run.
UNREADABLE = ("unaligned", "one_head", "one_row")


def _check(
    module: ModuleType,
    name: str,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    *,
    lse_only: bool = False,
) -> None:
    """Gradients of a shipped variant, by the Gluon kernel if the module counts its runs."""
    before = getattr(module, "runs", 0)
    poison()
    with nothing_is_zero_by_chance(monkeypatch):
        check_gradients(module, SPECS[name], case, lse_only=lse_only, device="cuda")
    if hasattr(module, "runs"):
        assert module.runs - before == (case.layout not in UNREADABLE), case


@pytest.mark.parametrize("name", SPECS)
def test_lengths(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = backward_module_of(name, form)
    lengths = [(n, n) for n in LENGTHS]
    lengths += [] if SPECS[name].equal_lengths else UNEQUAL
    for q_len, kv_len in lengths:
        _check(module, name, Case(q_len, kv_len, batch=2, q_heads=4, kv_heads=2), monkeypatch)


@pytest.mark.parametrize("name", SPECS)
def test_the_gradient_of_the_lse(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(200, 200, batch=2, q_heads=4, kv_heads=2)
    _check(backward_module_of(name, form), name, case, monkeypatch, lse_only=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_layouts(name: str, layout: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(150, 150, batch=2, q_heads=4, kv_heads=2, layout=layout)
    _check(backward_module_of(name, form), name, case, monkeypatch)


@pytest.mark.parametrize("name", SPECS)
def test_heads(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch, q_heads, kv_heads in ((1, 1, 1), (3, 5, 5), (1, 12, 1), (2, 8, 4)):
        case = Case(90, 90, batch, q_heads, kv_heads)
        _check(backward_module_of(name, form), name, case, monkeypatch)


@pytest.mark.parametrize("name", ["causal_d64", "full_d128", "sinks_softmax_d64", "causal_d256"])
def test_past_the_operators_and_through_them(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice past them, since launches are repeated; sums of several programs round in any order."""
    spec, module = SPECS[name], backward_module_of(name, form)
    case = Case(1000, 1000, batch=1, q_heads=4, kv_heads=2)
    leaves = [x.requires_grad_() for x in inputs(case, spec, native(spec), "cuda")]
    params, found = case.arguments(spec, "cuda"), []
    for plain in (True, True, False):
        if not plain:
            monkeypatch.setattr(module, "_is_plain", lambda *tensors: False)
            monkeypatch.setattr(module, "_again", lambda *given: None)
        poison()
        with nothing_is_zero_by_chance(monkeypatch):
            out = module.attention(*leaves, **params)
            found.append((out, *torch.autograd.grad(out, leaves, out.detach())))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["causal_d64", "causal_d80", "causal_d128"])
def test_layouts_of_the_gradient(name: str, form: str) -> None:
    """As models make it: heads side by side, columns of something wider, one number for all."""
    spec, module = SPECS[name], backward_module_of(name, form)
    case = Case(150, 150, batch=2, q_heads=4, kv_heads=2)
    leaves = [x.requires_grad_() for x in inputs(case, spec, native(spec), "cuda")]
    out = module.attention(*leaves)
    grad_out = torch.randn_like(out)
    wide = torch.full((*out.shape[:3], 3 * out.shape[3]), torch.nan, device="cuda").to(out.dtype)
    column = out.shape[3]
    wide[..., column : 2 * column] = grad_out
    alike = [
        grad_out.transpose(1, 2).contiguous().transpose(1, 2),
        wide[..., column : 2 * column],
        grad_out.mT.contiguous().mT,
    ]
    plain = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    for view in alike:
        found = torch.autograd.grad(out, leaves, view, retain_graph=True)
        torch.testing.assert_close(found, plain, rtol=0.02, atol=0.02)
    ones = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    expanded = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(expanded, ones, rtol=0.02, atol=0.02)


HELD = [
    pytest.param(name, config.num_stages, id=f"{name}-s{config.num_stages}")
    for name, spec in SPECS.items()
    for config in split_space(HopperBackwardSplit(backward_plan(lower(spec, name)))).candidates
]


@pytest.mark.parametrize(("name", "stages"), HELD)
def test_every_candidate_of_the_gluon_kernel(
    name: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_hopper():
        pytest.skip("the Gluon kernel needs a Hopper GPU")
    module = backward_module_of(name, "hopper")
    monkeypatch.setitem(module.BACKWARD_HOPPER, "num_stages", stages)
    monkeypatch.setattr(module, "_LAUNCHES", {})
    for length in (150, 1000):
        case = Case(length, length, batch=2, q_heads=4, kv_heads=2)
        _check(module, name, case, monkeypatch)


@pytest.mark.parametrize("name", ["causal_d64", "causal_d128", "dropout_causal_d64"])
@pytest.mark.parametrize("by", [(2, 4), (0, 3)], ids=str)
@pytest.mark.usefixtures("hopper")
def test_tiles_in_parts(name: str, by: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    module = backward_module_of(name, "hopper")
    monkeypatch.setattr(module, "_LAUNCHES", {})
    monkeypatch.setattr(module, "_divided", lambda *_: by)
    for length in (1, 129, 1000):
        for heads in ((8, 2), (10, 2), (7, 1)):
            _check(module, name, Case(length, length, 2, *heads), monkeypatch)


@pytest.mark.parametrize("by", [None, (1, 3)], ids=str)
@pytest.mark.parametrize("name", ["causal_d64", "causal_d128"])
@pytest.mark.usefixtures("hopper")
def test_no_race_shows_in_many_runs(
    name: str, by: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program owns its keys: the same bits every time. Sums of queries round in any order.

    Parts of a tile of keys are added up in their order.
    """
    spec, module = SPECS[name], backward_module_of(name, "hopper")
    monkeypatch.setattr(module, "_LAUNCHES", {})
    if by is not None:
        monkeypatch.setattr(module, "_divided", lambda *_: by)
    case = Case(1500, 1500, batch=2, q_heads=8, kv_heads=2)
    leaves = [x.requires_grad_() for x in inputs(case, spec, native(spec), "cuda")]
    out = module.attention(*leaves)
    grad_out, before = torch.randn_like(out), module.runs
    first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    size = first[0].float().abs().max().item()
    eps = torch.finfo(out.dtype).eps
    for _ in range(200):
        grad_q, grad_k, grad_v = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        assert torch.equal(grad_k, first[1]) and torch.equal(grad_v, first[2])
        difference = (grad_q.float() - first[0].float()).abs()
        # Of two float32 sums that differ in their last bits, one rounding step.
        assert (difference <= eps * first[0].float().abs() + 1e-5 * size).all()
    assert module.runs - before == 201


@functools.cache
def _divided(name: str) -> ModuleType:
    return noted(rendered_module(DIVIDED[name], name=name, hopper=True))


@pytest.mark.parametrize("name", DIVIDED)
def test_two_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on_hopper():
        pytest.skip("the Gluon kernels need a Hopper GPU")
    spec, module = DIVIDED[name], _divided(name)
    lengths = [(n, n) for n in LENGTHS]
    lengths += [] if spec.equal_lengths else UNEQUAL
    for q_len, kv_len in lengths:
        before = module.runs
        poison()
        with nothing_is_zero_by_chance(monkeypatch):
            case = Case(q_len, kv_len, batch=2, q_heads=4, kv_heads=2)
            check_gradients(module, spec, case, device="cuda")
        assert module.runs == before + 1


@pytest.mark.parametrize("name", DIVIDED)
def test_they_give_the_same_bits_every_time(name: str) -> None:
    if not on_hopper():
        pytest.skip("the Gluon kernels need a Hopper GPU")
    spec, module = DIVIDED[name], _divided(name)
    case = Case(1500, 1500, batch=2, q_heads=8, kv_heads=2)
    leaves = [x.requires_grad_() for x in inputs(case, spec, native(spec), "cuda")]
    out = module.attention(*leaves, **case.arguments(spec, "cuda"))
    grad_out, before = torch.randn_like(out), module.runs
    first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    for _ in range(200):
        poison()
        found = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        assert all(torch.equal(one, two) for one, two in zip(first, found, strict=True))
    assert module.runs - before == 201


#: Of the vocabulary, what the portable kernel over queries learns beside the Gluon one over keys:
#: of diagonals, elements and heads, with slopes and without, in consumers with roles and without.
BESIDE = tuple(
    (name, head_dim)
    for name in ("relative_bias", "t5_bias_causal", "additive_bias", "softcap_by_head", "composed")
    for head_dim in (64, 128, 192)
)


@pytest.mark.parametrize(("name", "head_dim"), BESIDE)
def test_beside_the_portable_kernel_over_queries(
    name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_hopper():
        pytest.skip("the Gluon kernels need a Hopper GPU")
    entry, module = VOCABULARY[name], _rendered(name, head_dim, hopper=True)
    for q_len, kv_len in ((1, 1), (64, 64), (127, 127), (128, 128), (200, 200), *UNEQUAL[3:]):
        before = module.runs
        poison()
        with nothing_is_zero_by_chance(monkeypatch):
            case = entry.case(Case(q_len, kv_len, batch=2, q_heads=4, kv_heads=2))
            check_gradients(module, entry.spec("bfloat16", head_dim), case, device="cuda")
        assert module.runs == before + 1


@pytest.mark.parametrize(("name", "head_dim"), BESIDE)
def test_its_launches_are_repeated_to_the_bit(name: str, head_dim: int) -> None:
    """Gradients of learned tensors too: `deterministic=True` adds nothing up in any order."""
    if not on_hopper():
        pytest.skip("the Gluon kernels need a Hopper GPU")
    entry, module = VOCABULARY[name], _rendered(name, head_dim, hopper=True, deterministic=True)
    spec = entry.spec("bfloat16", head_dim, deterministic=True)
    for length in (1500, 1536):
        case = entry.case(Case(length, length, batch=2, q_heads=8, kv_heads=2))
        given = case.arguments(spec, "cuda")
        qkv, params, learned = leaves_of(inputs(case, spec, native(spec), "cuda"), given)
        leaves = (*qkv, *learned.values())
        out = module.attention(*qkv, **params)
        grad_out, before = torch.randn_like(out), module.runs
        first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        for _ in range(50):
            poison()
            found = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
            assert all(torch.equal(one, two) for one, two in zip(first, found, strict=True))
        assert module.runs - before == 51


# Queries and keys of a tile, warps and stages.
TILES = ((64, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2), (64, 64, 4, 1), (128, 32, 8, 2))


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("name", ["causal_d64", "window_d128", "softcap_d128", "documents_d128"])
def test_tiles(
    name: str, tiles: tuple[int, ...], tma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    config = dict(zip(names, tiles, strict=True)) | {"USE_TMA": tma}
    module = backward_module_of(name, "portable")
    for table in (module.BACKWARD_OF_KEYS, module.BACKWARD_OF_QUERIES):
        monkeypatch.setitem(table, module._target(torch.device("cuda", 0)), config)
    for length in (150, 256):
        _check(module, name, Case(length, length, batch=2, q_heads=4, kv_heads=2), monkeypatch)


@functools.cache
def _rendered(
    name: str, head_dim: int = 64, *, hopper: bool = False, deterministic: bool = False
) -> ModuleType:
    spec = VOCABULARY[name].spec("bfloat16", head_dim, deterministic=deterministic)
    if not hopper:
        return rendered_module(spec)
    if reason := HopperBackwardSplit(backward_plan(lower(spec, name))).why_not:
        pytest.skip(f"no Gluon kernel: {reason}")
    return noted(rendered_module(spec, hopper=True))


@pytest.mark.parametrize("name", VOCABULARY)
def test_the_vocabulary(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = VOCABULARY[name]
    # All widths of the Gluon kernels' tiles, filled or not.
    for head_dim in (56, 128, 200) if form == "hopper" else (64,):
        spec = entry.spec("bfloat16", head_dim)
        if head_dim == 200 and HopperBackwardSplit(backward_plan(lower(spec, name))).why_not:
            continue  # what is learned of keys there, the portable kernels compute
        module = _rendered(name, head_dim, hopper=form == "hopper")
        for q_len, kv_len in ((150, 150), *(() if entry.equal_lengths else ((70, 210), (210, 70)))):
            case = entry.case(Case(q_len, kv_len, batch=2, q_heads=4, kv_heads=2))
            before = getattr(module, "runs", 0)
            poison()
            with nothing_is_zero_by_chance(monkeypatch):
                check_gradients(module, spec, case, device="cuda")
            assert getattr(module, "runs", 1) - before == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_tables_that_change_between_calls(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches are repeated; lists of tiles are each call's own."""
    table = Tensor("layout", ("num_q_heads", None, None), "bool")
    mask = block_sparse(table, 32) & causal(align="bottom_right")
    spec = AttentionSpec(64, mask=mask, deterministic=deterministic)
    module = noted(rendered_module(spec, hopper=True))
    generator = torch.Generator().manual_seed(0)
    for share in (0.4, 0.05, 1.0, 0.0, 0.4):
        layout = torch.rand(4, 38, 50, generator=generator) < share
        case = Case(1200, 1600, batch=2, q_heads=4, kv_heads=2, params={"layout": layout})
        before = module.runs
        poison()
        with nothing_is_zero_by_chance(monkeypatch):
            check_gradients(module, spec, case, device="cuda")
        assert module.runs - before == 1


@pytest.mark.parametrize("name", SPECS)
def test_the_same_bits_twice(name: str) -> None:
    spec = SPECS[name]
    case = Case(700, 700, batch=2, q_heads=8, kv_heads=2)
    params = case.arguments(spec, "cuda")
    results = []
    for _ in range(3):
        leaves = [x.clone().requires_grad_() for x in inputs(case, spec, native(spec), "cuda")]
        poison()
        out = backward_module_of(name, "portable").attention(*leaves, **params)
        results.append(torch.autograd.grad(out.float().square().sum(), leaves))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "name", ["relative_bias", "t5_bias_causal", "additive_bias", "additive_bias_of_keys"]
)
def test_learned_tensors_have_the_same_bits_twice(name: str) -> None:
    """Sums along diagonals, by key and of pairs: nobody adds to memory that others add to."""
    entry = VOCABULARY[name]
    spec = entry.spec("bfloat16", 64)
    case = entry.case(Case(700, 700, batch=2, q_heads=8, kv_heads=2))
    params = case.arguments(spec, "cuda")
    learned = [n for n, x in params.items() if isinstance(x, torch.Tensor)]
    results = []
    for _ in range(3):
        leaves = [x.clone().requires_grad_() for x in inputs(case, spec, native(spec), "cuda")]
        given = {n: params[n].clone().requires_grad_() for n in learned}
        poison()
        out = _rendered(name).attention(*leaves, **params | given)
        objective = out.float().square().sum()
        results.append(torch.autograd.grad(objective, (*leaves, *given.values())))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))

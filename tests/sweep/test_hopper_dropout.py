"""Dropout in the Gluon kernels, on the CPU: the weights that the portable kernels drop."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, causal, document, full
from flashgen.config import KernelConfig
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.kernels.forward_hopper.space import why_not
from flashgen.philox import kept
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from support.cases import Case, inputs
from support.gluon import interpreted
from support.turns import in_turns
from support.variants import rendered_module
from sweep.dropout import SPECS, case_of
from sweep.hopper import check_hopper, check_hopper_backward

P, SEED = 0.4, -123456789123456789
CONFIG = KernelConfig(128, 64, 8, 2)
CONFIGS = [
    KernelConfig(block_m, block_n, block_m // 16, 2)
    for block_m in (128, 192)
    for block_n in (64, 128)
]


def _of_16_bits(name: str) -> AttentionSpec:
    spec = SPECS[name]
    return replace(spec, dtype="bfloat16") if spec.dtype == "float32" else spec


@functools.cache
def _module(name: str, *, dropout: bool = True) -> ModuleType:
    spec = replace(_of_16_bits(name), dropout=dropout)
    return rendered_module(spec, hopper=True, edit_source=interpreted)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_same_is_kept_whatever_the_tiles(config: KernelConfig) -> None:
    """Of equal weights, with values that are a row of the identity each."""
    q_len, kv_len = 275, 64
    q, k = torch.zeros(2, 4, q_len, 64).bfloat16(), torch.zeros(2, 2, kv_len, 64).bfloat16()
    v = torch.eye(64).bfloat16().expand(2, 2, 64, 64).contiguous()
    seed = torch.tensor([SEED])
    out, lse = _module("full")._launch_hopper(q, k, v, 1.0, P, seed, config.as_dict())
    assert torch.equal(out != 0.0, kept((2, 4, q_len, kv_len), P, SEED))
    torch.testing.assert_close(lse, torch.full_like(lse, kv_len).log())  # of all weights


@pytest.mark.parametrize(("name", "dropout_p"), in_turns(SPECS, [0.02, 0.5, 0.97], every=3))
def test_values(name: str, dropout_p: float) -> None:
    """Against float64 with the oracle's numbers, over several tiles of queries and of keys."""
    spec = _of_16_bits(name)
    sizes = [(45, 45, 2, 4, 2), (300, 300, 1, 2, 1), (200, 330, 1, 2, 2)]
    if name == "learned":  # its table has distances up to 63
        sizes = [(45, 45, 2, 4, 2), (64, 64, 2, 2, 1)]
    for lengths in sizes[:2] if spec.equal_lengths else sizes:
        case = case_of(name, *lengths, dropout_p=dropout_p)
        check_hopper(_module(name), spec, case, CONFIG)


@pytest.mark.parametrize("name", ["segments", "softcap", "sinks", "sigmoid"])
def test_without_dropout_the_kernel_is_that_of_a_module_without_it(name: str) -> None:
    """dropout_p=0: the same bits."""
    case, config = Case(200, 200, 2, 4, 2), CONFIG.as_dict()
    tensors = inputs(case, _of_16_bits(name), getattr(torch, _of_16_bits(name).dtype))
    others = [torch.tensor([0.5, 1.0, -1.0, 0.0])] if name == "sinks" else []
    found = [
        _module(name, dropout=dropout)._launch_hopper(*tensors, 0.25, *others, *given, config)
        for dropout, given in ((True, (0.0, torch.tensor([5]))), (False, ()))
    ]
    for mine, right in zip(*found, strict=True):
        assert torch.equal(mine, right)


GRADIENTS = [
    name
    for name in SPECS
    if not HopperBackward(backward_plan(lower(_of_16_bits(name), name))).why_not
]


def test_whose_gradients_have_a_gluon_kernel() -> None:
    assert set(SPECS) == set(GRADIENTS)


@pytest.mark.parametrize(
    ("name", "dropout_p"), in_turns(GRADIENTS, [0.0, 0.02, 0.5, 0.97], every=4)
)
def test_gradients(name: str, dropout_p: float) -> None:
    """By autograd, against float64 with the oracle's numbers."""
    spec = _of_16_bits(name)
    sizes = [(45, 45, 2, 4, 2), (300, 300, 1, 2, 1), (200, 330, 1, 2, 2)]
    if name == "learned":  # its table has distances up to 63
        sizes = [(45, 45, 2, 4, 2), (64, 64, 2, 2, 1)]
    for lengths in sizes[:2] if spec.equal_lengths else sizes:
        case = case_of(name, *lengths, dropout_p=dropout_p)
        check_hopper_backward(_module(name), spec, case)


#: Where two kernels split the pass: with roles, and without.
SPLIT = {"wide": {"head_dim": 192}, "same_bits": {"deterministic": True}}


@pytest.mark.parametrize(("name", "form"), in_turns(GRADIENTS, SPLIT, every=3))
def test_gradients_of_two_kernels(name: str, form: str) -> None:
    spec = replace(_of_16_bits(name), **SPLIT[form])
    names = HopperBackward(backward_plan(lower(spec, name)))
    refused = (name, form) == ("softcap", "wide")
    assert names.split and bool(names.why_not) == refused
    if refused:
        return
    module = rendered_module(spec, hopper=True, edit_source=interpreted)
    for lengths, dropout_p in (((45, 45, 2, 4, 2), 0.5), ((160, 160, 1, 2, 1), 0.2)):
        if name == "learned":  # its table has distances up to 63
            lengths = tuple(min(x, 64) for x in lengths)
        check_hopper_backward(module, spec, case_of(name, *lengths, dropout_p=dropout_p))


@pytest.mark.full
def test_gradients_of_wider_heads_and_of_documents() -> None:
    """Tiles of 64 queries; and tiles of keys that start at multiples of 128 all the same."""
    for spec in (
        AttentionSpec(128, "float16", causal(), dropout=True),
        AttentionSpec(128, "bfloat16", full(), dropout=True),
        AttentionSpec(64, "bfloat16", document() & causal(), dropout=True),
    ):
        module = rendered_module(spec, hopper=True, edit_source=interpreted)
        for case in (Case(150, 150, 2, 4, 2), Case(333, 333, 1, 2, 1)):
            check_hopper_backward(module, spec, case)


def test_without_dropout_gradients_are_those_of_a_module_without_it() -> None:
    """dropout_p=0: the same bits, but for those of q, which are added up in any order."""
    spec, case = _of_16_bits("segments"), Case(200, 200, 2, 4, 2)
    found = []
    for dropout, given in ((True, {"dropout_p": 0.0}), (False, {})):
        leaves = [x.clone().requires_grad_() for x in inputs(case, spec, torch.float16)]
        out = _module("segments", dropout=dropout).attention(*leaves, **given)
        found.append(torch.autograd.grad(out.float().square().sum(), leaves[1:]))
    for mine, right in zip(*found, strict=True):
        assert torch.equal(mine, right)


def test_tiles_that_start_anywhere_have_no_such_numbers() -> None:
    """Those of documents start with them, where words of one call are not together."""
    plan = lower(AttentionSpec(64, mask=document() & causal(), dropout=True), "documents")
    assert why_not(plan) == "with dropout, tiles start at multiples of 16, not at segments"

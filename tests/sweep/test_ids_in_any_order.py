"""Ids that were promised to be sorted and are not: all kernels, by the mask as it was written."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, Mask, Tensor, block_sparse, causal, document, sink_tokens
from flashgen.config import KernelConfig
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from flashgen.plan import lower
from support.cases import Case
from support.gluon import interpreted
from support.turns import in_turns
from support.variants import rendered_module
from sweep.backward import check_backward
from sweep.hopper import check_hopper, check_hopper_backward
from sweep.launch import check_kernel

LENGTH = 300


def _packed(*runs: tuple[int, int]) -> torch.Tensor:
    """Ids, each so many times, one behind the other."""
    return torch.tensor([i for i, count in runs for _ in range(count)], dtype=torch.int32)


_DRAWN = torch.randint(0, 5, (LENGTH,), generator=torch.Generator().manual_seed(0))

#: By whether kernels can go by their order all the same: each id is one run, and they ascend from
#: the first one on, past the greatest to the least.
IN_ORDER = {
    "sorted": _packed((1, 100), (2, 120), (3, 80)),
    "padding_of_0": _packed((1, 100), (2, 120), (0, 80)),
    "padding_of_minus_1": _packed((1, 100), (2, 120), (-1, 80)),
    "two_that_fall": _packed((2, 150), (1, 150)),
    "ends": _packed((2**31 - 1, 100), (-(2**31), 120), (5, 80)),
}
IN_NONE = {
    "three_that_fall": _packed((3, 100), (2, 120), (1, 80)),
    "padding_on_both_sides": _packed((-1, 40), (1, 100), (2, 120), (-1, 40)),
    "two_runs_of_an_id": _packed((1, 100), (2, 120), (1, 80)),
    "alternating": _packed(*[(1, 7), (2, 5)] * 25),
    "drawn": _DRAWN.int(),
    "last_out_of_order": _packed((1, 100), (2, 199), (1, 1)),
}
IDS = IN_ORDER | IN_NONE

ids = Tensor("ids", ("kv_len",), "int32", sorted=True)
_entries = Tensor("document_ids", ("batch", "kv_len"), "int32", sorted=True)
_q_ids = Tensor("q_ids", ("batch", "q_len"), "int32", sorted=True)


def _not_below(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return ids[kv_idx] >= ids[q_idx]


def _from_start(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return kv_idx >= ids[q_idx]


#: Every way in which a mask can trust an order.
MASKS = {
    "causal": document(_entries) & causal(),
    "both_sides": document(_entries),
    "all_alike": document(ids) & causal(),
    "others": ~document(ids),
    "others_before": ~document(ids) & causal(),
    "or_the_first": document(ids) | sink_tokens(5),
    "of_two_tensors": document(_q_ids, _entries),
    "compared": Mask(_not_below, "not_below", equal_lengths=True),
    "as_a_limit": Mask(_from_start, "from_start", equal_lengths=True),
    "listed": document(_entries) & block_sparse(block=64),
}

#: Those of them whose gradients have Gluon kernels that ask for nothing more than others.
IN_GLUON = ("causal", "both_sides", "all_alike", "others", "others_before", "of_two_tensors")


def _case(spec: AttentionSpec, name: str, **of_case: int) -> Case:
    """A call with these ids in all of the mask's tensors; of two entries the second is sorted."""
    found, batch = IDS[name], of_case.get("batch", 1)
    entries = torch.stack([found, found.sort().values][:batch])
    params = {
        p.name: entries if len(p.dims) == 2 else found for p in spec.params if p.name != "layout"
    }
    return Case(LENGTH, LENGTH, params=params, **of_case)


@functools.cache
def _spec(mask: str) -> AttentionSpec:
    return AttentionSpec(64, "float16", MASKS[mask])


@functools.cache
def _module(mask: str, *, gluon: bool = False) -> ModuleType:
    return rendered_module(_spec(mask), hopper=gluon, edit_source=interpreted if gluon else str)


@functools.cache
def _config(mask: str) -> KernelConfig:
    plan = lower(_spec(mask), mask)
    return rank_hopper(plan, hopper_space(plan).candidates)[0]


@pytest.mark.parametrize(("mask", "name"), in_turns(MASKS, list(IDS), every=4))
def test_forward(mask: str, name: str) -> None:
    check_kernel(_module(mask), _spec(mask), _case(_spec(mask), name))


@pytest.mark.parametrize(("mask", "name"), in_turns(MASKS, list(IDS), every=5))
def test_backward(mask: str, name: str) -> None:
    case = _case(_spec(mask), name)
    check_backward(_module(mask), _spec(mask), case, BLOCK_M=64, BLOCK_N=32)


@pytest.mark.parametrize(("mask", "name"), in_turns(MASKS, list(IDS), every=4))
def test_forward_in_gluon(mask: str, name: str) -> None:
    case = _case(_spec(mask), name, batch=2)
    check_hopper(_module(mask, gluon=True), _spec(mask), case, _config(mask))


@pytest.mark.parametrize(("mask", "name"), in_turns(IN_GLUON, list(IDS), every=4))
def test_backward_in_gluon(mask: str, name: str) -> None:
    case = _case(_spec(mask), name, batch=2, q_heads=2, kv_heads=1)
    check_hopper_backward(_module(mask, gluon=True), _spec(mask), case)


def test_padding_sees_nothing_behind_it() -> None:
    """Rows of -1 see all keys here, and not what holds where a row's own document begins."""
    mask = "others_before"
    case = _case(_spec(mask), "padding_of_minus_1", q_heads=2, kv_heads=1)
    check_kernel(_module(mask), _spec(mask), case)
    check_backward(_module(mask), _spec(mask), case, BLOCK_M=64, BLOCK_N=32)
    gluon = _module(mask, gluon=True)
    check_hopper(gluon, _spec(mask), case, _config(mask))
    check_hopper_backward(gluon, _spec(mask), case)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("some_begin = tl.where(unordered, 0, some_begin)", "pass"),
        ("some_end = tl.where(unordered, kv_len, some_end)", "pass"),
        ("all_end = tl.where(unordered, 0, all_end)", "pass"),
        ("            if unordered:", "            if False:"),
        ("falls |= following < _rank(", "falls |= following < 0 * _rank("),
    ],
)
def test_wrong_source_is_caught(right: str, wrong: str) -> None:
    def edit(source: str) -> str:
        assert right in source, "it no longer reads so: bring this test up to date"
        return source.replace(right, wrong)

    spec = _spec("both_sides")
    module = rendered_module(spec, edit_source=edit)
    with pytest.raises(AssertionError):
        for name in ("two_runs_of_an_id", "three_that_fall"):
            check_kernel(module, spec, _case(spec, name))

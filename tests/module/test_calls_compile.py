"""Each kernel that a call launches is one that Triton's compiler takes.

The interpreter runs more: a variable of a loop that was a number before it, for one. Here calls
launch on a GPU that notes alone, forward and backward, and Triton's front end sees each kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from triton.compiler import CompilationError

from flashgen import (
    AttentionSpec,
    Tensor,
    block_sparse,
    causal,
    chosen_blocks,
    document,
    elu_plus_one,
    favor,
    full,
    identity,
    linear,
    prefix_lm,
    softmax_features,
)
from support.cached import CacheCall, cached
from support.fake_gpu import fake_gpu, module_on, to_ir_alone
from support.slip import with_slip

pytestmark = pytest.mark.versions

BOTH = ("dense", "varlen")
TOKENS, HEADS, KV_HEADS, DIM = 200, 4, 2, 64
IMAGES = Tensor("images", ("batch", "kv_len"), "int32")
DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
BY_FEATURE = Tensor("decay", ("batch", "num_kv_heads", "kv_len", DIM))


def islands(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Causal text with pictures, whose parts see each other."""
    same = (IMAGES[b, q_idx] == IMAGES[b, kv_idx]) & (IMAGES[b, q_idx] > 0)
    return (q_idx >= kv_idx) | same


@dataclass(frozen=True)
class Case:
    """A spec, and what a call of it takes besides q, k and v.

    Attributes:
        spec: the spec.
        given: sizes of float32 tensors, and of int32 ones, by name.
        ids: the same of int32 tensors.
        state: sizes of the first state's tensors; with them, the last one is returned.
        matrix: the size of a matrix of random features.
    """

    spec: AttentionSpec
    given: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    state: tuple[tuple[int, ...], ...] = ()
    matrix: tuple[int, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether sequences are packed."""
        return self.spec.has_form("varlen")


CAUSAL = causal()


def _linear(*args: Any, packed: bool = False, mask: Any = CAUSAL, **kwargs: Any) -> AttentionSpec:
    forms = BOTH if packed else BOTH[:1]
    return AttentionSpec(DIM, mask=mask, normaliser=linear(*args, **kwargs), forms=forms)


def _chosen(query_block: int) -> Case:
    mask = chosen_blocks(query_block=query_block) & causal()
    return Case(
        AttentionSpec(DIM, mask=mask),
        ids={"chosen": (1, KV_HEADS, -(-TOKENS // query_block), 2)},
    )


STATE = (2, KV_HEADS, DIM, DIM)
CASES = {
    "packed decays": Case(
        _linear(identity(), decay=DECAY, normalise=False, packed=True),
        {"decay": (KV_HEADS, TOKENS)},
        state=(STATE,),
    ),
    "packed normalised decays": Case(
        _linear(elu_plus_one(), decay=DECAY, packed=True),
        {"decay": (KV_HEADS, TOKENS)},
        state=(STATE, STATE[:-1]),
    ),
    "packed vectors": Case(
        _linear(softmax_features(), decay=DECAY, packed=True), {"decay": (KV_HEADS, TOKENS)}
    ),
    "packed full": Case(_linear(elu_plus_one(), mask=full(), packed=True)),
    "decays of features": Case(
        _linear(elu_plus_one(), decay=BY_FEATURE), {"decay": (1, KV_HEADS, TOKENS, DIM)}
    ),
    "random features": Case(
        _linear(favor(64), decay=DECAY), {"decay": (1, KV_HEADS, TOKENS)}, matrix=(64, DIM)
    ),
    "linear documents": Case(
        _linear(identity(), decay=DECAY, normalise=False, mask=CAUSAL & document()),
        {"decay": (1, KV_HEADS, TOKENS)},
        {"document_ids": (1, TOKENS)},
    ),
    "pairs": Case(
        _linear(elu_plus_one(), decay=DECAY, mask=CAUSAL & islands),
        {"decay": (1, KV_HEADS, TOKENS)},
        {"images": (1, TOKENS)},
    ),
    "random features of pairs": Case(_linear(favor(64), mask=prefix_lm(9)), matrix=(64, DIM)),
    "vectors of pairs": Case(_linear(softmax_features(), mask=prefix_lm(9))),
    "islands": Case(AttentionSpec(DIM, mask=islands), ids={"images": (1, TOKENS)}),
    "packed islands": Case(AttentionSpec(DIM, mask=islands, forms=BOTH), ids={"images": (TOKENS,)}),
    "lists of each query": _chosen(1),
    "lists of blocks of queries": _chosen(64),
}
#: Those with Gluon kernels besides the portable ones.
WITH_GLUON = [name for name, case in CASES.items() if case.spec.normaliser.kind != "linear"]


#: Caches whose tiles of keys are decided: of ids, where heads differ, and by tables of blocks; with
#: one query of a sequence and with several, in rows and in pages, packed and not.
KEPT = Tensor("seen", ("num_q_heads", "kv_len"), "bool")
CACHES = {
    "cached islands": islands,
    "cached heads": lambda b, h, q_idx, kv_idx: KEPT[h, kv_idx] & (kv_idx <= q_idx),
    "cached documents": document() & CAUSAL,
    "cached blocks": block_sparse() & CAUSAL,
}


class Calls:
    """Calls on a GPU that notes alone.

    Attributes:
        translated: the names of the kernels that Triton has translated.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gpu, self._patch = fake_gpu(monkeypatch), monkeypatch
        self.translated = to_ir_alone(monkeypatch)

    def both_passes(
        self, case: Case, *, gluon: bool, edit_source: Callable[[str], str] = lambda x: x
    ) -> None:
        """Launches the kernels of a call, and of its gradients."""
        module = module_on(self._gpu, case.spec, self._patch, edit_source=edit_source)
        if case.spec.normaliser.kind != "linear":
            self._patch.setattr(module, "_is_hopper", lambda device: gluon)
        lead = (TOKENS,) if case.is_packed else (1,)
        behind = (DIM,) if case.is_packed else (TOKENS, DIM)
        qkv = [
            torch.zeros(*lead, heads, *behind, dtype=torch.bfloat16, requires_grad=True)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        sizes = [case.matrix] if case.matrix else []
        args: list[Any] = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
        floats = {x: torch.zeros(size, requires_grad=True) for x, size in case.given.items()}
        params: dict[str, Any] = floats | {
            x: torch.zeros(size, dtype=torch.int32) for x, size in case.ids.items()
        }
        if case.state:
            state = tuple(torch.zeros(size) for size in case.state)
            params |= {"initial_state": state if len(state) > 1 else state[0]}
            params |= {"return_state": True}
        attend = module.attention
        if case.is_packed:
            ends = torch.tensor([0, 50, TOKENS], dtype=torch.int32)
            attend, args = module.varlen_attention, [*args, ends, ends, TOKENS, TOKENS]
        found = tree_leaves(attend(*qkv, *args, **params))
        torch.autograd.grad(sum(x.float().sum() for x in found), (*qkv, *floats.values()))

    def of_cache(
        self,
        mask: Any,
        call: CacheCall,
        *,
        edit_source: Callable[[str], str] = lambda x: x,
    ) -> None:
        """Launches the kernels of a step."""
        spec = AttentionSpec(DIM, mask=mask, align="bottom_right", forms=("dense", "cache"))
        module = module_on(self._gpu, spec, self._patch, edit_source=edit_source)
        self._patch.setattr(module, "_is_hopper", lambda device: False)
        with torch.no_grad():
            module.cache_attention(**cached(call, spec, torch.bfloat16).arguments)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    yield Calls(monkeypatch)


@pytest.mark.parametrize(
    ("name", "gluon"), [*((name, False) for name in CASES), *((name, True) for name in WITH_GLUON)]
)
def test_kernels_of_calls_are_translated(name: str, gluon: bool, calls: Calls) -> None:
    calls.both_passes(CASES[name], gluon=gluon)
    assert len(calls.translated) > 4


@pytest.mark.parametrize("name", CACHES)
def test_kernels_of_caches_are_translated(name: str, calls: Calls) -> None:
    calls.of_cache(CACHES[name], CacheCall((200, 9), 1, heads=8))
    calls.of_cache(CACHES[name], CacheCall((200, 49), (30, 0), heads=8, page_size=16))
    assert calls.translated == ["_decide_cache_tiles", "_cache_attention"] * 2


def test_a_vector_of_another_length_in_a_loop_is_found(calls: Calls) -> None:
    """Of the rows of a unit, and of those that are looked at together."""
    slip = with_slip("            row_here = tl", "            row = row_here = tl")
    slip_before = with_slip("    num_visits =", "    row = tl.arange(0, BLOCK_M)\n    num_visits =")
    with pytest.raises(CompilationError, match="row"):
        calls.of_cache(
            CACHES["cached heads"],
            CacheCall((200, 9), 1, heads=8),
            edit_source=lambda source: slip(slip_before(source)),
        )


def test_what_the_interpreter_alone_accepts_is_found(calls: Calls) -> None:
    """A number outside of a loop that is a vector in it."""
    slip = with_slip("    count = 0\n", "    count = row = 0\n")
    with pytest.raises(CompilationError, match="row"):
        calls.both_passes(CASES["packed islands"], gluon=False, edit_source=slip)

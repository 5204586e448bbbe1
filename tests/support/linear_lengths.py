"""Linear attention of packed sequences that are broken, empty, NaN or go on: calls and checks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec, Tensor, causal, elu_plus_one, full, identity, linear
from support.linear_packed import offsets

FORMS = ("dense", "varlen")
DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
SPECS = {
    "decays": AttentionSpec(
        16, "float32", mask=causal(), normaliser=linear(elu_plus_one(), decay=DECAY), forms=FORMS
    ),
    "plain": AttentionSpec(
        16,
        "float32",
        mask=causal(),
        normaliser=linear(identity(), decay=DECAY, normalise=False),
        forms=FORMS,
    ),
    "all": AttentionSpec(
        16, "float32", mask=full(), normaliser=linear(elu_plus_one()), forms=FORMS
    ),
}
LENS = (20, 0, 9, 1)
CU = offsets(LENS)
TOTAL = sum(LENS) + 3


def drawn(name: str = "decays", total: int = TOTAL, heads: int = 2) -> dict[str, Any]:
    """q, k, v, a decay and the lengths of a call."""
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {
        x: torch.randn(total, n, 16, generator=generator)
        for x, n in (("q", heads), ("k", 1), ("v", 1))
    }
    if name != "all":
        given["decay"] = torch.log(torch.rand(1, total, generator=generator))
    return given | {"cu_seqlens_q": CU, "cu_seqlens_kv": CU, "max_q_len": 20, "max_kv_len": 20}


def states(name: str, num_sequences: int = len(LENS)) -> Any:
    """A first state of each sequence."""
    kv, z = torch.randn(num_sequences, 1, 16, 16), torch.rand(num_sequences, 1, 16) + 1.0
    return (kv, z) if name == "decays" else kv


def parts(state: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a state."""
    return state if isinstance(state, tuple) else (state,)


def check_broken(module: ModuleType, name: str) -> None:
    """Offsets that fall, a sequence that is longer than allowed, and their gradients and states."""
    given = drawn(name)
    with_states = {} if name == "all" else {"return_state": True, "initial_state": states(name)}
    right = module.varlen_attention(**given, **with_states)
    falls = torch.tensor([0, 20, 5, 29, 30], dtype=torch.int32)
    for change, broken, rows in (
        ({"cu_seqlens_q": falls, "cu_seqlens_kv": falls}, (1, 2), slice(20, 29)),
        ({"max_q_len": 10}, (0,), slice(0, 20)),
        ({"max_kv_len": 10}, (0,), slice(0, 20)),
    ):
        leaves = {
            x: given[x].clone().requires_grad_() for x in ("q", "k", "v", "decay") if x in given
        }
        got = module.varlen_attention(**{**given, **change, **leaves}, **with_states)
        out, right_out = (x if name == "all" else x[0] for x in (got, right))
        others = torch.ones(TOTAL, dtype=torch.bool)
        others[rows] = False
        assert out[rows].isnan().all()
        torch.testing.assert_close(out[others], right_out[others])
        if name != "all":
            for mine, good in zip(parts(got[1]), parts(right[1]), strict=True):
                kept = [n for n in range(len(LENS)) if n not in broken]
                assert mine[list(broken)].isnan().all()
                torch.testing.assert_close(mine[kept], good[kept])
        grads = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
        assert all(x.movedim(1, 0)[others].isfinite().all() if x.dim() == 2 else
                   x[others].isfinite().all() for x in grads)  # fmt: skip
        assert grads[0][rows].isnan().all()


def check_nan(module: ModuleType) -> None:
    """NaN of a sequence stays in it, also in states of segments: it is in several."""
    given = drawn(total=200)
    given |= {"cu_seqlens_q": (cu := offsets((90, 40, 70))), "cu_seqlens_kv": cu}
    given |= {"max_q_len": 90, "max_kv_len": 90}
    right, good = module.varlen_attention(**given, return_state=True)
    given["v"][50] = torch.nan
    leaves = {x: given[x].requires_grad_() for x in ("q", "k", "v", "decay")}
    out, last = module.varlen_attention(**given, return_state=True)
    torch.testing.assert_close(out[90:], right[90:], rtol=0, atol=0)
    torch.testing.assert_close([x[1:] for x in last], [x[1:] for x in good], rtol=0, atol=0)
    assert out[50:90].isnan().all() and last[0][0].isnan().any()
    *grads, of_decay = torch.autograd.grad(out[90:].sum(), list(leaves.values()))
    assert all(x[90:].isfinite().all() for x in grads) and of_decay[:, 90:].isfinite().all()


def check_steps(module: ModuleType, name: str) -> None:
    """`step` goes on from the states that a call of packed sequences returns."""
    given = drawn(name)
    ends = (CU[1:] - 1).long()
    ends = ends[torch.tensor(LENS) > 0]
    whole, last = module.varlen_attention(**given, return_state=True)
    before = torch.ones(TOTAL, dtype=torch.bool)
    before[ends] = False
    some = {x: y[:, before] if x == "decay" else y[before]
            for x, y in given.items() if x in ("q", "k", "v", "decay")}  # fmt: skip
    cu = offsets([max(n - 1, 0) for n in LENS])
    some |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_q_len": 20, "max_kv_len": 20}
    _, state = module.varlen_attention(**some, return_state=True)
    kept = torch.tensor(LENS) > 0
    state = tuple(x[kept] for x in parts(state))
    rows = [given[x][ends][:, :, None] for x in ("q", "k", "v")]
    out, after = module.step(
        *rows, state if name == "decays" else state[0], decay=given["decay"][:, ends].mT[:, :, None]
    )
    torch.testing.assert_close(out[:, :, 0], whole[ends])
    torch.testing.assert_close(parts(after), tuple(x[kept] for x in parts(last)))


def check_nothing(module: ModuleType) -> None:
    """No sequence has no results, and sequences without tokens have their first states."""
    given = drawn()
    none = {"cu_seqlens_q": (cu := CU[:1]), "cu_seqlens_kv": cu}
    given["q"].requires_grad_()
    out, lse, state = module.varlen_attention(**(given | none), return_lse=True, return_state=True)
    assert not out.any() and (lse == -torch.inf).all() and state[0].shape == (0, 1, 16, 16)
    out.sum().backward()
    assert not given["q"].grad.any()
    empty = drawn(total=0) | {"cu_seqlens_q": (cu := offsets((0, 0))), "cu_seqlens_kv": cu}
    first = states("decays", 2)
    out, state = module.varlen_attention(**empty, initial_state=first, return_state=True)
    assert out.shape == (0, 2, 16)
    torch.testing.assert_close(state, first, rtol=0, atol=0)

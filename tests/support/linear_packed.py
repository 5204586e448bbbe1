"""Packed sequences in linear attention: calls, held to the recurrence of each sequence alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec
from support.oracle import error_and_bound
from support.recurrence import (
    LinearCall,
    drawn_inputs,
    is_causal,
    quadratic,
    recurrence,
    room_on,
)


@dataclass(frozen=True)
class PackedCall:
    """One call.

    Attributes:
        q_lens: the queries of each sequence.
        kv_lens: its keys; None: as many.
        room: keys of each sequence that a call's kv_lens leave out; None: kv_lens are not given.
        q_heads, kv_heads, states, steep: as of a `LinearCall`.
        padding: tokens behind the last sequence, which are NaN, as their outputs' gradients are.
        strided: whether rows of tensors lie among those of other heads.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...] | None = None
    room: tuple[int, ...] | None = None
    q_heads: int = 2
    kv_heads: int = 1
    states: bool = False
    steep: bool = False
    padding: int = 3
    strided: bool = False

    @property
    def keys(self) -> tuple[int, ...]:
        """The keys of each sequence."""
        return self.q_lens if self.kv_lens is None else self.kv_lens


#: Of each tensor, the axis of a sequence's tokens in a call of one sequence; None for states.
TOKENS = {"q": 2, "k": 2, "v": 2, "decay": 2, "out": 2, "lse": 2}


def offsets(lens: Any) -> torch.Tensor:
    """The first token of each sequence, and the end of the last."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32)


def check_packed(
    module: ModuleType, spec: AttentionSpec, call: PackedCall, device: str = "cpu"
) -> None:
    """Fails unless results and gradients are as near to float64 as torch's, twice over.

    Also unless those of the padding are 0, and those of keys that kv_lens leave out.
    """
    alone = [_drawn(spec, call, n) for n in range(len(call.q_lens))]
    names = list(_drawn(spec, call, 0))
    tensors = {name: _packed([x[name] for x in alone], name, call) for name in names}
    leaves = {name: x.to(device).requires_grad_() for name, x in tensors.items()}
    sums = spec.normaliser.normalise
    has_lse = sums and spec.normaliser.feature_map.never_negative
    rooms = call.room or (0,) * len(call.keys)
    in_room = [a + b for a, b in zip(call.keys, rooms, strict=True)]
    cu_seqlens_q = offsets(call.q_lens).to(device)
    same = call.kv_lens is None and call.room is None
    cu_seqlens_kv = cu_seqlens_q if same else offsets(in_room).to(device)
    options: dict[str, Any] = {"return_lse": has_lse}
    if call.room is not None:
        options["kv_lens"] = torch.tensor(call.keys, dtype=torch.int32, device=device)
    if "decay" in leaves:
        options["decay"] = leaves["decay"]
    if call.states:
        options["initial_state"] = (leaves["kv"], leaves["z"]) if sums else leaves["kv"]
        options["return_state"] = True
    largest = (max(call.q_lens), max(in_room))
    got = module.varlen_attention(
        leaves["q"], leaves["k"], leaves["v"], cu_seqlens_q, cu_seqlens_kv, *largest, **options
    )
    results = list(got) if isinstance(got, tuple) else [got]
    of = ["out"] + ["lse"] * has_lse
    if call.states:
        last = results.pop()
        results += last if sums else [last]
        of += ["last kv"] + ["last z"] * sums
    generator = torch.Generator().manual_seed(1)
    rights, roughs, grads = _expected(spec, call, alone, of, generator)
    packed_grads = [_packed(x, name, call) for x, name in zip(grads, of, strict=True)]
    if has_lse and call.padding:
        packed_grads[1][-call.padding :] = 0.0  # of -inf there is no gradient
    packed_grads = [x.to(device) for x in packed_grads]
    mine = (*results, *torch.autograd.grad(results, list(leaves.values()), packed_grads))
    all_names = [*of, *(f"gradient of {name}" for name in names)]
    for name, x, right, rough in zip(all_names, mine, rights, roughs, strict=True):
        _compare(name, x.detach().cpu(), right, rough, call, room_on(device))


def _compare(name: str, x: Any, rights: Any, roughs: Any, call: PackedCall, room: float) -> None:
    tensor = name.removeprefix("gradient of ")
    right, rough = (_packed(parts, tensor, call, behind=0.0) for parts in (rights, roughs))
    assert x.shape == right.shape, f"{name}: {tuple(x.shape)}, not {tuple(right.shape)}"
    if name == "lse":  # -inf of a query that sees no key
        none = right.isinf() | (right == 0.0)
        assert x[none].isinf().all(), f"{name}: error of what has no key"
        x, right, rough = (y.masked_fill(none, 0.0) for y in (x, right, rough))
    elif tensor in TOKENS:
        outside = _packed([torch.ones_like(y) for y in rights], tensor, call, behind=0.0) == 0.0
        assert not x[outside].any(), f"{name}: error of what belongs to no sequence"
    # Gradients of decays are differences of sums over a sequence.
    size = 0.0
    if name == "gradient of decay":
        size = max((y.abs().sum(-1).max().item() for y in rights if y.numel()), default=0.0)
    error, allowed = error_and_bound(x, right, rough, size)
    allowed *= room
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _drawn(spec: AttentionSpec, call: PackedCall, n: int) -> dict[str, torch.Tensor]:
    one = LinearCall(
        call.q_lens[n],
        call.keys[n],
        q_heads=call.q_heads,
        kv_heads=call.kv_heads,
        states=call.states,
        steep=call.steep,
    )
    return drawn_inputs(spec, one, seed=n)


def _packed(parts: Any, name: str, call: PackedCall, behind: float = torch.nan) -> torch.Tensor:
    """What calls of one sequence each have, as a call of all of them has it."""
    if name not in TOKENS:
        return torch.cat(list(parts))
    of_queries = name in ("q", "out", "lse")
    rooms = (0,) * len(parts) if of_queries or call.room is None else call.room
    filled = []
    for x, room in zip(parts, rooms, strict=True):
        filled += [x, x.new_full((1, x.shape[1], room, *x.shape[3:]), behind)]
    filled.append(x.new_full((1, x.shape[1], call.padding, *x.shape[3:]), behind))
    whole = torch.cat(filled, 2)[0]
    if name == "decay":
        return whole
    whole = whole.transpose(0, 1)
    return whole if call.strided else whole.contiguous()


def _expected(
    spec: AttentionSpec, call: PackedCall, alone: Any, of: Any, generator: torch.Generator
) -> tuple[Any, Any, Any]:
    """(exact, rough) results and gradients by name, each a list over sequences; the gradients."""
    exact, rough, given = [], [], []
    for tensors in alone:
        shapes = _shapes(spec, tensors)
        grads = [torch.randn(shapes[name], generator=generator) for name in of]
        grads[0] = grads[0].to(tensors["q"].dtype)
        exact.append(_with_gradients(recurrence, spec, tensors, of, grads, torch.float64))
        rough.append(_with_gradients(quadratic, spec, tensors, of, grads, None))
        given.append(grads)
    return tuple([list(x) for x in zip(*y, strict=True)] for y in (exact, rough, given))


def _shapes(spec: AttentionSpec, tensors: Any) -> dict[str, tuple[int, ...]]:
    (_, heads, q_len, dim), v = tensors["q"].shape, tensors["v"]
    features = spec.normaliser.feature_map.num_features(dim)
    of_state = (1, v.shape[1], features)
    return {
        "out": (1, heads, q_len, v.shape[3]),
        "lse": (1, heads, q_len),
        "last kv": (*of_state, v.shape[3]),
        "last z": of_state,
    }


def _with_gradients(run: Any, spec: AttentionSpec, tensors: Any, of: Any, grads: Any, dtype: Any):
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in tensors.items()}
    if leaves["k"].shape[2] == 0 or leaves["q"].shape[2] == 0:
        found = _of_nothing(spec, leaves)
    else:
        out, sums, kv, z = run(spec, **leaves)
        lse = torch.log(torch.where(sums > 0.0, sums, 1.0) * spec.qk_head_dim**-0.5)
        lse = torch.where(sums > 0.0, lse, -torch.inf)
        found = {"out": out, "lse": lse, "last kv": kv, "last z": z}
    results = [found[name] for name in of]
    taken = [(x, g.to(x.dtype)) for x, g in zip(results, grads, strict=True) if x.requires_grad]
    options = {"materialize_grads": True, "allow_unused": True}
    back = [torch.zeros_like(x) for x in leaves.values()]
    if taken:
        outputs, given = zip(*taken, strict=True)
        back = torch.autograd.grad(outputs, list(leaves.values()), given, **options)
    return (*(x.detach() for x in results), *back)


def _of_nothing(spec: AttentionSpec, leaves: Any) -> dict[str, torch.Tensor]:
    """The results of a sequence without queries or keys: the state is that of before."""
    assert not is_causal(spec) or leaves["q"].shape[2] == 0
    shapes, zeros = _shapes(spec, leaves), leaves["q"].new_zeros
    found = {name: zeros(shape) for name, shape in shapes.items()}
    found["lse"] = found["lse"] - torch.inf
    return found | {f"last {name}": leaves[name] for name in ("kv", "z") if name in leaves}

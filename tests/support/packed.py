"""Packed sequences: calls of `varlen_attention`, held to float64 a sequence at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec, Tensor
from flashgen.forms.varlen import PackedTensor, packed_tensor
from support.cases import Case, inputs
from support.gradients import Tensors, exact_gradients, rough_gradients
from support.oracle import check, error_and_bound


@dataclass(frozen=True)
class Packing:
    """One call.

    Attributes:
        q_lens: the queries of each sequence.
        kv_lens: its keys; None: as many.
        room: keys of each sequence that `kv_lens` leaves out.
        padding: tokens behind the last sequence.
        case: heads and parameters; its lengths say nothing.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...] | None = None
    room: tuple[int, ...] | None = None
    padding: int = 3
    case: Case = field(default_factory=lambda: Case(0, 0, q_heads=2, kv_heads=1))

    def __str__(self) -> str:
        words = ["q" + "_".join(map(str, self.q_lens))]
        words += ["kv" + "_".join(map(str, self.kv_lens))] if self.kv_lens is not None else []
        words += ["room" + "_".join(map(str, self.room))] if self.room is not None else []
        return "-".join(words)

    @property
    def keys(self) -> tuple[int, ...]:
        """The keys of each sequence."""
        return self.q_lens if self.kv_lens is None else self.kv_lens

    @property
    def rooms(self) -> tuple[int, ...]:
        """What each takes of the keys' tensor."""
        extra = self.room or (0,) * len(self.keys)
        return tuple(a + b for a, b in zip(self.keys, extra, strict=True))

    def cases(self) -> Iterator[Case]:
        """Each sequence as a call of its own."""
        for q_len, kv_len in zip(self.q_lens, self.keys, strict=True):
            yield replace(self.case, q_len=q_len, kv_len=kv_len)


@dataclass(frozen=True)
class Packed:
    """The arguments of a call, and those of each sequence alone.

    Attributes:
        qkv: the packed tensors; what belongs to no sequence is NaN.
        lengths: offsets, largest lengths and kv_lens, as `varlen_attention` takes them.
        params: declared parameters by name.
        alone: of each sequence (q, k, v) and parameters, as `attention` takes them.
    """

    qkv: Tensors
    lengths: dict[str, Any]
    params: dict[str, Any]
    alone: list[tuple[Tensors, dict[str, Any]]]


def packed(
    spec: AttentionSpec, packing: Packing, dtype: torch.dtype, device: str = "cpu"
) -> Packed:
    """Random tensors, the same for the same call and dtype."""
    alone: list[Tensors] = [inputs(case, spec, dtype, device) for case in packing.cases()]
    case = packing.case
    sizes = (packing.q_lens, packing.rooms, packing.rooms)
    heads = (case.q_heads, case.kv_heads, case.kv_heads)
    dims = (spec.qk_head_dim, spec.qk_head_dim, spec.v_head_dim)
    qkv = []
    for of, (lens, count, dim) in enumerate(zip(sizes, heads, dims, strict=True)):
        whole = torch.full((sum(lens) + packing.padding, count, dim), torch.nan, dtype=dtype)
        whole = whole.to(device)
        at = 0
        for length, tensors in zip(lens, alone, strict=True):
            x = tensors[of][0].transpose(0, 1)
            whole[at : at + len(x)] = x
            at += length
        qkv.append(whole)
    largest = max(packing.q_lens, default=0), max(packing.keys, default=0)
    params, views = _params(spec, packing, largest, device)
    cu_q = offsets(packing.q_lens, device)
    same = packing.kv_lens is None and packing.room is None
    lengths = {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_q if same else offsets(packing.rooms, device),
        "max_q_len": largest[0],
        "max_kv_len": largest[1],
        "kv_lens": int32(packing.keys, device) if packing.room is not None else None,
    }
    return Packed((qkv[0], qkv[1], qkv[2]), lengths, params, list(zip(alone, views, strict=True)))


def offsets(lens: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    """cu_seqlens of these lengths."""
    return int32((0, *lens), device).cumsum(0).int()


def int32(values: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def _params(
    spec: AttentionSpec, packing: Packing, largest: tuple[int, int], device: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Parameters for the largest lengths and a batch of all sequences; packed, and of each."""
    count = len(packing.q_lens)
    whole = replace(packing.case, q_len=largest[0], kv_len=largest[1], batch=count)
    given = whole.arguments(spec, device)
    declared = {p.name: packed_tensor(p) for p in spec.params if isinstance(p, Tensor)}
    views = [
        {
            name: _of_sequence(x, declared[name], b, *lengths) if name in declared else x
            for name, x in given.items()
        }
        for b, lengths in enumerate(zip(packing.q_lens, packing.keys, strict=True))
    ]
    passed = {
        name: _packed(x, declared[name], packing) if name in declared else x
        for name, x in given.items()
    }
    return passed, views


def _of_sequence(
    x: torch.Tensor, tensor: PackedTensor, b: int, q_len: int, kv_len: int
) -> torch.Tensor:
    """What one sequence reads, in a batch of one."""
    for axis, name in enumerate(map(str, tensor.dims)):
        length = {"q_len": q_len, "kv_len": kv_len}.get(name)
        x = x[(slice(None),) * axis + (slice(b, b + 1),)] if name == "batch" else x
        x = x.narrow(axis, 0, length) if length is not None else x
    return x.contiguous()


def _packed(x: torch.Tensor, tensor: PackedTensor, packing: Packing) -> torch.Tensor:
    """A tensor as `varlen_attention` takes it: what belongs to no sequence gives itself away."""
    if tensor.batch is None or tensor.tokens is None:
        return x
    of_queries = tensor.start == "q_start"
    lens = packing.q_lens if of_queries else packing.keys
    taken = packing.q_lens if of_queries else packing.rooms
    poison = torch.nan if x.is_floating_point() else True if x.dtype == torch.bool else 2**30
    parts = []
    for b, (length, room) in enumerate(zip(lens, taken, strict=True)):
        part = x.select(tensor.batch, b).movedim(tensor.passed, 0)[:length]
        parts += [part, part.new_full((room - length, *part.shape[1:]), poison)]
    part = x.select(tensor.batch, 0).movedim(tensor.passed, 0)
    parts.append(part.new_full((packing.padding, *part.shape[1:]), poison))
    return torch.cat(parts).movedim(0, tensor.passed).contiguous()


def hold_varlen(
    module: ModuleType,
    spec: AttentionSpec,
    packing: Packing,
    dtype: torch.dtype,
    config: dict[str, Any],
    device: str = "cpu",
) -> None:
    """Both passes by the module's kernels with these tiles, each sequence against float64."""
    call = packed(spec, packing, dtype, device)
    scale = spec.scale or spec.qk_head_dim**-0.5
    given = (*call.qkv, *call.lengths.values(), scale, *call.params.values())
    out, lse = module._launch_varlen(*given, config)
    hold_outputs(spec, packing, call, out, lse)
    generator = torch.Generator(device).manual_seed(zlib.crc32(str(packing).encode()))
    grad_out, grad_lse = (
        torch.randn(x.shape, generator=generator, device=device).to(x.dtype) for x in (out, lse)
    )
    end = sum(packing.q_lens)
    grad_out[end:], grad_lse[end:] = torch.nan, torch.nan
    grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
    grads = module._varlen_backward_kernels(*given, out, lse, grad_out, grad_lse, config, config)
    if hasattr(module, "_with_varlen_sink"):
        names = [n for n in call.params if n in _sink_names(module)]
        sinks = (call.params[name] for name in names)
        offsets_q = call.lengths["cu_seqlens_q"]
        grads = module._with_varlen_sink(grads, lse, offsets_q, call.lengths["max_kv_len"], *sinks)
    hold_all_gradients(spec, packing, call, grads, grad_out, grad_lse)


def _sink_names(module: ModuleType) -> set[str]:
    return set(module._with_varlen_sink.__code__.co_varnames)


def hold_outputs(
    spec: AttentionSpec,
    packing: Packing,
    call: Packed,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    gluon: bool = False,
) -> None:
    """Fails unless each sequence is right, and what is behind the last one is 0 and -inf."""
    at = 0
    for case, (tensors, params) in zip(packing.cases(), call.alone, strict=True):
        own = replace(case, params=params)
        rows = slice(at, at + case.q_len)
        check(out[rows].transpose(0, 1)[None], lse[rows].mT[None], tensors, spec, own, gluon=gluon)
        at += case.q_len
    assert not out[at:].any() and (lse[at:] == -torch.inf).all(), "behind the last sequence"


def hold_all_gradients(
    spec: AttentionSpec,
    packing: Packing,
    call: Packed,
    grads: Tensors,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> None:
    """Fails unless each sequence's gradients are right, and 0 where there is no sequence."""
    q_at = kv_at = 0
    for case, (tensors, params), room in zip(
        packing.cases(), call.alone, packing.rooms, strict=True
    ):
        rows, keys = slice(q_at, q_at + case.q_len), slice(kv_at, kv_at + case.kv_len)
        of_q, of_k, of_v = (
            x[part].transpose(0, 1)[None]
            for x, part in zip(grads[:3], (rows, keys, keys), strict=True)
        )
        behind = [x[kv_at + case.kv_len : kv_at + room] for x in grads[1:3]]
        assert not any(x.any() for x in behind), "keys that kv_lens leaves out"
        q_at, kv_at = q_at + case.q_len, kv_at + room
        if case.q_len * case.kv_len:
            given = (grad_out[rows].transpose(0, 1)[None], grad_lse[rows].mT[None])
            _hold((of_q, of_k, of_v), tensors, params, spec, spec.scale, *given)
        else:
            assert not any(x.any() for x in (of_q, of_k, of_v)), "without queries or keys"
    for x, at in zip(grads[:3], (q_at, kv_at, kv_at), strict=True):
        assert not x[at:].any(), "behind the last sequence"
    exact = learned_gradients(spec, packing, call, grad_out, grad_lse)
    for mine, (name, right) in zip(grads[3:], exact.items(), strict=True):
        # Sums over many rows, of which each rounds as the tensors do.
        allowed = 16 * torch.finfo(call.qkv[0].dtype).eps * max(1.0, right.abs().max().item())
        error = (mine.double() - right).abs().max().item()
        assert error <= allowed, f"d{name}: error {error:.3g}, allowed {allowed:.3g}"


def _hold(grads: Tensors, tensors: Tensors, params: dict[str, Any], *given: Any) -> None:
    """`hold_gradients` of q, k and v alone: learned tensors belong to all sequences."""
    spec, scale, grad_out, grad_lse = given
    exact = exact_gradients(tensors, params, spec, scale, grad_out, grad_lse)[:3]
    rough, size = rough_gradients(tensors, params, spec, scale, grad_out, grad_lse)
    for name, mine, right, low in zip("qkv", grads, exact, rough, strict=False):
        assert mine.isfinite().all(), f"d{name}: infinite or NaN"
        error, allowed = error_and_bound(mine, right, low, size)
        assert error <= allowed, f"d{name}: error {error:.3g}, allowed {allowed:.3g}"


def learned_gradients(
    spec: AttentionSpec,
    packing: Packing,
    call: Packed,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Those of float tensors in float64, as they are packed, each sequence by itself."""
    sums = {
        name: torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for name, x in call.params.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    if not sums:
        return {}
    declared = {p.name: packed_tensor(p) for p in spec.params if isinstance(p, Tensor)}
    q_at = kv_at = 0
    for b, (case, (tensors, params), room) in enumerate(
        zip(packing.cases(), call.alone, packing.rooms, strict=True)
    ):
        rows = slice(q_at, q_at + case.q_len)
        given = (grad_out[rows].transpose(0, 1)[None], grad_lse[rows].mT[None])
        if case.q_len:
            parts = exact_gradients(tensors, params, spec, spec.scale, *given)[3:]
            for name, part in zip(sums, parts, strict=True):
                tensor, whole = declared[name], sums[name]
                if tensor.batch is not None and tensor.tokens is not None:
                    start = q_at if tensor.start == "q_start" else kv_at
                    axis, part = tensor.passed or 0, part.squeeze(tensor.batch)
                    whole = whole.narrow(axis, start, part.shape[axis])
                else:
                    for axis, dim in enumerate(map(str, tensor.dims)):
                        at = b if dim == "batch" else 0
                        whole = whole.narrow(axis, at, part.shape[axis])
                whole += part
        q_at, kv_at = q_at + case.q_len, kv_at + room
    return sums


def hold_hopper_varlen(
    module: ModuleType, spec: AttentionSpec, packing: Packing, config: dict[str, Any]
) -> None:
    """The forward pass by the Gluon kernel, each sequence against float64."""
    call = packed(spec, packing, getattr(torch, spec.dtype))
    scale = spec.scale or spec.qk_head_dim**-0.5
    given = (*call.qkv, *call.lengths.values(), scale, *call.params.values())
    out, lse = module._launch_hopper_varlen(*given, config)
    hold_outputs(spec, packing, call, out, lse, gluon=True)


def hold_hopper_varlen_backward(
    module: ModuleType, spec: AttentionSpec, packing: Packing, config: dict[str, Any]
) -> None:
    """The backward pass by the Gluon kernel, each sequence against float64."""
    call = packed(spec, packing, getattr(torch, spec.dtype))
    scale = spec.scale or spec.qk_head_dim**-0.5
    given = (*call.qkv, *call.lengths.values(), scale, *call.params.values())
    references = [x.double() for x in call.qkv]
    out, lse = module.varlen_reference(
        *references, **call.lengths, **call.params, scale=scale, return_lse=True
    )
    out, lse = out.to(call.qkv[0].dtype), lse.float()
    generator = torch.Generator().manual_seed(zlib.crc32(str(packing).encode()))
    grad_out, grad_lse = (torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, lse))
    end = sum(packing.q_lens)
    grad_out[end:], grad_lse[end:] = torch.nan, torch.nan
    grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
    grads = module._varlen_backward_kernels_hopper(*given, out, lse, grad_out, grad_lse, config)
    hold_all_gradients(spec, packing, call, grads, grad_out, grad_lse)

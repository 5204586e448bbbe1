"""The module for a kind of call: its spec, compiled once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashgen.compiling import cached
from flashgen.integrations.call_tensors import precision_of, targets_of
from flashgen.integrations.layers.described import MaskKind
from flashgen.integrations.layers.recorded import CAUSAL, TRUE, Node, parts_of
from flashgen.masks import Mask, as_mask, causal, full
from flashgen.normalisers import softmax
from flashgen.params import Int, Tensor
from flashgen.scores import Score, additive_bias, softcap
from flashgen.spec import AttentionSpec
from flashgen.tracing.expr import Expr


@dataclass(frozen=True)
class CallKind:
    """What a module depends on.

    Attributes:
        mask: what queries see.
        head_dims: of q and k, and of v: multiples of 8.
        dtype: of q, k and v, ``"float32"``.
        input_precision: as `AttentionSpec` has it.
        softcap: of the scores; None for none.
        bias: batch (1 or ``"batch"``), heads (1 or ``"num_q_heads"``) and dtype of what is added
            to the scores; None for nothing.
        sinks: whether each head has a sink.
        dropout: whether weights may be dropped.
        targets: the GPU architectures that the module is for.
    """

    mask: MaskKind
    head_dims: tuple[int, int]
    dtype: str
    input_precision: str | None
    softcap: float | None
    bias: tuple[int | str, int | str, str] | None
    sinks: bool
    dropout: bool
    targets: tuple[str, ...]


#: The attributes of this are modules: torch.compile asks anew for each of them.
_made = ModuleType("flashgen_layers")
#: Their names, by a text of their kinds, and by what eager calls ask with.
_names: dict[Any, str] = {}
_making = threading.RLock()


def module_of(
    mask: MaskKind,
    head_dims: tuple[int, int],
    dtype: str,
    softcap: float | None,
    bias: tuple[int | str, int | str, str] | None,
    sinks: bool,
    dropout: bool,
    device: torch.device,
) -> ModuleType:
    """The module for a kind of call; see `CallKind`."""
    asked: tuple[Any, ...] | None = None
    # How torch reads float32 may change between two calls.
    if dtype != "float32" and not torch.compiler.is_compiling():
        asked = (mask.text, head_dims, dtype, softcap, bias, sinks, dropout, device)
        if (name := _names.get(asked)) is not None:
            known: ModuleType = getattr(_made, name)
            return known
    precision = _precision() if dtype == "float32" else None
    targets = _targets(device.type, device.index)
    rest = (head_dims, dtype, precision, softcap, bias, sinks, dropout, targets)
    name = _name_of(f"{mask.text} {rest}", mask.text, *rest)
    if asked is not None:
        _names[asked] = name
    module: ModuleType = getattr(_made, name)
    return module


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _name_of(key: str, mask: str, *rest: Any) -> str:
    """The name of a module, which is made if it is new, also while torch.compile traces."""
    if key not in _names:
        with _making:
            if key not in _names:
                name = f"module_{len(_names)}"
                setattr(_made, name, _compiled(CallKind(MaskKind.of_text(mask), *rest)))
                _names[key] = name
    return _names[key]


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _precision() -> str | None:
    return precision_of(torch.empty(0))


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _targets(kind: str, index: int | None) -> tuple[str, ...]:
    return targets_of(torch.device(kind) if index is None else torch.device(kind, index))


def _compiled(kind: CallKind) -> ModuleType:
    # The cache kernels have no dropout; a bias has rows of the queries that a call has.
    decodes = not kind.dropout and kind.bias is None
    return cached(
        AttentionSpec(
            head_dim=kind.head_dims,
            dtype=kind.dtype,
            mask=_mask(kind.mask),
            score=_score(kind),
            normaliser=softmax(sink=Tensor("sinks", ("num_q_heads",))) if kind.sinks else softmax(),
            input_precision=kind.input_precision,
            dropout=kind.dropout,
            forms=("dense", "cache") if decodes else ("dense",),
            targets=kind.targets,
            name="layer",
        )
    )


def _score(kind: CallKind) -> Score | None:
    scores: list[Score] = []
    if kind.softcap is not None:
        scores.append(softcap(kind.softcap))
    if kind.bias is not None:
        batch, heads, dtype = kind.bias
        scores.append(additive_bias(Tensor("bias", (batch, heads, "q_len", "kv_len"), dtype)))
    if len(scores) == 2:
        return scores[0].then(scores[1])
    return scores[0] if scores else None


def _mask(kind: MaskKind) -> Mask:
    """The mask of a module, with the last query at the last key."""
    tensors = [Tensor(x.name, x.dims, x.dtype, sorted=x.in_order) for x in kind.tensors]
    numbers = [Int(name, min=1) for name in kind.numbers]
    masks = [_part(part, tensors, numbers) for part in parts_of(kind.node) if part != TRUE]
    if not masks:
        return full()
    joined = masks[0]
    for mask in masks[1:]:
        joined = joined & mask
    return joined


def _part(node: Node, tensors: list[Tensor], numbers: list[Int]) -> Mask:
    if node == CAUSAL:
        return causal(align="bottom_right")
    if node[0] in ("range", "padding"):
        return as_mask(_padding(node[0], {x.name: x for x in tensors}))
    if node[0] in ("row_range", "row_elements"):
        return as_mask(_rows(node[0], {x.name: x for x in tensors})).aligned("top_left")

    def condition(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at = {"b": b, "q": q_idx, "kv": kv_idx}
        return _evaluated(node, at, tensors, numbers)

    return as_mask(condition).aligned("bottom_right")


def _padding(how: str, tensors: dict[str, Tensor]) -> Callable[..., Any]:
    """The keys from the first to the last that is no padding, and none between that is.

    Up to the first padding between, ``solid_to``, no element is read: bounds skip the mask there.
    """
    first, end = tensors["keys_from"], tensors["keys_to"]

    def in_range(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= first[b]) & (kv_idx < end[b])

    def allowed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        solid, table = tensors["solid_to"], tensors["padding"]
        return in_range(b, h, q_idx, kv_idx) & ((kv_idx < solid[b]) | table[b, kv_idx])

    return in_range if how == "range" else allowed


def _rows(how: str, tensors: dict[str, Tensor]) -> Callable[..., Any]:
    """The keys of each query from the first to the last it sees, and none between it does not.

    Tensors are indexed by the queries of the call, which count from 0.
    """

    def element(name: str, b: Any, h: Any, *positions: Any) -> Any:
        shared = [dim is not None and dim.sym == 1 for dim in tensors[name].dims]
        return tensors[name][0 if shared[0] else b, 0 if shared[1] else h, *positions]

    def in_range(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        first, end = element("keys_from", b, h, q_idx), element("keys_to", b, h, q_idx)
        return (kv_idx >= first) & (kv_idx < end)

    def shown(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        solid, seen = element("solid_to", b, h, q_idx), element("elements", b, h, q_idx, kv_idx)
        return in_range(b, h, q_idx, kv_idx) & ((kv_idx < solid) | seen)

    return in_range if how == "row_range" else shown


def _evaluated(node: Node, at: dict[str, Any], tensors: list[Tensor], numbers: list[Int]) -> Any:
    """A condition, for positions."""

    def condition(x: Node) -> Any:
        return _evaluated(x, at, tensors, numbers)

    def load(tensor: int, indices: tuple[Any, ...]) -> Any:
        return tensors[tensor][tuple(at.get(i, i) for i in indices)]

    def number(x: Any) -> Any:
        return x if isinstance(x, int) else x[2] * numbers[x[1]]

    def total(terms: Any) -> Any:
        found: Any = None
        for count, atom in terms:
            value = load(atom[1], atom[2]) if atom[0] == "load" else at[atom[0]]
            value = value if count == 1 else count * value
            found = value if found is None else found + value
        return 0 if found is None else found

    how = node[0]
    if how in ("and", "or"):
        joined = condition(node[1])
        for x in node[2:]:
            joined = joined & condition(x) if how == "and" else joined | condition(x)
        return joined
    if how == "not":
        return ~condition(node[1])
    if how == "flag":
        return load(node[1], node[2])
    if how == "chunk":
        start, size = load(node[1], ("b",)), number(node[2])
        q, kv = (at[x] if node[3] is None else load(node[3], ("b", x)) for x in ("q", "kv"))
        return (q + start) // size == (kv + start) // size
    if how in ("true", "false"):
        return how == "true"
    # What is taken off goes to the other side, as a person writes it.
    left = total([(n, atom) for n, atom in node[1] if n > 0])
    right = total([(-n, atom) for n, atom in node[1] if n < 0]) - number(node[2])
    if not isinstance(left, Expr):
        return right >= left if how == "le" else right == left
    return left <= right if how == "le" else left == right

"""The mask function of the registry: what transformers asks for becomes a `DescribedMask`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from flashgen.integrations.layers.described import DescribedMask, MaskKind, TensorKind
from flashgen.integrations.layers.padding import padding, waits
from flashgen.integrations.layers.recorded import (
    CAUSAL,
    TRUE,
    Node,
    Terms,
    Unreadable,
    conjunction,
    parts_of,
    read,
)
from flashgen.integrations.layers.rows import FEW, rows
from flashgen.integrations.transformers.ordered import is_packed, ordered
from flashgen.integrations.transformers.remembered import signature

#: Arguments that say how transformers' own functions may write a mask down, not what it shows.
HARMLESS = frozenset(
    (
        "allow_is_bidirectional_skip", "allow_is_causal_skip", "allow_torch_fix", "config", "dtype",
        "local_size",
    )
)  # fmt: skip


def described_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **kwargs: Any,
) -> DescribedMask | torch.Tensor:
    """What transformers asks a mask function for: see its ``sdpa_mask``.

    Returns:
        A description; or, where the mask function does what is not recorded, or the lengths have
        no alignment that flashgen's modules have, bounds of each query's keys, or, of few queries,
        its elements: bool (batch, heads, q, kv).

    Raises:
        TypeError: an argument that may change the mask is not known.
    """
    for name, value in kwargs.items():
        if value is not None and name not in HARMLESS:
            raise TypeError(f"{name}: flashgen does not know what a mask does with it; pass None")
    ends = None
    more = q_length - kv_offset
    if isinstance(q_offset, torch.Tensor):
        # A copy: a static cache adds to its length before attention is called.
        ends = _each_plus(q_offset, more, batch_size, device)

    def dense() -> torch.Tensor:
        elements: torch.Tensor = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset if ends is None else ends[0] - more,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return elements

    size = (batch_size, 1, q_length, kv_length)
    try:
        shown = _read_once(mask_function, images=q_length > FEW)
        if not isinstance(kv_offset, int):
            raise Unreadable("keys begin at a position that only the device knows")
        last = q_offset + more if ends is None else ends
        valid, kv_lens = _lengths(shown, batch_size, q_length, kv_length, last, device)
        if shown.kind is not None:
            kind, numbers, tables = shown.kind, shown.numbers, []
        else:
            parts = _Described(
                batch_size, kv_length, kv_offset, shown.tensors, shown.in_order, device
            )
            node = parts.node(shown.node, top=True)
            kind = MaskKind(node, tuple(parts.kinds), tuple(parts.names))
            numbers, tables = tuple(parts.numbers), parts.tables
    except Unreadable:
        elements = dense()
        found = rows(elements)
        if found is None:
            return elements
        of_rows, kinds, row_tables = found
        return DescribedMask(
            MaskKind(of_rows, tuple(kinds)), (), tuple(row_tables), kv_length, None, size, dense
        )

    def described(hidden: Node, kinds: list[TensorKind], more: list[torch.Tensor]) -> DescribedMask:
        whole = _joined(kind, hidden, tuple(kinds))
        return DescribedMask(whole, numbers, (*tables, *more), valid, kv_lens, size, dense)

    def bounded() -> DescribedMask:
        assert attention_mask is not None
        attended = _positions(attention_mask, batch_size, kv_offset, kv_length)
        whole = kv_length if valid is None or kv_lens is not None else valid
        return described(*padding(attended, whole, look=q_length > FEW))

    if attention_mask is None:
        return described(TRUE, [], [])
    if kv_lens is None:
        return bounded()
    # The cache kernels list the tiles of keys by the elements; bounds take a dozen small kernels.
    elements = _aligned(_positions(attention_mask, batch_size, kv_offset, kv_length))
    mask = described(("flag", len(tables), ("b", "kv")), [_ATTENDED], [elements])
    mask.bounds = bounded
    return mask


_ATTENDED = TensorKind("padding", ("batch", "kv_len"), "bool")


@dataclass(frozen=True)
class _Shown:
    """What a mask function computes.

    Attributes:
        node: it, in positions of the sequence.
        tensors: that it reads.
        in_order: the places of those whose elements never fall.
        kind: the same in positions among the keys of any call; None where it depends on the call.
        numbers: the kind's numbers.
        of_queries: whether it depends on the query.
        causal: whether no query sees a key after itself.
    """

    node: Node
    tensors: list[torch.Tensor]
    in_order: frozenset[int]
    kind: MaskKind | None
    numbers: tuple[int, ...]
    of_queries: bool
    causal: bool


#: What mask functions without tensors compute, by their signatures.
_SHOWN: dict[Any, _Shown] = {}


def _read_once(mask_function: Callable[..., Any], *, images: bool) -> _Shown:
    """What a mask function computes; images: see `ordered`.

    Raises:
        Unreadable: it does something else than what is recorded.
    """
    made_of = signature(mask_function)
    shown = _SHOWN.get(made_of) if made_of is not None else None
    if shown is not None:
        return shown
    node, tensors = read(mask_function)
    known = ordered(node, tensors, images=images)
    node = known.node
    # A function with a signature reads no tensor.
    kind, numbers = (None, ()) if made_of is None else _of_any_call(node)
    causal = CAUSAL in parts_of(node)
    shown = _Shown(node, tensors, known.in_order, kind, numbers, _mentions(node, "q"), causal)
    if made_of is not None:
        if len(_SHOWN) >= 256:
            _SHOWN.clear()
        _SHOWN[made_of] = shown
    return shown


def _of_any_call(node: Node) -> tuple[MaskKind | None, tuple[int, ...]]:
    """A condition's kind and numbers, if they are the same wherever the keys of a call begin."""
    found = []
    for offset in (0, 1):
        mask = _Described(1, 1, offset, [], frozenset(), "cpu")
        found.append((mask.node(node, top=True), mask.names, mask.numbers))
        if mask.tables:
            return None, ()
    if found[0] != found[1]:
        return None, ()
    moved, names, numbers = found[0]
    return MaskKind(moved, (), tuple(names)), tuple(numbers)


def _joined(kind: MaskKind, hidden: Node, tensors: tuple[TensorKind, ...]) -> MaskKind:
    """A kind of mask, and a condition besides, whose tensors come last."""
    if hidden == TRUE:
        return kind
    if torch.compiler.is_compiling():
        return _join(kind, hidden, tensors)
    return _join_once(kind, hidden, tensors)


def _join(kind: MaskKind, hidden: Node, tensors: tuple[TensorKind, ...]) -> MaskKind:
    node = conjunction((*parts_of(kind.node), *parts_of(hidden)))
    return MaskKind(node, (*kind.tensors, *tensors), kind.numbers)


_join_once = functools.lru_cache(maxsize=256)(_join)


def _each_plus(
    x: torch.Tensor, more: int | torch.Tensor, batch_size: int, device: torch.device | str
) -> torch.Tensor:
    """A number and another one: int32 (batch,)."""
    x = x.to(device).reshape(-1).expand(batch_size)
    if torch.compiler.is_compiling() or isinstance(more, torch.Tensor):
        return (x + more).to(torch.int32)
    # One launch.
    return torch.add(x, more, out=torch.empty(batch_size, dtype=torch.int32, device=device))


def _lengths(
    shown: _Shown,
    batch_size: int,
    q_length: int,
    kv_length: int,
    last: int | torch.Tensor,
    device: torch.device | str,
) -> tuple[int | None, torch.Tensor | None]:
    """How many keys there are for the last query: for the host, and for the cache kernels.

    A module places the last query at the last key. Keys after that are left out, which is right
    if no query sees a key after itself.

    Args:
        shown: what the mask function computes.
        batch_size: of the call.
        q_length: its queries.
        kv_length: its keys.
        last: where queries end, counted from the first key; int32 (batch,) if the device knows it.
        device: of the call.
    """
    if not shown.of_queries:
        last = kv_length
    known = isinstance(last, int)
    if not (known and last == kv_length) and not shown.causal:
        raise Unreadable("queries are not at the last keys")
    if known and not 0 < last <= kv_length:
        raise Unreadable("queries are behind the last key")
    if isinstance(last, torch.Tensor) and q_length > FEW and waits():
        last, known = int(last[0]), True
    if known and (q_length > FEW or q_length >= kv_length):
        return int(last), None
    if isinstance(last, torch.Tensor):
        return None, last
    return last, torch.full((batch_size,), last, dtype=torch.int32, device=device)


def _positions(attended: torch.Tensor, batch: int, offset: int, kv_len: int) -> torch.Tensor:
    """Which keys of a call are no padding: bool (batch, kv_len); none behind a mask's end."""
    missing = offset + kv_len - attended.shape[-1]
    if missing > 0:
        attended = torch.nn.functional.pad(attended, (0, missing))
    if offset != 0 or missing < 0:
        attended = attended[:, offset : offset + kv_len]
    if attended.dtype != torch.bool:
        attended = attended.bool()
    return attended if attended.shape[0] == batch else attended.expand(batch, -1)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """The same elements, one behind the other from an address on that kernels are compiled for.

    A slice begins anywhere: each layer's launch would be one of Triton's own.
    """
    if x.is_contiguous() and (torch.compiler.is_compiling() or x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _Described:
    """The numbers and tensors of a mask, as they are met.

    Args:
        batch: entries of it.
        kv_len: keys of the call.
        offset: the position of the first of them.
        read: the tensors that a mask function reads, by their places.
        in_order: the places of those whose elements never fall.
        device: of the call.
    """

    def __init__(
        self,
        batch: int,
        kv_len: int,
        offset: int,
        read: list[torch.Tensor],
        in_order: frozenset[int],
        device: torch.device | str,
    ) -> None:
        self._batch, self._kv_len, self._offset = batch, kv_len, offset
        self._read, self._in_order, self._device = read, in_order, device
        self._places: dict[Any, int] = {}
        self._wanted: Counter[str] = Counter()
        self.kinds: list[TensorKind] = []
        self.tables: list[torch.Tensor] = []
        self.names: list[str] = []
        self.numbers: list[int] = []

    def node(self, node: Node, *, top: bool = False) -> Node:
        """The condition in positions among the keys of the call."""
        how = node[0]
        if how in ("and", "or"):
            return (how, *(self.node(x, top=top and how == "and") for x in node[1:]))
        if how == "not":
            return (how, self.node(node[1]))
        if how == "flag":
            return (how, self._table(node[1], node[2]), node[2])
        if how == "eq" and (chunk := self._chunk(node)) is not None:
            return chunk
        if how in ("le", "eq"):
            packed = top and how == "eq" and is_packed(node)
            terms: Terms = tuple((n, self._atom(atom, packed)) for n, atom in node[1])
            moved = sum(n for n, atom in node[1] if atom[0] in ("q", "kv"))
            letters = {_place(atom) for _, atom in node[1]}
            name = "window" if letters == {"q", "kv"} else "limit"
            return (how, terms, self._number(name, node[2] + moved * self._offset))
        return node

    def _atom(self, atom: Node, packed: bool) -> Node:
        if atom[0] == "load":
            in_order = packed or atom[1] in self._in_order
            return ("load", self._table(atom[1], atom[2], in_order=in_order), atom[2])
        if atom[0] in ("q", "kv"):
            return atom
        raise Unreadable(f"it compares {atom[0]}")

    def _number(self, name: str, value: int, *, always: bool = False) -> Any:
        """An int of the kind where it is small, else a number of the call."""
        if abs(value) <= 1 and not always:
            return value
        self.names.append(self._name(name))
        self.numbers.append(abs(value))
        return ("n", len(self.numbers) - 1, 1 if value > 0 else -1)

    def _chunk(self, node: Node) -> Node | None:
        """``(q + x) // size == (kv + x) // size``, where x does not depend on positions.

        In place of q and kv there may be one tensor's elements for them: positions that count
        within packed sequences.
        """
        if len(node[1]) != 2 or {atom[0] for _, atom in node[1]} != {"div"} or node[2] != 0:
            return None
        if sum(n for n, _ in node[1]) != 0:
            return None
        sides: dict[str, Any] = {}
        for _, (_, terms, number, size) in node[1]:
            moving = [(n, atom) for n, atom in terms if _place(atom) is not None]
            others = tuple(term for term in terms if term not in moving)
            if len(moving) != 1 or moving[0][0] != 1:
                return None
            place = moving[0][1]
            at = place[1] if place[0] == "load" else None
            sides[str(_place(place))] = (at, others, number, size)
        if len(sides) != 2 or sides["q"] != sides["kv"]:
            return None
        at, others, number, size = sides["q"]
        shift: Any = number + (self._offset if at is None else 0)
        for n, atom in others:
            if atom[0] != "load" or atom[2] != ("b",):
                return None
            shift = shift + n * self._read[atom[1]]
        if isinstance(shift, int):
            shift = torch.full((self._batch,), shift, device=self._device)
        # A shift by whole chunks changes nothing: what is left is not negative.
        shift = (shift % size).to(torch.int32).expand(self._batch).contiguous()
        start = self._keep(TensorKind(self._name("chunk_start"), ("batch",), "int32"), shift)
        table = None if at is None else self._table(at, ("b", "kv"))
        return ("chunk", start, self._number("chunk_size", size, always=True), table)

    def _name(self, wanted: str) -> str:
        self._wanted[wanted] += 1
        return wanted if self._wanted[wanted] == 1 else f"{wanted}_{self._wanted[wanted]}"

    def _keep(self, kind: TensorKind, table: torch.Tensor) -> int:
        self.kinds.append(kind)
        self.tables.append(table)
        return len(self.tables) - 1

    def _table(self, at: int, indices: tuple[Any, ...], *, in_order: bool = False) -> int:
        """The place of a tensor, with the elements of the call's keys."""
        dims = tuple(
            "batch" if x == "b" else "kv_len" if x in ("q", "kv") else None for x in indices
        )
        key = (at, dims)
        if key in self._places:
            return self._places[key]
        table = self._read[at]
        for i, dim in enumerate(dims):
            if dim == "batch" and table.shape[i] == 1:
                table = table.expand(*(self._batch if j == i else -1 for j in range(table.dim())))
            first, size = {"kv_len": (self._offset, self._kv_len), "batch": (0, self._batch)}.get(
                dim or "", (0, table.shape[i])
            )
            if table.shape[i] < first + size or (dim == "batch" and table.shape[i] != size):
                raise Unreadable("a tensor has no elements for some positions")
            table = table.narrow(i, first, size)
        of_bools = table.dtype == torch.bool
        shown = tuple(table.shape[i] if dim is None else dim for i, dim in enumerate(dims))
        wanted = "segments" if at in self._in_order else "sequence_ids" if in_order else "elements"
        kind = TensorKind(
            self._name(wanted),
            shown,
            "bool" if of_bools else "int32",
            in_order,
        )
        self._places[key] = self._keep(kind, table if of_bools else table.int())
        return self._places[key]


def _place(atom: Node) -> str | None:
    """Of which position it is, or a tensor's element for a position of each batch entry."""
    if atom[0] in ("q", "kv"):
        return str(atom[0])
    if atom[0] == "load" and atom[2] in (("b", "q"), ("b", "kv")):
        return str(atom[2][1])
    return None


def _mentions(node: Any, letter: str) -> bool:
    """Whether a letter is somewhere in a condition."""
    if isinstance(node, tuple):
        return any(_mentions(x, letter) for x in node)
    return bool(node == letter)

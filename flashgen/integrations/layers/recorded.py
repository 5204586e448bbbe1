"""What a mask function computes, as tuples.

The function is called once with objects that record what is done to them, so that it does not
matter by which helpers of a library it was made, nor what these are called.

A sum is its terms, ``((factor, atom), ...)``, and an int. The atoms are ``("q",)``, ``("kv",)``,
``("b",)``, ``("abs", terms, number)``, ``("div", terms, number, divisor)`` and ``("load", tensor,
indices)`` of the letters ``"b"``, ``"q"`` and ``"kv"`` and of ints; a tensor is its place in a
list.

A condition is ``("true",)``, ``("false",)``, ``("le", terms, number)`` for ``sum <= 0``, ``("eq",
terms, number)``, ``("flag", tensor, indices)``, ``("not", x)``, or ``("and", x, y, ...)`` and
``("or", x, y, ...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: A condition or an atom.
Node = tuple[Any, ...]
#: The terms of a sum.
Terms = tuple[tuple[int, Node], ...]

TRUE: Node = ("true",)
FALSE: Node = ("false",)

#: A key is not after its query.
CAUSAL: Node = ("le", ((1, ("kv",)), (-1, ("q",))), 0)

_LETTERS = ("b", "q", "kv")


class Unreadable(Exception):
    """A mask function does what is not recorded."""


def read(mask_function: Callable[..., Any]) -> tuple[Node, list[torch.Tensor]]:
    """The condition that a mask function of ``(b, h, q_idx, kv_idx)`` returns, and its tensors.

    Raises:
        Unreadable: it does something else than compare sums of positions and of elements.
    """
    tensors: list[torch.Tensor] = []
    b, q, kv = (Number(tensors, ((1, (letter,)),), 0) for letter in _LETTERS)
    try:
        with _Loading():
            seen = mask_function(b, Number(tensors, (), 0), q, kv)
    except (TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise Unreadable(str(error)) from error
    return _condition(seen), tensors


class _Loading(TorchFunctionMode):
    """Records elements of tensors at recorded indices, also where torch.compile traces."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.__getitem__:
            tensor, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(x, Number) for x in indices):
                return _loaded(tensor, indices)
        return function(*args, **(kwargs or {}))


class _Recorded:
    """What numbers and conditions share: they stand for tensors."""

    #: Where a mask function moves other tensors that it joins to this.
    device = torch.device("cpu")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def to(self, *arguments: Any, **options: Any) -> Any:
        """On another device it is the same."""
        return self

    def new_ones(self, size: Any, **options: Any) -> Condition:
        """What conditions are joined to by ``&``, as in ``and_masks``."""
        return Condition(self.tensors, TRUE)

    def new_zeros(self, size: Any, **options: Any) -> Condition:
        """What conditions are joined to by ``|``, as in ``or_masks``."""
        return Condition(self.tensors, FALSE)

    def __bool__(self) -> bool:
        raise Unreadable("it decides by a position")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.abs, torch.Tensor.abs):
            return abs(args[0])
        if function in (torch.Tensor.__and__, torch.Tensor.__rand__):
            return _joined("and", *args)
        if function in (torch.Tensor.__or__, torch.Tensor.__ror__):
            return _joined("or", *args)
        raise Unreadable(f"it calls {getattr(function, '__name__', function)}")


class Number(_Recorded):
    """A sum of positions, elements of tensors and an int."""

    def __init__(self, tensors: list[torch.Tensor], terms: Terms, number: int) -> None:
        super().__init__(tensors)
        self.terms, self.number = terms, number

    def _plus(self, other: Any, factor: int) -> Number:
        terms, number = _sum(other)
        found: dict[Node, int] = {}
        for times, one in ((1, self.terms), (factor, terms)):
            for count, atom in one:
                found[atom] = found.get(atom, 0) + times * count
        kept = tuple((count, atom) for atom, count in found.items() if count != 0)
        return Number(self.tensors, kept, self.number + factor * number)

    def _times(self, factor: int) -> Number:
        terms = tuple((factor * count, atom) for count, atom in self.terms)
        return Number(self.tensors, terms, factor * self.number)

    def __add__(self, other: Any) -> Number:
        return self._plus(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Number:
        return self._plus(other, -1)

    def __rsub__(self, other: Any) -> Number:
        return self._times(-1)._plus(other, 1)

    def __neg__(self) -> Number:
        return self._times(-1)

    def __abs__(self) -> Number:
        return Number(self.tensors, ((1, ("abs", self.terms, self.number)),), 0)

    abs = __abs__

    def __floordiv__(self, other: Any) -> Number:
        if type(other) is not int or other < 1:
            raise Unreadable("it divides by what is not a positive int")
        return Number(self.tensors, ((1, ("div", self.terms, self.number, other)),), 0)

    def _at_most(self, more: int) -> Condition:
        """Whether the sum, and ``more``, is 0 or less."""
        terms, number = self.terms, self.number + more
        if len(terms) == 1 and terms[0][1][0] == "abs":
            count, (_, inner, added) = terms[0]
            if count != 1:
                raise Unreadable("it asks for a distance that is not small")
            one = Number(self.tensors, inner, added)
            return (one + number)._at_most(0) & (number - one)._at_most(0)
        if number <= 0 and all(count < 0 and atom[0] in _LETTERS for count, atom in terms):
            return Condition(self.tensors, TRUE)  # positions count from 0
        return Condition(self.tensors, ("le", terms, number) if terms else FALSE)

    def __le__(self, other: Any) -> Condition:
        return self._plus(other, -1)._at_most(0)

    def __lt__(self, other: Any) -> Condition:
        return self._plus(other, -1)._at_most(1)

    def __ge__(self, other: Any) -> Condition:
        return self._times(-1)._plus(other, 1)._at_most(0)

    def __gt__(self, other: Any) -> Condition:
        return self._times(-1)._plus(other, 1)._at_most(1)

    def __eq__(self, other: Any) -> Any:
        less = self - other
        terms, number = less.terms, less.number
        return Condition(self.tensors, ("eq", terms, number) if terms else _known(number == 0))

    def __ne__(self, other: Any) -> Any:
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]


class Condition(_Recorded):
    """What is compared, and joined."""

    def __init__(self, tensors: list[torch.Tensor], node: Node) -> None:
        super().__init__(tensors)
        self.node = node

    def __and__(self, other: Any) -> Condition:
        return _joined("and", self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Condition:
        return _joined("or", self, other)

    __ror__ = __or__

    def __invert__(self) -> Condition:
        return Condition(self.tensors, ("not", self.node))


def _known(value: bool) -> Node:
    return TRUE if value else FALSE


def _sum(value: Any) -> tuple[Terms, int]:
    """The terms and the int of a number."""
    if isinstance(value, Number):
        return value.terms, value.number
    if type(value) is int:
        return (), value
    raise Unreadable(f"it computes with a {type(value).__name__}")


def _condition(value: Any) -> Node:
    """The condition that a value is; a tensor of one bool is read, which is on the CPU."""
    if isinstance(value, Condition):
        return value.node
    if isinstance(value, torch.Tensor):
        if value.dtype != torch.bool or value.numel() != 1 or value.device.type != "cpu":
            raise Unreadable("it joins a tensor that it does not index")
        return _known(bool(value))
    if type(value) is bool:
        return _known(value)
    raise Unreadable(f"it returns a {type(value).__name__}")


def _joined(how: str, *given: Any) -> Condition:
    """The conjunction or disjunction, without parts that change nothing."""
    least = [x.tensors for x in given if isinstance(x, _Recorded)]
    nothing, everything = (TRUE, FALSE) if how == "and" else (FALSE, TRUE)
    parts: list[Node] = []
    for x in given:
        node = _condition(x)
        parts += node[1:] if node[0] == how else (node,)
    parts = [node for node in parts if node != nothing]
    if everything in parts:
        return Condition(least[0], everything)
    if not parts:
        return Condition(least[0], nothing)
    return Condition(least[0], parts[0] if len(parts) == 1 else (how, *parts))


def _loaded(tensor: torch.Tensor, indices: tuple[Any, ...]) -> Any:
    """An element: of a tensor of bools a condition, of one of whole numbers a number."""
    book = next(x.tensors for x in indices if isinstance(x, Number))
    if len(indices) != tensor.dim() or tensor.is_floating_point():
        raise Unreadable("it reads a row, or floats")
    letters: list[Any] = []
    for x in indices:
        terms, number = _sum(x)
        if not terms:
            letters.append(number)
        elif len(terms) == 1 and number == 0 and terms[0][0] == 1 and terms[0][1][0] in _LETTERS:
            letters.append(terms[0][1][0])
        else:
            raise Unreadable("it reads at an index that is computed")
    at = next((i for i, known in enumerate(book) if known is tensor), len(book))
    if at == len(book):
        book.append(tensor)
    if tensor.dtype == torch.bool:
        return Condition(book, ("flag", at, tuple(letters)))
    return Number(book, ((1, ("load", at, tuple(letters))),), 0)


def parts_of(node: Node) -> tuple[Node, ...]:
    """What has to hold together."""
    return node[1:] if node[0] == "and" else (node,)


def conjunction(parts: Iterable[Node]) -> Node:
    """What holds where all of these do."""
    kept = [part for part in parts if part != TRUE]
    return ("and", *kept) if len(kept) > 1 else kept[0] if kept else TRUE

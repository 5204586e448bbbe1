"""Where the languages that expressions are printed in differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flashgen.symbolic.printer.text import closed


class Dialect(Protocol):
    """A language.

    Attributes:
        floors: whether its ``//`` and ``%`` round down.
        loads_are_tensors: whether an element of a declared tensor is a tensor itself.
    """

    floors: bool
    loads_are_tensors: bool

    def call(self, function: str, x: str, tensor: bool, approximate: bool) -> str:
        """``exp``, ``exp2``, ``log``, ``tanh``, ``sin``, ``cos``, ``sqrt``, ``rsqrt``, ``abs``."""

    def power(self, x: str, exponent: str) -> str:
        """``x`` from 0 on to any power."""

    def to_float(self, x: str, tensor: bool) -> str:
        """An integer as a float."""

    def to_integer(self, x: str, tensor: bool) -> str:
        """A float without its fraction."""

    def load(self, tensor: str, indices: Sequence[str], integral: bool) -> str:
        """An element of a declared tensor."""

    def extreme(self, name: str, a: str, b: str, tensors: tuple[bool, bool], real: bool) -> str:
        """``min`` or ``max`` of two values."""

    def select(
        self, when: str, a: str, b: str, tensors: tuple[bool, bool, bool], real: bool
    ) -> str:
        """``a`` where the condition holds, else ``b``."""

    def invert(self, condition: str, tensor: bool) -> str:
        """The opposite of a condition."""

    def reduce(self, name: str, x: str) -> str:
        """The ``min`` or ``max`` of a vector over the rows of a tile."""


class Triton:
    """Inside a Triton kernel; int32 and float32 throughout."""

    floors = False
    loads_are_tensors = False

    def call(self, function: str, x: str, tensor: bool, approximate: bool) -> str:
        """A function of ``tl``; ``_tanh`` is one that the module brings along."""
        if function == "tanh":
            return f"_tanh({x}, {'APPROX' if approximate else False})"
        return f"tl.math.exp2({x})" if function == "exp2" else f"tl.{function}({x})"

    def power(self, x: str, exponent: str) -> str:
        """Of 0, whose logarithm is -inf, it is 0, as it should be."""
        return f"tl.math.exp2({closed(exponent)} * tl.log2({x}))"

    def to_float(self, x: str, tensor: bool) -> str:
        """An int32 as a float32: exact below 2^24."""
        return f"tl.cast({x}, tl.float32)"

    def to_integer(self, x: str, tensor: bool) -> str:
        """Rounds towards zero."""
        return f"tl.cast({x}, tl.int32)"

    def load(self, tensor: str, indices: Sequence[str], integral: bool) -> str:
        """A function that the module brings along, one for each number of dimensions."""
        return f"_at_{len(indices)}d({', '.join((tensor, *indices))})"

    def extreme(self, name: str, a: str, b: str, tensors: tuple[bool, bool], real: bool) -> str:
        """``min`` and ``max`` are for integer scalars: those of floats stay floats this way."""
        if not any(tensors) and not real:
            return f"{name}({a}, {b})"
        return f"tl.{name}imum({_float(a, real)}, {_float(b, real)})"

    def select(
        self, when: str, a: str, b: str, tensors: tuple[bool, bool, bool], real: bool
    ) -> str:
        """Float branches are floats: the type of the choice is that of both."""
        return f"tl.where({when}, {_float(a, real)}, {_float(b, real)})"

    def invert(self, condition: str, tensor: bool) -> str:
        """Conditions are one bit wide."""
        return f"~{closed(condition)}"

    def reduce(self, name: str, x: str) -> str:
        """A scalar."""
        return f"tl.{name}({x}, 0)"


class Torch:
    """Eager PyTorch: indices, the score and elements are tensors, the rest are Python numbers.

    A variable ``dtype`` holds what to compute in. torch would take an integer tensor to its default
    dtype; and the same goes for a choice between two Python numbers.
    """

    floors = True
    loads_are_tensors = True

    def call(self, function: str, x: str, tensor: bool, approximate: bool) -> str:
        """``torch.exp`` or ``math.exp``."""
        if function == "abs":
            return f"abs({x})"
        if function == "rsqrt" and not tensor:
            return f"(1 / math.sqrt({x}))"
        return f"{'torch' if tensor else 'math'}.{function}({x})"

    def power(self, x: str, exponent: str) -> str:
        """Python's operator, of tensors too."""
        return f"{closed(x)} ** {closed(exponent)}"

    def to_float(self, x: str, tensor: bool) -> str:
        """Python's numbers need no conversion."""
        return f"{closed(x)}.to(dtype)" if tensor else x

    def to_integer(self, x: str, tensor: bool) -> str:
        """Rounds towards zero."""
        return f"{closed(x)}.long()" if tensor else f"int({x})"

    def load(self, tensor: str, indices: Sequence[str], integral: bool) -> str:
        """Indexing; 16-bit elements are not computed with as such."""
        return f"{tensor}[{', '.join(indices)}]" + ("" if integral else ".to(dtype)")

    def extreme(self, name: str, a: str, b: str, tensors: tuple[bool, bool], real: bool) -> str:
        """torch.minimum takes two tensors, clamp one."""
        if all(tensors):
            return f"torch.{name}imum({a}, {b})"
        if not any(tensors):
            return f"{name}({a}, {b})"
        tensor, bound = (a, b) if tensors[0] else (b, a)
        return f"torch.clamp({tensor}, {'max' if name == 'min' else 'min'}={bound})"

    def select(
        self, when: str, a: str, b: str, tensors: tuple[bool, bool, bool], real: bool
    ) -> str:
        """Python's choice where the condition is Python's."""
        if not tensors[0]:
            return f"({a} if {when} else {b})"
        if real and not any(tensors[1:]):
            a, b = (f"torch.tensor({x}, dtype=dtype)" for x in (a, b))
        return f"torch.where({when}, {a}, {b})"

    def invert(self, condition: str, tensor: bool) -> str:
        """``~True`` is -2."""
        return f"~{closed(condition)}" if tensor else f"(not {closed(condition)})"

    def reduce(self, name: str, x: str) -> str:
        """Eager code has no tiles."""
        raise TypeError(f"the printer knows no tile in torch: {name} of {x}")


class Plain:
    """For a person to read, as in a comment."""

    floors = True
    loads_are_tensors = True

    def call(self, function: str, x: str, tensor: bool, approximate: bool) -> str:
        """``exp(x)``."""
        return f"{function}({x})"

    def power(self, x: str, exponent: str) -> str:
        """``x ** y``."""
        return f"{closed(x)} ** {closed(exponent)}"

    def to_float(self, x: str, tensor: bool) -> str:
        """Nothing: numbers are real."""
        return x

    def to_integer(self, x: str, tensor: bool) -> str:
        """``int(x)``."""
        return f"int({x})"

    def load(self, tensor: str, indices: Sequence[str], integral: bool) -> str:
        """Indexing."""
        return f"{tensor}[{', '.join(indices)}]"

    def extreme(self, name: str, a: str, b: str, tensors: tuple[bool, bool], real: bool) -> str:
        """``min(a, b)``."""
        return f"{name}({a}, {b})"

    def select(
        self, when: str, a: str, b: str, tensors: tuple[bool, bool, bool], real: bool
    ) -> str:
        """``where(condition, a, b)``."""
        return f"where({when}, {a}, {b})"

    def invert(self, condition: str, tensor: bool) -> str:
        """``~condition``."""
        return f"~{closed(condition)}"

    def reduce(self, name: str, x: str) -> str:
        """In words."""
        return f"{name}({x} over the rows)"


def _float(text: str, real: bool) -> str:
    """A whole number among floats, with its point."""
    return f"{text}.0" if real and text.lstrip("-").isdigit() else text

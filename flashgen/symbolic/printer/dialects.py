"""Where the languages that expressions are printed in differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from flashgen.symbolic.printer.text import Operand, called, closed


class Dialect(Protocol):
    """A language.

    Attributes:
        floors: whether its ``//`` and ``%`` round down.
        loads_are_tensors: whether an element of a declared tensor is a tensor itself.
        types_numbers: whether ``1`` among floats has to be ``1.0``.
        floats: integers that it has other floats of than converted ones, and these.
    """

    floors: bool
    loads_are_tensors: bool
    types_numbers: bool
    floats: Mapping[Any, str]

    def call(self, function: str, x: str, tensor: bool, approximate: bool) -> str:
        """``exp``, ``exp2``, ``log``, ``tanh``, ``sin``, ``cos``, ``sqrt``, ``rsqrt``, ``abs``,
        ``erf``, ``floor``, ``atan``.
        """

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

    def spread(self, x: str) -> str:
        """A value for each of the ``scores``."""


class Triton:
    """Inside a Triton kernel; int32 and float32 throughout.

    Attributes:
        language: what its functions are attributes of.
        jit: the decorator of a function.
        suffix: what the names of functions end in that the module brings along for expressions.
        exp2, approx: what it calls 2 to a power, and that ``tanh`` may be the hardware's.
    """

    floors = False
    loads_are_tensors = False
    types_numbers = True
    floats: Mapping[Any, str] = MappingProxyType({})
    language = "tl"
    jit = "triton.jit"
    suffix = ""
    exp2 = "tl.math.exp2"
    approx = "APPROX"

    def call(self, function: str, x: str, tensor: bool, approximate: bool) -> str:
        """A function of the language; ``_tanh`` is one that the module brings along."""
        if function == "tanh":
            return called(f"_tanh{self.suffix}", x, self.approx if approximate else False)
        return called(self.exp2 if function == "exp2" else f"{self.language}.{function}", x)

    def power(self, x: str, exponent: str) -> str:
        """Of 0, whose logarithm is -inf, it is 0, as it should be."""
        return called(self.exp2, f"{closed(exponent)} * {self.language}.log2({x})")

    def to_float(self, x: str, tensor: bool) -> str:
        """An int32 as a float32: exact below 2^24."""
        return called(f"{self.language}.cast", x, f"{self.language}.float32")

    def to_integer(self, x: str, tensor: bool) -> str:
        """Rounds towards zero."""
        return called(f"{self.language}.cast", x, f"{self.language}.int32")

    def load(self, tensor: str, indices: Sequence[str], integral: bool) -> str:
        """A function that the module brings along, one for each number of dimensions."""
        return called(f"_at_{len(indices)}d{self.suffix}", tensor, *indices)

    def extreme(self, name: str, a: str, b: str, tensors: tuple[bool, bool], real: bool) -> str:
        """``min`` and ``max`` are for integer scalars: those of floats stay floats this way."""
        if not any(tensors) and not real:
            return called(name, a, b)
        return called(f"{self.language}.{name}imum", a, b)

    def select(
        self, when: str, a: str, b: str, tensors: tuple[bool, bool, bool], real: bool
    ) -> str:
        """The type of the choice is that of both."""
        return called(f"{self.language}.where", when, a, b)

    def invert(self, condition: str, tensor: bool) -> str:
        """Conditions are one bit wide."""
        return f"~{closed(condition)}"

    def reduce(self, name: str, x: str) -> str:
        """A scalar."""
        return called(f"{self.language}.{name}", x, 0)

    def spread(self, x: str) -> str:
        """It takes their shape."""
        return f"{self.language}.zeros_like(scores) + ({x})"


class Gluon(Triton):
    """Inside a Gluon kernel, which has helper functions of its own, and the hardware's ``tanh``.

    Attributes:
        floats: positions that are cheaper to make as floats than to convert.
    """

    language = "gl"
    jit = "gluon.jit"
    suffix = "_hopper"
    exp2 = "gl.exp2"
    approx = "True"

    def __init__(self, floats: Mapping[Any, str]) -> None:
        self.floats = floats


TRITON = Triton()


class Torch:
    """Eager PyTorch: indices, the score and elements are tensors, the rest are Python numbers.

    A variable ``dtype`` holds what to compute in. torch would take an integer tensor to its default
    dtype; and the same goes for a choice between two Python numbers.
    """

    floors = True
    loads_are_tensors = True
    types_numbers = False
    floats: Mapping[Any, str] = MappingProxyType({})

    def call(self, function: str, x: str, tensor: bool, approximate: bool) -> str:
        """``torch.exp`` or ``math.exp``."""
        if function == "abs":
            return called("abs", x)
        if function == "rsqrt" and not tensor:
            return Operand(f"(1 / math.sqrt({x}))")
        return called(f"{'torch' if tensor else 'math'}.{function}", x)

    def power(self, x: str, exponent: str) -> str:
        """Python's operator, of tensors too."""
        return f"{closed(x)} ** {closed(exponent)}"

    def to_float(self, x: str, tensor: bool) -> str:
        """Python's numbers need no conversion."""
        return Operand(f"{closed(x)}.to(dtype)") if tensor else x

    def to_integer(self, x: str, tensor: bool) -> str:
        """Rounds towards zero."""
        return Operand(f"{closed(x)}.long()") if tensor else called("int", x)

    def load(self, tensor: str, indices: Sequence[str], integral: bool) -> str:
        """Indexing; 16-bit elements are not computed with as such."""
        element = f"{tensor}[{', '.join(indices)}]"
        return Operand(element if integral else f"{element}.to(dtype)")

    def extreme(self, name: str, a: str, b: str, tensors: tuple[bool, bool], real: bool) -> str:
        """torch.minimum takes two tensors, clamp one."""
        if all(tensors):
            return called(f"torch.{name}imum", a, b)
        if not any(tensors):
            return called(name, a, b)
        tensor, bound = (a, b) if tensors[0] else (b, a)
        return called("torch.clamp", tensor, f"{'max' if name == 'min' else 'min'}={bound}")

    def select(
        self, when: str, a: str, b: str, tensors: tuple[bool, bool, bool], real: bool
    ) -> str:
        """Python's choice where the condition is Python's."""
        if not tensors[0]:
            return Operand(f"({a} if {when} else {b})")
        if real and not any(tensors[1:]):
            a, b = (f"torch.tensor({x}, dtype=dtype)" for x in (a, b))
        return called("torch.where", when, a, b)

    def invert(self, condition: str, tensor: bool) -> str:
        """``~True`` is -2."""
        return f"~{closed(condition)}" if tensor else Operand(f"(not {closed(condition)})")

    def reduce(self, name: str, x: str) -> str:
        """Eager code has no tiles."""
        raise TypeError(f"the printer knows no tile in torch: {name} of {x}")

    def spread(self, x: str) -> str:
        """It takes their shape."""
        return f"torch.zeros_like(scores) + ({x})"


class Plain:
    """For a person to read, as in a comment."""

    floors = True
    loads_are_tensors = True
    types_numbers = False
    floats: Mapping[Any, str] = MappingProxyType({})

    def call(self, function: str, x: str, tensor: bool, approximate: bool) -> str:
        """``exp(x)``."""
        return called(function, x)

    def power(self, x: str, exponent: str) -> str:
        """``x ** y``."""
        return f"{closed(x)} ** {closed(exponent)}"

    def to_float(self, x: str, tensor: bool) -> str:
        """Nothing: numbers are real."""
        return x

    def to_integer(self, x: str, tensor: bool) -> str:
        """``int(x)``."""
        return called("int", x)

    def load(self, tensor: str, indices: Sequence[str], integral: bool) -> str:
        """Indexing."""
        return Operand(f"{tensor}[{', '.join(indices)}]")

    def extreme(self, name: str, a: str, b: str, tensors: tuple[bool, bool], real: bool) -> str:
        """``min(a, b)``."""
        return called(name, a, b)

    def select(
        self, when: str, a: str, b: str, tensors: tuple[bool, bool, bool], real: bool
    ) -> str:
        """``where(condition, a, b)``."""
        return called("where", when, a, b)

    def invert(self, condition: str, tensor: bool) -> str:
        """``~condition``."""
        return f"~{closed(condition)}"

    def reduce(self, name: str, x: str) -> str:
        """In words."""
        return called(name, f"{x} over the rows")

    def spread(self, x: str) -> str:
        """It goes without saying."""
        return x

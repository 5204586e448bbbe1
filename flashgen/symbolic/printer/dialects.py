"""The differences between the languages in which expressions are printed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from flashgen.symbolic.printer.text import Operand, called, closed


class Dialect(Protocol):
    """A language in which expressions are printed.

    Attributes:
        floors: whether its ``//`` and ``%`` round down.
        loads_are_tensors: whether an element of a declared tensor is a tensor itself.
        types_numbers: whether ``1`` among floats has to be ``1.0``.
        floats: the float forms of integers that need no conversion.
    """

    floors: bool
    loads_are_tensors: bool
    types_numbers: bool
    floats: Mapping[Any, str]

    def call(self, function: str, x: str, tensor: bool, approximate: bool) -> str:
        """A call of ``exp``, ``exp2``, ``log``, ``tanh``, ``sin``, ``cos``, ``sqrt``, ``rsqrt``,
        ``abs``, ``erf``, ``floor`` or ``atan``.
        """

    def power(self, x: str, exponent: str) -> str:
        """``x``, at least 0, to any power."""

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
        """A tile of one value, in the shape of ``scores``."""


class Triton:
    """Inside a Triton kernel; int32 and float32 throughout.

    Attributes:
        language: the module that its functions are attributes of.
        jit: the decorator of a function.
        suffix: the suffix of the names of the module's own functions for expressions.
        exp2: the name of its function of 2 to a power.
        approx: the flag that tells whether ``tanh`` may use the hardware's instruction.
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
        """A function of the language; ``_tanh`` is a function of the module itself."""
        if function == "tanh":
            return called(f"_tanh{self.suffix}", x, self.approx if approximate else False)
        return called(self.exp2 if function == "exp2" else f"{self.language}.{function}", x)

    def power(self, x: str, exponent: str) -> str:
        """A power by exponent and logarithm; 0, whose logarithm is -inf, gives 0."""
        return called(self.exp2, f"{closed(exponent)} * {self.language}.log2({x})")

    def to_float(self, x: str, tensor: bool) -> str:
        """An int32 as a float32: exact below 2^24."""
        return called(f"{self.language}.cast", x, f"{self.language}.float32")

    def to_integer(self, x: str, tensor: bool) -> str:
        """Rounds towards zero."""
        return called(f"{self.language}.cast", x, f"{self.language}.int32")

    def load(self, tensor: str, indices: Sequence[str], integral: bool) -> str:
        """A call of a function of the module, one for each number of dimensions."""
        return called(f"_at_{len(indices)}d{self.suffix}", tensor, *indices)

    def extreme(self, name: str, a: str, b: str, tensors: tuple[bool, bool], real: bool) -> str:
        """``min`` and ``max`` for integer scalars; ``minimum`` and ``maximum`` keep floats."""
        if not any(tensors) and not real:
            return called(name, a, b)
        return called(f"{self.language}.{name}imum", a, b)

    def select(
        self, when: str, a: str, b: str, tensors: tuple[bool, bool, bool], real: bool
    ) -> str:
        """A choice whose type is the type of both values."""
        return called(f"{self.language}.where", when, a, b)

    def invert(self, condition: str, tensor: bool) -> str:
        """``~``; conditions are one bit wide."""
        return f"~{closed(condition)}"

    def reduce(self, name: str, x: str) -> str:
        """A scalar: the reduction over the rows of a tile."""
        return called(f"{self.language}.{name}", x, 0)

    def spread(self, x: str) -> str:
        """A value in the shape of ``scores``."""
        return f"{self.language}.zeros_like(scores) + ({x})"


class Gluon(Triton):
    """Inside a Gluon kernel, with its own helper functions and the hardware's ``tanh``.

    Attributes:
        floats: float forms of positions, which are cheaper than conversions.
    """

    language = "gl"
    jit = "gluon.jit"
    suffix = "_hopper"
    exp2 = "gl.exp2"
    approx = "True"

    def __init__(self, floats: Mapping[Any, str]) -> None:
        self.floats = floats

    def call(self, function: str, x: str, tensor: bool, approximate: bool) -> str:
        """The same; ``exp`` as a power of 2, for which no predicate keeps subnormal results.

        Predicates are few, and instructions of consumers wait for them one after another.
        """
        if function == "exp":
            return called(self.exp2, f"{closed(x)} * {math.log2(math.e)}")
        return super().call(function, x, tensor, approximate)


TRITON = Triton()


class Torch:
    """Eager PyTorch: indices, the score and elements are tensors, the rest are Python numbers.

    A variable ``dtype`` holds the dtype of the computation, because torch would convert an integer
    tensor, or a choice between two Python numbers, to its default dtype.
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
        """Python's operator, which serves tensors too."""
        return f"{closed(x)} ** {closed(exponent)}"

    def to_float(self, x: str, tensor: bool) -> str:
        """Python's numbers need no conversion."""
        return Operand(f"{closed(x)}.to(dtype)") if tensor else x

    def to_integer(self, x: str, tensor: bool) -> str:
        """Rounds towards zero."""
        return Operand(f"{closed(x)}.long()") if tensor else called("int", x)

    def load(self, tensor: str, indices: Sequence[str], integral: bool) -> str:
        """Indexing; floats, such as 16-bit elements, are converted to ``dtype``."""
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
        """``torch.where``, or Python's choice for a Python condition."""
        if not tensors[0]:
            return Operand(f"({a} if {when} else {b})")
        if real and not any(tensors[1:]):
            a, b = (f"torch.tensor({x}, dtype=dtype)" for x in (a, b))
        return called("torch.where", when, a, b)

    def invert(self, condition: str, tensor: bool) -> str:
        """``~`` for tensors, ``not`` for Python conditions, because ``~True`` is -2."""
        return f"~{closed(condition)}" if tensor else Operand(f"(not {closed(condition)})")

    def reduce(self, name: str, x: str) -> str:
        """Eager code has no tiles."""
        raise TypeError(f"the printer knows no tile in torch: {name} of {x}")

    def spread(self, x: str) -> str:
        """A value in the shape of ``scores``."""
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
        """The text unchanged: numbers are real."""
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
        """The reduction in words."""
        return called(name, f"{x} over the rows")

    def spread(self, x: str) -> str:
        """The text unchanged."""
        return x

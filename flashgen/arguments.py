"""What masks and scores take as an argument: a number, an expression or a tensor of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.errors import MaskError, shown
from flashgen.params import Float, Int, Tensor
from flashgen.tracing.expr import Expr, kv_len, q_len
from flashgen.tracing.kinds import INTEGER

#: ``(b, h) -> number``: an argument that may differ from sequence to sequence or head to head.
PerHead = Callable[[Any, Any], Any]

ALIGNMENTS = (None, "top_left", "bottom_right")

PER_HEAD = ("batch", "num_q_heads")


def shift(align: str | None) -> int | Expr:
    """The key position that query 0 stands at.

    Args:
        align: ``"top_left"``: query 0 at key 0; ``"bottom_right"``: the last query at the last key.
            None: the lengths are equal, so that it is both.

    Raises:
        MaskError: it is none of these.
    """
    if align not in ALIGNMENTS:
        raise MaskError(f"align={align!r}: unknown; choose None, 'top_left' or 'bottom_right'")
    return kv_len - q_len if align == "bottom_right" else 0


def disagreement(owner: str, align: str) -> MaskError:
    """What to say of a mask or a score function that has another alignment than its spec."""
    return MaskError(
        f"{owner} has another alignment than the spec, whose align is {align!r}; "
        "write it in one place"
    )


def declared(owner: str, name: str, value: Any, example: str) -> Tensor:
    """A declared `Tensor`, which may be a `Constant`.

    Args:
        owner: the mask or score that takes it, for the error.
        name: the argument's name.
        value: what was given for it.
        example: how one is declared, for the error.

    Raises:
        MaskError: it is something else.
    """
    if isinstance(value, Tensor):
        return value
    raise MaskError(f"{owner}: {name}={shown(value)}; give a declared tensor, as {example}")


def whole(owner: str, name: str, value: Any, least: int | None = None) -> PerHead:
    """A whole number: as it is given, an expression, or an element of an int32 tensor.

    Args:
        owner: the mask that takes it, for the error.
        name: the argument's name.
        value: an int; an `Int`, or an expression of such and the lengths; a `Tensor` of dims
            ``("batch",)``, ``("num_q_heads",)`` or both.
        least: what a number is at least.

    Raises:
        MaskError: it is none of these.
    """
    if isinstance(value, Tensor) and value.dtype == "int32":
        return per_head(owner, name, value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, Expr) and value.kind == INTEGER):
        raise MaskError(
            f"{owner}: {name}={value!r}; give a whole number, an Int or a Tensor of dtype 'int32'"
        )
    if is_number and least is not None and value < least:
        raise MaskError(f"{owner}: {name}={value}; give a number from {least} up, or an Int")
    return lambda b, h: value


def divisor(owner: str, name: str, value: Any) -> int | Int:
    """A whole number that positions are divided by, so that it has to be known as positive.

    Raises:
        MaskError: it is neither a number from 1 up nor an `Int` that promises to be one.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, Int) and value.min >= 1:
        return value
    raise MaskError(
        f"{owner}: {name}={value!r}; give a number from 1 up, or an Int declared with min=1"
    )


def positive(owner: str, name: str, value: Any) -> PerHead:
    """A positive number: as it is given, a `Float` above 0, or an element of a float tensor.

    Raises:
        MaskError: it is none of these.
    """
    if isinstance(value, Tensor) and value.is_float:
        return per_head(owner, name, value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_above_0 = isinstance(value, Float) and value.above is not None and value.above >= 0
    if not is_above_0 and not (is_number and 2.0**-126 <= value < 2.0**128):  # a normal float32
        raise MaskError(
            f"{owner}: {name}={value!r}; give a positive number of 32 bits, a Float declared with "
            "above=0 or a Tensor of floats"
        )
    return lambda b, h: value


def per_head(owner: str, name: str, tensor: Tensor) -> PerHead:
    """The element of a tensor of dims ``("batch",)``, ``("num_q_heads",)`` or both."""
    check_dims(owner, name, tensor, PER_HEAD)
    return lambda b, h: entry(tensor, batch=b, num_q_heads=h)


def check_dims(owner: str, name: str, tensor: Tensor, accepted: tuple[str, ...]) -> None:
    """Raises MaskError unless each dimension has one of these names, each at most once, or is 1."""
    dims = [name for name in tensor.names if name != "1"]
    if len(set(dims)) < len(dims) or not set(dims) <= set(accepted):
        raise MaskError(
            f"{owner}: {name}={tensor!r}; its dimensions can be {', '.join(accepted)} and 1"
        )


def entry(tensor: Tensor, **indices: Any) -> Any:
    """The element of a tensor at the index of each of its dimensions, by the dimensions' names."""
    return tensor[tuple(0 if name == "1" else indices[name] for name in tensor.names)]


def label(name: str, *arguments: Any, align: str | None = None) -> str:
    """How a person writes the call: ``"sliding_window(left, 0, align='top_left')"``.

    Arguments that are None were left out.
    """
    shown = [a.name if isinstance(a, Tensor) else str(a) for a in arguments if a is not None]
    if align is not None:
        shown.append(f"align={align!r}")
    return f"{name}({', '.join(shown)})"

"""torch's devices and dtypes for a symbolic value: its attributes, and arguments of casts."""

from __future__ import annotations

from typing import Any

from flashgen.tracing.user_code import mistake

#: The kind of each dtype; numbers are real until a kernel prints them, whatever the float type.
_KINDS = {
    **dict.fromkeys(("bool",), "condition"),
    **dict.fromkeys(("int", "int32", "int64", "long"), "integer"),
    **dict.fromkeys(
        ("float", "float16", "float32", "float64", "half", "double", "bfloat16"), "number"
    ),
}


class Device(str):
    """A symbolic value's device: it has none, and any will do."""

    __slots__ = ()

    type = "cpu"
    index = None  # type: ignore[assignment]

    def __new__(cls) -> Device:
        """A device that torch's own functions take as ``device=``."""
        return super().__new__(cls, cls.type)


class Shape(tuple[int, ...]):
    """A symbolic value's shape: of a single number, as torch's own functions take it."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        """A slice; raises MaskError for a size, which a single number does not have."""
        if isinstance(index, slice):
            return super().__getitem__(index)
        raise mistake(
            f"size {index} of a symbolic value, which has no dimension",
            "sizes are q_len, kv_len, numbers and Int parameters",
        )


def is_device(target: Any) -> bool:
    """Whether an argument of ``.to`` is a device: torch's, ``"cuda:0"`` or a number."""
    if isinstance(target, str | int):
        return True
    return hasattr(target, "type") and hasattr(target, "index") and not hasattr(target, "kind")


def dtype_of(kind: str) -> Any:
    """Torch's dtype for a value of a kind."""
    import torch

    return {"condition": torch.bool, "integer": torch.int32}.get(kind, torch.float32)


def kind_of_dtype(dtype: Any) -> str:
    """The kind of values of a dtype, or of another symbolic value or tensor.

    Raises:
        MaskError: integers of so few bits wrap around, or there is no such kind.
    """
    if getattr(dtype, "kind", None) in ("condition", "integer", "number"):
        return str(dtype.kind)
    name = _name_of(dtype)
    if name not in _KINDS:
        raise mistake(
            f"`{dtype}` is no type of symbolic values, which are whole numbers of 32 bits, "
            "floats and conditions",
            "cast to torch.int32, torch.float32 or torch.bool",
        )
    return _KINDS[name]


def is_half(dtype: Any) -> bool:
    """Whether a dtype is a float type of 16 bits."""
    return _name_of(dtype) in ("float16", "half", "bfloat16")


def _name_of(dtype: Any) -> str:
    name = str(getattr(dtype, "dtype", None) or getattr(dtype, "__name__", dtype))
    return name.rpartition(".")[2].removesuffix("Tensor").lower()

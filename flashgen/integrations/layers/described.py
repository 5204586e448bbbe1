"""DescribedMask: what a mask function hands to an attention function."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.nn.attention.flex_attention import BlockMask

from flashgen.integrations.layers.recorded import Node


@dataclass(frozen=True)
class TensorKind:
    """A tensor that a mask reads.

    Attributes:
        name: of the parameter.
        dims: of each dimension ``"batch"``, ``"num_q_heads"``, ``"q_len"``, ``"kv_len"`` or a
            number.
        dtype: ``"int32"`` or ``"bool"``.
        in_order: whether its elements are expected not to fall: see `flashgen.Tensor`'s ``sorted``.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: str
    in_order: bool = False


@dataclass(frozen=True)
class MaskKind:
    """What a module depends on.

    Attributes:
        node: the condition, in positions among the keys of a call: see `recorded`. In place of an
            int it may have ``("n", place, sign)``, of the number at that place. It may also have
            ``("chunk", tensor, number, elements)``: both positions, counted from the tensor's
            element, are in one chunk of that size, where elements are the place of a tensor to
            take for positions, or None; ``("padding",)`` and ``("range",)``; and, alone,
            ``("row_elements",)`` and ``("row_range",)``.
        tensors: the tensors, in the order of their places.
        numbers: the names of the numbers.
        text: all of that.
    """

    node: Node
    tensors: tuple[TensorKind, ...] = ()
    numbers: tuple[str, ...] = ()
    text: str = field(init=False, compare=False, default="")

    def __post_init__(self) -> None:
        """Writes the text, once for the many calls that compare it."""
        tensors = tuple((x.name, x.dims, x.dtype, x.in_order) for x in self.tensors)
        object.__setattr__(self, "text", repr((self.node, tensors, self.numbers)))

    @classmethod
    def of_text(cls, text: str) -> MaskKind:
        """The kind with a text."""
        node, tensors, numbers = ast.literal_eval(text)
        return cls(node, tuple(TensorKind(*x) for x in tensors), numbers)


class DescribedMask(BlockMask):
    """A mask by its description. It is a BlockMask for the sake of ``isinstance`` alone.

    transformers passes a mask that was made before a call, as for a static cache, through its
    functions, which let tensors and BlockMasks of four dimensions pass.

    Attributes:
        kind: what is compiled.
        numbers: the values of the kind's numbers.
        tables: the kind's tensors.
        valid: how many of the keys there are for the last query; the others are not written yet.
        kv_lens: the same on the device, int32 (batch,), for the cache kernels; None where these
            are not for the call.
        size: (batch, 1, q_len, kv_len).
        dense: makes the mask's elements.
        bounds: makes a description by bounds of the keys that are no padding; None where this is
            one, or there is no padding.
        ready: what `layers.calls` keeps for the layers that share the mask.
    """

    def __init__(
        self,
        kind: MaskKind,
        numbers: tuple[int, ...],
        tables: tuple[torch.Tensor, ...],
        valid: int | None,
        kv_lens: torch.Tensor | None,
        size: tuple[int, int, int, int],
        dense: Callable[[], torch.Tensor],
    ) -> None:
        self.kind, self.numbers, self.tables = kind, numbers, tables
        self.valid, self.kv_lens, self.size, self.dense = valid, kv_lens, size, dense
        self.bounds: Callable[[], DescribedMask] | None = None
        self.ready: dict[Any, Any] = {}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, 1, q_len, kv_len), as of a tensor of bools."""
        return self.size

    @property
    def ndim(self) -> int:
        """4."""
        return 4

    def dim(self) -> int:
        """4."""
        return 4

    def to(self, device: torch.device | str, *arguments: Any, **options: Any) -> DescribedMask:
        """The same on another device, as for the layers that are there."""
        tables = tuple(x.to(device) for x in self.tables)
        kv_lens = None if self.kv_lens is None else self.kv_lens.to(device)
        moved = DescribedMask(
            self.kind,
            self.numbers,
            tables,
            self.valid,
            kv_lens,
            self.size,
            lambda: self.dense().to(device),
        )
        if self.bounds is not None:
            moved.bounds = lambda: self.bounded().to(device)
        return moved

    def bounded(self) -> DescribedMask:
        """The same with padding as bounds, which are found once, at the first call."""
        if self.bounds is None:
            return self
        if torch.compiler.is_compiling():
            return self.bounds()
        if "bounded" not in self.ready:
            self.ready["bounded"] = self.bounds()
        found: DescribedMask = self.ready["bounded"]
        return found

    def options(self) -> dict[str, Any]:
        """The numbers and the tables by the names that a module has for them."""
        named: dict[str, Any] = dict(zip(self.kind.numbers, self.numbers, strict=True))
        for tensor, table in zip(self.kind.tensors, self.tables, strict=True):
            named[tensor.name] = table
        return named

    def to_dense(self) -> torch.Tensor:
        """Bool (batch, 1, q_len, kv_len): what each query sees."""
        return self.dense()

    def _none(self, *arguments: Any, **options: Any) -> NoReturn:
        raise TypeError(
            "this mask is for flashgen's attention, and has no elements: "
            "mask.to_dense() is a tensor of bools"
        )

    __getitem__ = as_tuple = to_string = sparsity = numel = _none

    def __repr__(self) -> str:
        return f"DescribedMask({self.kind.node}, size={self.size})"

    __str__ = __repr__

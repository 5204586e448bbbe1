"""Masks with gaps between the keys that a query sees: steps, strides and neighbourhoods."""

from __future__ import annotations

from typing import Any

from flashgen.arguments import divisor, label, shift, whole
from flashgen.errors import MaskError
from flashgen.functions import maximum, minimum
from flashgen.masks.mask import Mask
from flashgen.params import Int
from flashgen.tracing.expr import Expr


def dilated(step: int | Int, *, align: str | None = None) -> Mask:
    """A query sees every ``step``-th key, counted from its own position in both directions.

    ``dilated(2) & sliding_window(512, 512)`` is Longformer's dilated window (Beltagy et al. 2020,
    https://arxiv.org/abs/2004.05150, section 3.1).

    Args:
        step: a number, or an `Int` with min=1 that the call chooses; 1 is every key.
        align: which key is at a query's own position when q_len and kv_len differ; see `causal`.
    """
    gap = divisor("dilated", "step", step)
    offset = shift(align)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx + offset - kv_idx) % gap == 0

    return Mask(
        mask_mod, label("dilated", step, align=align), equal_lengths=align is None, align=align
    )


def strided(stride: int | Int, *, heads: str = "merged", align: str | None = None) -> Mask:
    """A query sees its last ``stride`` predecessors, and every ``stride``-th position before it.

    The strided attention of the Sparse Transformer (Child et al. 2019,
    https://arxiv.org/abs/1904.10509, section 4.3): with ``distance = q - kv >= 0``, the local
    pattern is ``distance <= stride``, the column pattern ``distance % stride == 0``.

    Args:
        stride: a number, or an `Int` with min=1 that the call chooses.
        heads: ``"merged"``: every head sees both patterns; ``"alternating"``: heads 0, 2, ... the
            local one and heads 1, 3, ... the columns.
        align: which key is at a query's own position when q_len and kv_len differ; see `causal`.
    """
    step = divisor("strided", "stride", stride)
    if heads not in ("merged", "alternating"):
        raise MaskError(f"strided: heads={heads!r}: unknown; choose 'merged' or 'alternating'")
    offset = shift(align)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx + offset - kv_idx
        local, column = distance <= step, distance % step == 0
        if heads == "alternating":
            local, column = local & (h % 2 == 0), column & (h % 2 == 1)
        return (distance >= 0) & (local | column)

    split = None if heads == "merged" else f"heads={heads!r}"
    name = label("strided", stride, split, align=align)
    return Mask(mask_mod, name, equal_lengths=align is None, align=align)


def natten_2d(
    height: int | Expr, width: int | Int, kernel: int | Expr | tuple[int | Expr, int | Expr]
) -> Mask:
    """A pixel sees the ``kernel`` by ``kernel`` pixels around it; at a border, those nearest to it.

    Neighbourhood attention (Hassani et al. 2023, https://arxiv.org/abs/2204.07143): the window is
    pushed back into the image, so that all pixels see equally many. Position
    ``y * width + x`` is the pixel in row y and column x, and q_len and kv_len are equal.

    Args:
        height: rows of the image: a number, or an `Int` that the call chooses.
        width: pixels a row: a number, or an `Int` with min=1.
        kernel: the window's side, or its (rows, columns). A window of an even side has its longer
            half first. If the image is smaller than the window, a pixel sees all of it.
    """
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    if len(sides) != 2:
        raise MaskError(f"natten_2d: kernel={kernel!r}; give one side, or (rows, columns)")
    rows, columns = (whole("natten_2d", "kernel", side, least=1) for side in sides)
    image_rows, row_pixels = (
        whole("natten_2d", "height", height, least=1),
        divisor("natten_2d", "width", width),
    )

    def near(center: Any, at: Any, side: Any, size: Any) -> Any:
        first = minimum(maximum(center - side // 2, 0), maximum(size - side, 0))
        return (at >= first) & (at < first + side)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return near(q_idx // row_pixels, kv_idx // row_pixels, rows(b, h), image_rows(b, h)) & near(
            q_idx % row_pixels, kv_idx % row_pixels, columns(b, h), row_pixels
        )

    return Mask(
        mask_mod, label("natten_2d", height, width, _shown(kernel)), equal_lengths=True, moves=False
    )


def _shown(kernel: Any) -> str:
    return f"({', '.join(map(str, kernel))})" if isinstance(kernel, tuple) else str(kernel)

"""Runs printed Triton expressions with numpy: a stand-in for ``tl`` that takes types as they come.

An integer that meets a float unconverted comes out as float64 in numpy: `run` refuses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from flashgen.symbolic.hoisting import Hoisted
from flashgen.symbolic.printer.code import Code

#: What the module brings along.
_HELPER = re.compile(r"_at_\d+d|_tanh|tl|APPROX")

Q_IDX = np.arange(7, 12)[:, None]
KV_IDX = np.arange(3, 10)[None, :]


def language(real: type) -> SimpleNamespace:
    """``tl``, its float32 being ``real``."""

    def where(when: Any, a: Any, b: Any) -> Any:
        chosen = np.where(when, a, b)
        numbers = isinstance(a, float) or isinstance(b, float)
        return chosen.astype(real) if numbers else chosen

    def cast(x: Any, to: type) -> Any:
        with np.errstate(invalid="ignore"):
            return np.asarray(x).astype(to)

    def of_floats(function: Any) -> Any:
        def apply(x: Any) -> Any:
            assert np.asarray(x).dtype == real, f"{function} of {np.asarray(x).dtype}"
            with np.errstate(all="ignore"):
                return function(x)

        return apply

    return SimpleNamespace(
        where=where,
        cast=cast,
        float32=real,
        int32=np.int32 if real is np.float32 else np.int64,
        minimum=np.minimum,
        maximum=np.maximum,
        min=np.min,
        max=np.max,
        abs=np.abs,
        exp=of_floats(np.exp),
        log=of_floats(np.log),
        log2=of_floats(np.log2),
        sin=of_floats(np.sin),
        cos=of_floats(np.cos),
        sqrt=of_floats(np.sqrt),
        erf=of_floats(np.vectorize(math.erf, otypes=[real])),
        floor=of_floats(np.floor),
        rsqrt=of_floats(lambda x: (1 / np.sqrt(x)).astype(real)),
        math=SimpleNamespace(exp2=of_floats(np.exp2)),
    )


def scope_of(values: Mapping[str, Any], real: type) -> dict[str, Any]:
    """The names that code may read: values in the types of the kernel, ``tl`` and the helpers."""
    whole = np.int32 if real is np.float32 else np.int64

    def typed(value: Any) -> Any:
        array = np.asarray(value)
        array = array.astype(real if array.dtype.kind == "f" else whole)
        return array if array.ndim else array[()]

    def at(tensor: Any, *indices: Any) -> Any:
        inside = np.bool_(True)
        for index, size in zip(indices, tensor.shape, strict=True):
            inside = inside & (index >= 0) & (index < size)
        safe = tuple(np.clip(i, 0, n - 1) for i, n in zip(indices, tensor.shape, strict=True))
        return np.where(inside, tensor[safe], tensor.dtype.type(0))

    return {
        **{name: typed(value) for name, value in values.items()},
        **{f"_at_{n}d": at for n in range(1, 5)},
        "_tanh": lambda x, approx: np.tanh(x),
        "APPROX": False,
        "tl": language(real),
    }


def run(hoisted: Hoisted, values: Mapping[str, Any], real: type = np.float64) -> list[Any]:
    """The results, after every assignment where it belongs.

    Only what `carried` lists reaches the inner part, as in the kernel.
    """
    scope = scope_of(values, real)
    shapes = {"scalars": (1, 1), "rows": (len(Q_IDX), 1), "columns": (1, KV_IDX.size)}
    outer = {name: value for name, value in scope.items() if name not in ("kv_idx", "scores")}
    for group in ("scalars", "rows"):
        for assignment in getattr(hoisted, group):
            outer[assignment.name] = _evaluated(assignment.code, outer, real, shapes[group])
    given = {name: outer[name] for name in hoisted.carried}
    helpers = {name: value for name, value in outer.items() if _HELPER.fullmatch(name)}
    inner = {**given, **helpers, **{n: scope[n] for n in ("kv_idx", "scores") if n in scope}}
    for group in ("columns", "elements"):
        for assignment in getattr(hoisted, group):
            shape = shapes.get(group, (len(Q_IDX), KV_IDX.size))
            inner[assignment.name] = _evaluated(assignment.code, inner, real, shape)
    return [_evaluated(code, inner, real, (len(Q_IDX), KV_IDX.size)) for code in hoisted.results]


def _evaluated(code: Code, scope: dict[str, Any], real: type, shape: tuple[int, int]) -> Any:
    value = eval(code.text(), {}, scope)
    dtype = np.asarray(value).dtype
    if not isinstance(value, int | float):
        assert dtype.kind in "iub" or dtype == real, f"{code.text()} is of {dtype}"
    np.broadcast_to(value, shape)  # it has no dimension that its place lacks
    return value

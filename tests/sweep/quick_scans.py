"""Scans of Triton's interpreter of all elements at a time: Triton's goes from one to the next."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from triton.runtime.interpreter import ScanOps


def quicken_scans() -> None:
    """Puts it there; sums and products are Triton's own, by numpy."""
    ScanOps.generic_scan = functools.wraps(ScanOps.generic_scan)(_scan)


def _scan(self: Any, input: Any) -> list[Any]:
    """After each step an element holds twice as many of those before it, as on a GPU."""
    kinds = [x.dtype for x in input]
    data = [x.handle.data for x in input]
    shape, axis = data[0].shape, self.axis
    places = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    step = 1
    while step < shape[axis]:
        earlier = [np.roll(x, step, axis) for x in data]
        both = zip([*earlier, *data], [*kinds, *kinds], strict=True)
        found = self.combine_fn.fn(*(self.to_tensor(x, kind) for x, kind in both))
        found = found if isinstance(found, tuple) else (found,)
        data = [np.where(places < step, x, y.handle.data) for x, y in zip(data, found, strict=True)]
        step *= 2
    return [self.to_tensor(x, kind) for x, kind in zip(data, kinds, strict=True)]

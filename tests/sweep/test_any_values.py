"""Values that nobody would choose, for every shipped variant: each kernel gives what its mask says.

Numbers at the ends of their ranges, ids in no order, sinks of -inf and of the least float. What
steep scores do is in test_hopper_steep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen import Float, Int, Tensor
from flashgen.declared import Param
from support.cases import Case
from support.variants import first_on_hopper, gluon_specs, rendered_module, shipped_specs
from sweep.hopper import check_hopper, shipped
from sweep.launch import check_kernel

LENGTH, HEADS = 150, 3
LARGEST = 2**31 - 1
LEAST = torch.finfo(torch.float32).min


def _least(param: Param) -> Any:
    """The least that a call may bring."""
    if isinstance(param, Int):
        return param.min
    if isinstance(param, Float):
        return 2.0**-60 if param.above == 0 else -(2.0**60)
    if isinstance(param, Tensor) and param.dtype == "int32":
        return torch.full((1, LENGTH), -(2**31), dtype=torch.int32)
    if isinstance(param, Tensor):
        return torch.tensor([-torch.inf, LEAST, -1e30]).to(getattr(torch, param.dtype))
    return None


def _largest(param: Param) -> Any:
    """The largest."""
    if isinstance(param, Int):
        return LARGEST
    if isinstance(param, Float):
        return 2.0**60
    if isinstance(param, Tensor) and param.dtype == "int32":
        return torch.full((1, LENGTH), LARGEST, dtype=torch.int32)
    if isinstance(param, Tensor):
        return torch.tensor([80.0, 0.0, -torch.inf]).to(getattr(torch, param.dtype))
    return None


def _mixed(param: Param) -> Any:
    """Ids in no order, with padding and both ends of their range among them."""
    if isinstance(param, Tensor) and param.dtype == "int32":
        ids = torch.tensor([3, -1, LARGEST, 0, -(2**31), 3, 7, -2])
        return ids.repeat_interleave(19)[:LENGTH].int()[None]
    return _least(param) if isinstance(param, Int) else _largest(param)


VALUES: dict[str, Callable[[Param], Any]] = {
    "least": _least,
    "largest": _largest,
    "mixed": _mixed,
}


def _case(name: str, values: str) -> Case:
    given = {param.name: VALUES[values](param) for param in shipped_specs()[name].params}
    given = {name: value for name, value in given.items() if value is not None}
    return Case(LENGTH, LENGTH, q_heads=HEADS, kv_heads=HEADS, params=given)


#: Variants whose calls bring something, with each kind of values.
CALLS = [
    (name, values)
    for name, spec in shipped_specs().items()
    for values in VALUES
    if any(VALUES[values](param) is not None for param in spec.params)
]


@pytest.mark.parametrize(("name", "values"), CALLS)
def test_portable(name: str, values: str) -> None:
    spec = shipped_specs()[name]
    check_kernel(rendered_module(spec), spec, _case(name, values))


@pytest.mark.parametrize(("name", "values"), [x for x in CALLS if x[0] in gluon_specs()])
def test_gluon(name: str, values: str) -> None:
    spec = gluon_specs()[name]
    check_hopper(shipped(name), spec, _case(name, values), first_on_hopper(spec))

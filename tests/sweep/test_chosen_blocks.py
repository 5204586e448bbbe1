"""Masks of chosen blocks: all kernels of both passes, beside float64."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest

from flashgen.config import KernelConfig
from support.chosen import CHOSEN, chosen_case, chosen_spec
from support.gluon import interpreted
from support.variants import rendered_module
from sweep.backward import check_backward
from sweep.hopper import check_hopper, check_hopper_backward
from sweep.launch import check_kernel


@functools.cache
def _portable(name: str) -> ModuleType:
    return rendered_module(chosen_spec(name))


@functools.cache
def _gluon(name: str) -> ModuleType:
    spec = chosen_spec(name, 64, "bfloat16")
    return rendered_module(spec, hopper=True, edit_source=interpreted)


@functools.cache
def _gluon_spec(name: str):  # the module's plan is found by the object
    return chosen_spec(name, 64, "bfloat16")


@pytest.mark.parametrize("name", CHOSEN)
def test_portable_kernels(name: str) -> None:
    spec = chosen_spec(name)
    module = rendered_module(spec)
    case = chosen_case(name, 200, (2, 4, 2))
    check_kernel(module, spec, case, BLOCK_M=32, BLOCK_N=16)
    check_kernel(module, spec, case, BLOCK_M=64, BLOCK_N=128)
    check_backward(module, spec, case, BLOCK_M=32, BLOCK_N=64)


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("heads", [(1, 8, 1), (2, 6, 3)], ids=str)
def test_gluon_forward(name: str, heads: tuple[int, int, int]) -> None:
    spec = chosen_spec(name, 64, "bfloat16")
    module = rendered_module(spec, hopper=True, edit_source=interpreted)
    case = chosen_case(name, 200, heads)
    check_hopper(module, spec, case, KernelConfig(128, 64, 8, 2))


@pytest.mark.parametrize("name", CHOSEN)
def test_gluon_backward(name: str) -> None:
    spec = chosen_spec(name, 64, "bfloat16")
    module = rendered_module(spec, hopper=True, edit_source=interpreted)
    check_hopper_backward(module, spec, chosen_case(name, 200, (1, 4, 2)))

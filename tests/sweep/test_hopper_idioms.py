"""What Gluon has of its own for functions as FlexAttention's users write them, against float64."""

from __future__ import annotations

import torch

from support.cases import Case
from support.gluon import interpreted
from support.idioms import BENT_BITS as SPEC
from support.variants import first_on_hopper, rendered_module
from sweep.hopper import check_hopper, check_hopper_backward

LENGTH = 200


def test_gluon_has_the_same_functions() -> None:
    module = rendered_module(SPEC, hopper=True, edit_source=interpreted)
    packed = (torch.arange(LENGTH * 25, dtype=torch.int32).reshape(LENGTH, 25) * 71 + 13) % 256
    case = Case(LENGTH, LENGTH, 1, 2, 1, params={"packed": packed})
    check_hopper(module, SPEC, case, first_on_hopper(SPEC))
    check_hopper_backward(module, SPEC, case)

"""A bias of -inf hides its key, as a mask does: rows that see nothing are 0, and nothing is NaN."""

from __future__ import annotations

import math

import pytest
import torch

from flashgen import AttentionSpec, Mask, Tensor, additive_bias, causal, full, sigmoid_attention
from flashgen.config import KernelConfig
from support.cases import Case
from support.gluon import interpreted
from support.variants import rendered_module
from sweep.backward import check_backward
from sweep.hopper import check_hopper, check_hopper_backward
from sweep.launch import check_kernel

OF_PAIRS = Tensor("bias", ("batch", 1, "q_len", "kv_len"))
OF_KEYS = Tensor("bias", ("batch", "kv_len"))
MASKS = [full(), causal(align="bottom_right")]
Q_LEN, KV_LEN = 45, 170


def _case(bias: Tensor) -> Case:
    """Keys padded on the left for longer than a tile, rows that see nothing, half of the pairs."""
    hidden = torch.zeros(2, 1, Q_LEN, KV_LEN, dtype=torch.bool)
    hidden[0, ..., :150] = True
    hidden[0, :, :20] = True
    hidden[1] = torch.rand(1, Q_LEN, KV_LEN) < 0.5
    if bias is OF_KEYS:
        hidden = hidden[:, 0, -1]
        hidden[1] = True
    values = torch.randn(hidden.shape).masked_fill(hidden, -math.inf)
    return Case(Q_LEN, KV_LEN, 2, 2, 1, params={"bias": values})


@pytest.mark.parametrize("bias", [OF_PAIRS, OF_KEYS], ids=["pairs", "keys"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.label)
def test_portable_kernels(mask: Mask, bias: Tensor) -> None:
    spec = AttentionSpec(head_dim=16, dtype="float16", mask=mask, score=additive_bias(bias))
    module = rendered_module(spec)
    check_kernel(module, spec, _case(bias))
    check_backward(module, spec, _case(bias))


def test_sigmoid_weights() -> None:
    spec = AttentionSpec(
        16, "float16", full(), additive_bias(OF_PAIRS), normaliser=sigmoid_attention()
    )
    module = rendered_module(spec)
    check_kernel(module, spec, _case(OF_PAIRS))
    check_backward(module, spec, _case(OF_PAIRS))


@pytest.mark.parametrize("bias", [OF_PAIRS, OF_KEYS], ids=["pairs", "keys"])
def test_gluon_kernels(bias: Tensor) -> None:
    spec = AttentionSpec(head_dim=64, dtype="float16", score=additive_bias(bias))
    module = rendered_module(spec, hopper=True, edit_source=interpreted)
    check_hopper(module, spec, _case(bias), KernelConfig(128, 64, 8, 2))
    if bias is OF_KEYS:  # what pairs learn is the portable kernels'
        check_hopper_backward(module, spec, _case(bias))

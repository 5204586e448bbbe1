"""What training asks of a module besides gradients: checkpoints, vmap, autocast, gradcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from support.cases import Case
from support.contract import native_inputs
from support.variants import shipped_module, shipped_specs

SPECS = shipped_specs()
pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

NAMES = ("causal_d64", "window_d128", "sinks_softmax_d64", "causal_fp32_d64", "dropout_causal_d64")
CASE = Case(12, 12, batch=2, q_heads=4, kv_heads=2)


def _leaves(name: str) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in native_inputs(CASE, SPECS[name])]


def _gradients(name: str, run: Any) -> tuple[torch.Tensor, ...]:
    leaves = _leaves(name)
    return torch.autograd.grad(run(*leaves).float().square().sum(), leaves)


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint(name: str) -> None:
    module, params = shipped_module(name), CASE.arguments(SPECS[name])

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return module.attention(q, k, v, **params)

    plain = _gradients(name, attention)
    again = _gradients(name, lambda *x: checkpoint(attention, *x, use_reentrant=False))
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["saved", "listed", "computed again"])
@pytest.mark.parametrize("name", NAMES)
def test_a_selective_checkpoint(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator has a name to save its results by: the attention then runs once."""
    module, params = shipped_module(name), CASE.arguments(SPECS[name])
    op, forward, runs = module.op, module._forward, []
    monkeypatch.setattr(module, "_forward", lambda *x: (runs.append(1), forward(*x))[1])

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        must = how == "saved" and function == op
        return CheckpointPolicy.MUST_SAVE if must else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 2 * module.attention(2 * q, k, v, **params).sin()

    def checkpointed(*x: torch.Tensor) -> Any:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts([op] if how == "listed" else policy)

        return checkpoint(block, *x, use_reentrant=False, context_fn=contexts)

    gradients = _gradients(name, checkpointed)
    assert len(runs) == (2 if how == "computed again" else 1)
    torch.testing.assert_close(gradients, _gradients(name, block), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_a_dimension(name: str) -> None:
    module, params = shipped_module(name), CASE.arguments(SPECS[name])
    stacks = [torch.stack([x, x.flip(2), 0.5 * x]) for x in native_inputs(CASE, SPECS[name])]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return module.attention(q, k, v, **params)

    one_by_one = torch.stack([attention(*x) for x in zip(*stacks, strict=True)])
    mapped = torch.func.vmap(attention)(*stacks)
    torch.testing.assert_close(mapped, one_by_one, rtol=0, atol=0)


def test_autocast_leaves_the_attention_alone() -> None:
    """A forward pass under autocast is computed in the module's dtype."""
    module = shipped_module("causal_fp32_d64")

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module.attention(*qkv)

    plain = _gradients("causal_fp32_d64", module.attention)
    cast = _gradients("causal_fp32_d64", attention)
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["causal_d64", "softcap_d128", "alibi_d128", "documents_d128"])
def test_gradcheck_of_the_reference(name: str) -> None:
    spec, case = SPECS[name], Case(5, 5, q_heads=2, kv_heads=1)
    module, params = shipped_module(name), case.arguments(SPECS[name])
    tensors = [x.double().requires_grad_() for x in native_inputs(case, spec)]

    def reference(*qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return module.reference(*qkv, return_lse=True, **params)

    assert torch.autograd.gradcheck(reference, tensors, fast_mode=True)

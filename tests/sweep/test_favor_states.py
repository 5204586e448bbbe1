"""States of random features in Triton's interpreter, and defects that calls in parts find."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Tensor, causal, document, favor, linear
from support.slip import with_slip
from support.variants import rendered_module
from support.vector_maps import by_weights

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
PLAIN = AttentionSpec((16, 24), "float32", mask=causal(), normaliser=linear(favor(32)))
TOKENS = AttentionSpec(
    (16, 24), "float32", mask=causal(), normaliser=linear(favor(256), decay=DECAY)
)
DOCUMENTS = AttentionSpec(
    (16, 24), "float32", mask=document() & causal(), normaliser=linear(favor(32))
)

#: Specs, and factors of the keys of each call: exponents of long keys are low. That of the step is
#: a row of the matrix: its exponent is the highest.
CALLS = {
    "lower": (PLAIN, (1.0, 4.0)),
    "much lower": (PLAIN, (1.0, 16.0)),
    "higher": (PLAIN, (5.0, 1.0)),
    "tiles of tokens": (TOKENS, (2.5, 1.0)),
    "documents": (DOCUMENTS, (1.0, 2.5)),
}

#: Defects: the text, what stands in its place, and the call that finds it.
DEFECTS = {
    "a state of another exponent": ("return first_kv * factor[:, :, None, None], first_z",
                                    "return first_kv, first_z", "higher"),
    "a sum of another exponent": (", first_z * factor[:, :, None], peaks", ", first_z, peaks",
                                  "higher"),
    "a gradient of another exponent": ("grad_kv * factor[:, :, None, None]", "grad_kv", "higher"),
    "a gradient of sums of another exponent": ("grad_z * factor[:, :, None]\n", "grad_z\n",
                                               "higher"),
    "the exponent of the call alone": ("peaks = torch.maximum(peaks, first_exponent + 56.0)",
                                       "peaks = 1.0 * peaks", "much lower"),
    "an exponent that is not returned": ("peaks - 56.0 if return_state", "peaks if return_state",
                                         "lower"),
    "a step of another exponent": ("first_kv * factor\n", "first_kv\n", "higher"),
    "a sum of a step of another exponent": ("first_z * factor\n", "first_z\n", "higher"),
}  # fmt: skip


def check(spec: AttentionSpec, factors: tuple[float, float], edit: Any = str) -> None:
    """Fails unless calls of parts give what one call gives in float64, and so their gradients."""
    module, generator = rendered_module(spec, edit_source=edit), torch.Generator().manual_seed(0)
    shapes = ((1, 2, 40, 16), (1, 1, 40, 16), (1, 1, 40, 24))
    q, k, v = (torch.randn(x, generator=generator) for x in shapes)
    matrix, outs, state = module.draw_features(0), [], None
    k[:, :, :21] *= factors[0]
    k[:, :, 21:] *= factors[1]
    k[:, :, 39] = 2.0 * matrix[0]  # q and k are multiplied by the root of the scale
    leaves = [x.requires_grad_() for x in (q, k, v)]
    decay = -torch.rand(1, 1, 40, generator=generator)
    ids = torch.tensor([[0] * 30 + [1] * 10], dtype=torch.int32)

    def given(rows: slice) -> dict[str, torch.Tensor]:
        if spec is TOKENS:
            return {"decay": decay[:, :, rows]}
        return {"document_ids": ids[:, rows]} if spec is DOCUMENTS else {}

    for rows in (slice(0, 21), slice(21, 39)):
        part = [x[:, :, rows] for x in leaves]
        options = {"initial_state": state, "return_state": True, **given(rows)}
        out, state = module.attention(*part, matrix, **options)
        outs.append(out)
    last = slice(39, 40)
    options = {x: y for x, y in given(last).items() if x == "decay"}
    with torch.no_grad():
        stepped, _ = module.step(*(x[:, :, last] for x in leaves), matrix, state, **options)
    weights = torch.randn(1, 2, 39, 24, generator=generator)
    out = torch.cat(outs, 2)
    mine = (out, stepped, *torch.autograd.grad((out * weights).sum(), leaves))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    options = {"decay": decay.double()} if spec is TOKENS else {}
    options |= {"ids": ids} if spec is DOCUMENTS else {}
    right = by_weights(spec, *exact, matrix.double(), **options)
    grads = torch.autograd.grad((right[:, :, :39] * weights).sum(), exact)
    for name, x, y in zip(
        ("out", "step", "dq", "dk", "dv"), mine, (right[:, :, :39], right[:, :, 39:], *grads),
        strict=True,
    ):  # fmt: skip
        error = ((x.double() - y).abs().max() / y.abs().max()).item()
        assert error < 1e-4, f"{name}: error {error:.3g}"


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    check(*CALLS[name])


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    old, new, call = DEFECTS[name]

    with pytest.raises(AssertionError, match="error"):
        check(*CALLS[call], with_slip(old, new))

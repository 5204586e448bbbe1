"""operator_digest: what the name of a module's operator says of it."""

from __future__ import annotations

from hashlib import sha256

from flashgen.plan import KernelPlan
from flashgen.plan.backward import BackwardPlan


def operator_digest(plan: KernelPlan, backward: BackwardPlan) -> str:
    """sha256 over what an operator computes, and over how it is called.

    Equal for every build of a spec: neither targets nor configurations, neither kernels nor
    flashgen's version, change it, so that a program that was exported beside one module runs beside
    another. Functions count by what they compute, whatever they are called. A call brings its
    scale, so the spec's own does not count.
    """
    spec = plan.spec
    computed = {
        "head_dims": (plan.qk_head_dim, plan.v_head_dim),
        "dtype": plan.torch_dtype,
        "input_precision": plan.input_precision,
        "mask": spec.mask.canonical,
        "score": None if spec.score is None else spec.score.canonical,
        "normaliser": spec.normaliser.canonical,
        "dropout": plan.dropout,
        "deterministic": spec.deterministic,
    }
    # So that whoever finds an operator of a name can call it, of whichever version it is.
    signature = {
        "arguments": [(argument.name, argument.annotation) for argument in plan.arguments],
        "gradients": [
            backward.score_tensors, bool(backward.sink_tensors), backward.differentiable_tensors,
        ],
    }  # fmt: skip
    if plan.classifies:
        signature["tiles"] = ["bits", "of"]
    return sha256(repr((computed, signature)).encode()).hexdigest()

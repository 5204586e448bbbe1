"""KERNELS: the list of kernels. To add one, add its folder and a line here."""

from __future__ import annotations

from flashgen.kernels.backward_hopper.kernel import BackwardHopper
from flashgen.kernels.backward_hopper_split.kernel import BackwardHopperSplit
from flashgen.kernels.backward_triton.kernel import BackwardTritonKeys, BackwardTritonQueries
from flashgen.kernels.base import Kernel
from flashgen.kernels.cache_triton.kernel import CacheTriton
from flashgen.kernels.forward_hopper.kernel import ForwardHopper
from flashgen.kernels.forward_triton.kernel import ForwardTriton
from flashgen.kernels.linear_triton.kernel import LinearForward, LinearGradients
from flashgen.plan import KernelPlan

#: In the order of measuring and showing: in each pass, a kernel before the kernels it replaces.
KERNELS: tuple[Kernel, ...] = (
    ForwardHopper(),
    ForwardTriton(),
    BackwardHopper(),
    BackwardHopperSplit(),
    BackwardTritonKeys(),
    BackwardTritonQueries(),
    CacheTriton(),
    LinearForward(),
    LinearGradients(),
)


def keys(form: str = "dense", *, linear: bool = False) -> tuple[str, ...]:
    """The keys of a form's kernels in tables and results; some kernels share a key.

    Args:
        form: the form.
        linear: whether they are of linear attention, or of attention of another kind.
    """
    held = (kernel.key for kernel in KERNELS if kernel.form == form and kernel.linear == linear)
    return tuple(dict.fromkeys(held))


def kernels_of(plan: KernelPlan) -> dict[str, Kernel]:
    """For each key the kernel that serves a plan, or else the first kernel, with its `why_not`.

    Kernels of forms that the spec does not declare have no part in a plan, and kernels of linear
    attention none in a plan of another kind, or the other way round.
    """
    found: dict[str, Kernel] = {}
    for kernel in KERNELS:
        if kernel.linear != plan.linear or not plan.spec.has_form(kernel.form):
            continue
        other = found.setdefault(kernel.key, kernel)
        if other is not kernel and other.why_not(plan) and not kernel.why_not(plan):
            found[kernel.key] = kernel
    return found


def with_key(key: str) -> Kernel:
    """The first kernel of a key, for properties that all kernels of the key share."""
    return next(kernel for kernel in KERNELS if kernel.key == key)


def module_order() -> tuple[str, ...]:
    """The keys in the order of modules: in each pass, kernels for every plan come first."""
    order = {k.key: (k.gradients, not k.fallback) for k in reversed(KERNELS)}
    return tuple(sorted(dict.fromkeys(k.key for k in KERNELS), key=lambda key: order[key]))

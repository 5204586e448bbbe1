"""FORMS_BESIDE: the forms besides the dense one. To add one, add its file and a line here."""

from __future__ import annotations

from flashgen.config import FORMS
from flashgen.forms.base import Form
from flashgen.forms.cache import CacheForm
from flashgen.forms.mesh import Mesh
from flashgen.forms.varlen import Varlen
from flashgen.forms.varlen_linear import VarlenLinear
from flashgen.plan import KernelPlan

#: In the order of `flashgen.config.FORMS`.
FORMS_BESIDE: tuple[Form, ...] = (Varlen(), VarlenLinear(), CacheForm(), Mesh())


def forms_of(plan: KernelPlan) -> tuple[Form, ...]:
    """The forms that a plan's spec declares besides the dense one."""
    return tuple(x for x in FORMS_BESIDE if plan.spec.has_form(x.name) and x.serves(plan))


def why_no_form(name: str, plan: KernelPlan) -> str:
    """Why a plan cannot have a form, as a clause; ``""`` where it can, as the dense one always."""
    if name != FORMS[0] and plan.block_lists:
        return f"{name!r} takes no lists of chosen blocks: the dense form alone does"
    if name != FORMS[0] and plan.products:
        return f"{name!r} has no linear attention over all pairs: the dense form alone has"
    forms = (x for x in FORMS_BESIDE if x.name == name and x.serves(plan))
    return next((form.why_not(plan) for form in forms), "")

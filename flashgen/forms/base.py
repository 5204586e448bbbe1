"""Form: the protocol of forms that a spec declares besides the dense one, ``forms=("varlen",)``.

A form is a file here, a folder in templates, and a line in `flashgen.forms.registry`. The folder
holds what the form adds to a module, a template for each heading in `PARTS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from flashgen.plan import KernelPlan

#: The templates of a form's folder: one for each heading of a module, in the module's order.
PARTS = ("attention", "reference", "checks", "launchers", "operator")


class Form(ABC):
    """A form besides the dense one.

    Attributes:
        name: its name in `AttentionSpec.forms`, and that of its folder of templates.
    """

    name: ClassVar[str]

    @abstractmethod
    def why_not(self, plan: KernelPlan) -> str:
        """Why a plan cannot have the form, as a clause; ``""`` where it can."""

    @abstractmethod
    def source(self, plan: KernelPlan) -> str:
        """The functions of its kernels in Triton, which call those of the dense kernels."""

    def gluon_source(self, plan: KernelPlan) -> str:
        """The functions of its kernels in Gluon; ``""`` where it has none."""
        return ""

    def names(self, plan: KernelPlan) -> Mapping[str, Any]:
        """The variables of its templates besides those of the module."""
        return {}

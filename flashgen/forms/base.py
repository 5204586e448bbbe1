"""Form: the protocol of forms that a spec declares besides the dense one, ``forms=("varlen",)``.

A form is a file here, a folder in templates, and a line in `flashgen.forms.registry`. The folder
holds what the form adds to a module, a template for each heading of its `Form.parts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from flashgen.config import KernelChoice
from flashgen.kernels.base import Needs
from flashgen.plan import KernelPlan

#: The templates of a form's folder: one for each heading of a module, in the module's order.
PARTS = ("attention", "reference", "checks", "launchers", "operator")

#: The dense kernels in a module by their keys, with their configurations.
Held = Mapping[str, KernelChoice]


class Form(ABC):
    """A form besides the dense one.

    Attributes:
        name: its name in `AttentionSpec.forms`, and that of its folder of templates.
        parts: the headings that its folder has a template for.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]] = PARTS

    def serves(self, plan: KernelPlan) -> bool:
        """Whether the form is of a plan's kind of attention: two forms may share a name."""
        return not plan.linear

    @abstractmethod
    def why_not(self, plan: KernelPlan) -> str:
        """Why a plan cannot have the form, as a clause; ``""`` where it can."""

    @abstractmethod
    def source(self, plan: KernelPlan, held: Held) -> str:
        """The functions of its kernels in Triton, which call those of the dense kernels.

        Args:
            plan: what they compute.
            held: the dense kernels in the module, with their configurations.
        """

    def gluon_source(self, plan: KernelPlan, held: Held) -> str:
        """The functions of its kernels in Gluon, which follow the dense ones; ``""`` for none."""
        return ""

    def needs(self, plan: KernelPlan, held: Held) -> Needs:
        """The parts of a module that its launchers need besides those of the dense kernels."""
        return Needs()

    def names(self, plan: KernelPlan, held: Held) -> Mapping[str, Any]:
        """The variables of its templates besides those of the module."""
        return {}

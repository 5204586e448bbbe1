"""QuadraticPlan: what modules of linear attention print that go over all pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from flashgen.decays import Decay
from flashgen.masks import full
from flashgen.plan.arguments import Argument
from flashgen.plan.kernel import KernelPlan, lower
from flashgen.plan.linear import WIDEST, LinearPlan
from flashgen.plan.pair_decays import FORGETS, OF_REST, OF_WHOLE
from flashgen.plan.pairs import LINEAR_MASKS, Products, why_not_linear
from flashgen.spec import AttentionSpec
from flashgen.symbolic.printer import python_source

#: Rows of q or k of which a program makes features; of random ones what wgmma takes of 16 bits.
CHUNK, RANDOM_CHUNK = 32, 64


@dataclass(frozen=True)
class QuadraticPlan:
    """The feature map and the sums of a plan whose weights are products of features.

    Attributes:
        plan: of the dense kernels, whose head dimension is the number of features.
    """

    plan: KernelPlan

    @property
    def products(self) -> Products:
        """How weights are made."""
        normaliser = self.plan.spec.normaliser
        assert isinstance(normaliser, Products)
        return normaliser

    @property
    def vector_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.products.vector_dim

    @property
    def normalise(self) -> bool:
        """Whether weights are divided by their sum."""
        return self.products.of.normalise

    @cached_property
    def maps(self) -> LinearPlan:
        """The feature map alone, as kernels of linear attention have it."""
        plan, of = self.plan, self.products.of
        spec = AttentionSpec(
            head_dim=(self.vector_dim, plan.v_head_dim),
            dtype=plan.spec.dtype,
            input_precision=plan.spec.input_precision,
            mask=full(),
            normaliser=replace(of, normalise=of.feature_map.random, algorithm=None, decay=None),
            targets=plan.targets,
        )
        return LinearPlan(lower(spec, plan.name))

    @property
    def mapped(self) -> bool:
        """Whether features are anything but the elements themselves."""
        return self.maps.mapped

    @property
    def random(self) -> bool:
        """Whether features are random, of a matrix of the call."""
        return self.maps.random

    @property
    def has_lse(self) -> bool:
        """Whether the log of the sum of a query's weights is a number: no feature is negative."""
        return self.normalise and self.products.feature_map.never_negative and not self.random

    @property
    def decay(self) -> Decay | None:
        """What weights decay by."""
        return self.products.of.decay

    @property
    def decay_keyword(self) -> str:
        """The argument that has a number for each key, and a gradient; ``""`` for none."""
        tensor = self.decay.tensor if self.decay is not None else None
        return tensor.name if tensor is not None else ""

    @property
    def decay_heads(self) -> int:
        """The heads of k that have a number each in the spec; 0 for any number of heads."""
        return 0 if self.decay is None else len(self.decay.numbers)

    @property
    def decay_python(self) -> str:
        """The number of the head ``h`` in Python, where a function has it."""
        traced = self.decay.traced if self.decay is not None else None
        return "" if traced is None else python_source(traced)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of calls besides the decay: of the dense kernels, but what calls make."""
        return tuple(x for x in self.plan.arguments if x.name not in (OF_WHOLE, OF_REST))

    @property
    def forgets(self) -> float:
        """The logarithm below which a decay is 0."""
        return FORGETS

    @property
    def chunk(self) -> int:
        """Rows of q or k of which a program makes features."""
        if self.random:
            return RANDOM_CHUNK if self.plan.itemsize == 2 else CHUNK
        return max(8, CHUNK * WIDEST // max(WIDEST, self.maps.x_width))

    @property
    def algorithm(self) -> str:
        """Which algorithm the kernels have, and why."""
        spec, traced = self.plan.spec, self.plan.predicate.expr
        if why := why_not_linear(spec, traced):
            return f"quadratic in length: {why}"
        seen = "earlier keys" if traced != LINEAR_MASKS[1] else "all keys"
        return f"quadratic in length, as the spec insists: a state could hold the sums over {seen}"


def algorithm_of(plan: KernelPlan) -> str:
    """Which algorithm linear attention has, and why; ``""`` for attention of another kind."""
    if plan.linear:
        return LinearPlan(plan).algorithm
    return QuadraticPlan(plan).algorithm if plan.products else ""

"""LinearPlan: what the kernels of linear attention print besides a `KernelPlan`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy

from flashgen.decays import Decay
from flashgen.feature_maps import ELEMENT
from flashgen.normalisers import Linear
from flashgen.plan.kernel import KernelPlan
from flashgen.symbolic.gradient import derivative
from flashgen.symbolic.printer import plain_source, python_source, torch_source, triton_source
from flashgen.symbols import KV_IDX, Q_IDX, SCORE

#: The masks whose sums over keys factor: causal and full.
LINEAR_MASKS = (sympy.Ge(Q_IDX, KV_IDX), sympy.true)

#: The widest features, and columns of v, of which a program holds a state in its registers.
WIDEST = 128

LOG2_E = sympy.Float(math.log2(math.e))

#: A decay of 2 to this power is 0 in float32, and so is one of less, or of several together.
FORGETS = -160

#: Logarithms are summed in multiples of it, exactly, and in what is left of them.
COARSE = 2.0**-6


@dataclass(frozen=True)
class LinearPlan:
    """The feature map, the mask and the tiles of a spec whose normaliser is `linear`.

    Attributes:
        plan: of the spec.
    """

    plan: KernelPlan

    @property
    def normaliser(self) -> Linear:
        """The spec's normaliser."""
        normaliser = self.plan.spec.normaliser
        assert isinstance(normaliser, Linear)
        return normaliser

    @property
    def normalise(self) -> bool:
        """Whether weights are divided by their sum."""
        return self.normaliser.normalise

    @property
    def causal(self) -> bool:
        """Whether a query sees the keys up to its own position; otherwise it sees all keys."""
        return bool(self.plan.predicate.expr == LINEAR_MASKS[0])

    @property
    def has_lse(self) -> bool:
        """Whether the log of the sum of a query's weights is a number: no feature is negative."""
        return self.normalise and self.normaliser.feature_map.never_negative

    @property
    def decay(self) -> Decay | None:
        """What a state is multiplied by before a key is added to it."""
        return self.normaliser.decay

    @property
    def decayed(self) -> bool:
        """Whether there is such a factor."""
        return self.decay is not None

    @property
    def decay_tensor(self) -> str:
        """The argument that has a number for each key, and a gradient; ``""`` for none."""
        tensor = self.decay.tensor if self.decay is not None else None
        return tensor.name if tensor is not None else ""

    @property
    def learned(self) -> bool:
        """Whether the decay has a gradient."""
        return bool(self.decay_tensor)

    @property
    def decay_numbers(self) -> tuple[str, ...]:
        """The number of each head in Python, where there is a list of them."""
        numbers = self.decay.numbers if self.decay is not None else ()
        return tuple("-math.inf" if math.isinf(x) else repr(x) for x in numbers)

    @property
    def decay_python(self) -> str:
        """The number of the head ``h`` in Python, where a function has it."""
        traced = self.decay.traced if self.decay is not None else None
        return "" if traced is None else python_source(traced)

    @property
    def log2_e(self) -> str:
        """The factor from natural logarithms to those of base 2."""
        return repr(float(LOG2_E))

    @property
    def forgets(self) -> str:
        """The logarithm of base 2 below which a decay is 0."""
        return repr(float(FORGETS))

    @property
    def splits_logs(self) -> bool:
        """Whether sums of logarithms have two parts: for weights that are exact to float32.

        For 16 bits one part is enough: a chunk's sum is above -2**14, where float32 has steps of
        2**-10.
        """
        return self.plan.itemsize == 4

    @property
    def per_coarse(self) -> str:
        """How many of the multiples that logarithms are summed in make 1."""
        return repr(1 / COARSE)

    @property
    def coarse(self) -> str:
        """One of these multiples."""
        return repr(COARSE)

    @property
    def qk_width(self) -> int:
        """Columns of a tile of q and k: a power of two."""
        return _power_of_two(self.plan.qk_head_dim)

    @property
    def v_width(self) -> int:
        """Columns of a tile of v and of the output: a power of two."""
        return _power_of_two(self.plan.v_head_dim)

    @property
    def qk_padded(self) -> bool:
        """Whether tiles of q and k are wider than their heads."""
        return self.qk_width > self.plan.qk_head_dim

    @property
    def v_padded(self) -> bool:
        """Whether tiles of v and of the output are wider than their heads."""
        return self.v_width > self.plan.v_head_dim

    @property
    def padded(self) -> bool:
        """Whether one of them is."""
        return self.qk_padded or self.v_padded

    @property
    def mapped(self) -> bool:
        """Whether features are anything but the elements themselves."""
        return bool(self._map != ELEMENT)

    @property
    def map(self) -> str:
        """The feature of ``x`` in a kernel."""
        return _triton(self._map)

    @property
    def slope(self) -> str:
        """Its derivative by ``x`` in a kernel."""
        return _triton(self._slope)

    @property
    def slope_comment(self) -> str:
        """The derivative for a reader."""
        return plain_source(self._slope)

    @property
    def flops_of_row(self) -> int:
        """Products of a query: with its state and into it, and with the keys of a chunk of 64."""
        qk_dim, v_dim = self.plan.qk_head_dim, self.plan.v_head_dim
        return 4 * qk_dim * v_dim + (2 * 64 * (qk_dim + v_dim) if self.causal else 0)

    @property
    def map_torch(self) -> str:
        """The feature of ``x`` in eager torch."""
        return torch_source(self._map.xreplace({ELEMENT: SCORE}), {"score": "x"})

    @property
    def map_comment(self) -> str:
        """The feature for a reader."""
        return plain_source(self._map)

    @property
    def _map(self) -> Any:
        return self.normaliser.feature_map.traced

    @cached_property
    def _slope(self) -> Any:
        return derivative(self._map, ELEMENT)


def _triton(expr: Any) -> str:
    """The text in a kernel. A GPU computes exp by exp2."""
    expr = expr.replace(sympy.exp, lambda x: sympy.Pow(2, LOG2_E * x))
    return triton_source(expr.xreplace({ELEMENT: SCORE}), {"score": "x"})


def _power_of_two(columns: int) -> int:
    return 1 << (columns - 1).bit_length()

"""LinearPlan: what the kernels of linear attention print besides a `KernelPlan`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flashgen.decays import Decay
from flashgen.feature_maps import ELEMENT, FeatureMap
from flashgen.normalisers import Linear
from flashgen.params import Tensor
from flashgen.plan.arguments import Argument
from flashgen.plan.kernel import KernelPlan
from flashgen.plan.keywords import OF_MATRICES
from flashgen.plan.pair_decays import OF_REST, OF_WHOLE
from flashgen.plan.runs import CAUSAL, Runs, runs_of
from flashgen.plan.vectors import VectorProgram, torch_of_element, triton_of_element
from flashgen.symbolic.gradient import derivative
from flashgen.symbolic.printer import plain_source, python_source

#: The widest features, and columns of v, of which a program holds a state in its registers.
WIDEST = 128

#: The most features of a vector, which kernels go through in tiles of `WIDEST`.
MOST_FEATURES = 8 * WIDEST

#: Arguments of functions of these modules, besides those that all modules have; and names that
#: matrices, and sums of decays, have there.
ARGUMENTS = frozenset(
    {"matrix", "state", "initial_state", "return_state", OF_WHOLE, OF_REST}
).union(*OF_MATRICES)

#: What `_linear_runs` says of a position that is no run's: it says 1 where a run starts, else 0.
NOWHERE = 2

#: Positions that a program of `_linear_runs` looks at.
TILE_OF_IDS = 1024

#: Random features of keys are at most 2 to this power: their sums over all keys stay finite.
HEADROOM = 56

#: The exponent of a state of no keys: finite, since infinite ones have no differences.
NO_EXPONENT = "-1e30"

#: The fewest rows of the left operand that Hopper's matrix units take.
WGMMA_ROWS = 64

#: A decay of 2 to this power is 0 in float32, and so is one of less, or of several together.
FORGETS = -160

#: Chunks of steep decays are seldom: as many a program of the kernels that compute these looks at.
STEEP_CHUNKS = 8

#: Logarithms are summed in multiples of it, exactly, and in what is left of them.
COARSE = 2.0**-6


@dataclass(frozen=True)
class LinearPlan:
    """The feature map, the mask and the tiles of a spec whose normaliser is `linear`.

    Attributes:
        plan: of the spec.
        by_tiles: whether a program has a tile of features only, where a state of all of them is
            too large for registers.
        packed: whether it is of packed sequences, whose chunks come from a list.
    """

    plan: KernelPlan
    by_tiles: bool = False
    packed: bool = False

    @property
    def features(self) -> int:
        """The features of a vector."""
        return self.feature_map.num_features(self.plan.qk_head_dim)

    @property
    def feature_map(self) -> FeatureMap:
        """What becomes of the vectors of q and k."""
        return self.normaliser.feature_map

    @property
    def of_tiles(self) -> LinearPlan:
        """The plan of kernels that go through tokens: they hold the state of a tile of features."""
        return replace(self, by_tiles=True)

    @property
    def of_sequences(self) -> LinearPlan:
        """The plan of kernels for packed sequences."""
        return replace(self, packed=True)

    @property
    def tiled(self) -> bool:
        """Whether registers do not hold a whole state."""
        return self.features > WIDEST

    @property
    def num_tiles(self) -> int:
        """The tiles of a state: of `WIDEST` features each."""
        return -(-self.features // WIDEST)

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
        return self.runs is not None or bool(self.plan.predicate.expr == CAUSAL)

    @cached_property
    def runs(self) -> Runs | None:
        """The runs of positions, each with a state of its own; None for a sequence of one."""
        return runs_of(self.plan.predicate.expr)

    @property
    def of_ids(self) -> bool:
        """Whether ids say where runs end: where one returns, all pairs are computed."""
        return self.runs is not None and self.runs.of_ids

    @property
    def algorithm(self) -> str:
        """Which algorithm the kernels have, and why."""
        if self.runs is None:
            seen = "earlier keys" if self.causal else "all keys, which all queries see"
            return f"linear in length: a state holds the sums over {seen}"
        text = "linear in length: a state holds the sums over earlier keys of a run"
        return f"{text}; where an id returns, all pairs are computed" if self.of_ids else text

    @property
    def hides(self) -> bool:
        """Whether some positions see no key and are seen by no query."""
        return self.runs is not None and self.runs.padded

    @property
    def run_argument(self) -> str:
        """The argument of launchers that says where runs end; ``""`` for none."""
        return "" if self.runs is None else self.runs.parameter

    @property
    def run_length(self) -> str:
        """The positions of a run, where all have as many."""
        return str(self.runs.length) if self.runs is not None and not self.of_ids else ""

    @property
    def nowhere(self) -> int:
        """The mark of a position that is no run's."""
        return NOWHERE

    @property
    def tile_of_ids(self) -> int:
        """Positions that a program looks at for where runs start."""
        return TILE_OF_IDS

    @property
    def has_step(self) -> bool:
        """Whether modules have `step`: where runs have one length it would need a position."""
        return self.has_states and (self.runs is None or self.of_ids)

    @property
    def has_lse(self) -> bool:
        """Whether the log of the sum of a query's weights is a number: no feature is negative."""
        return self.normalise and self.feature_map.never_negative and not self.random

    @property
    def has_states(self) -> bool:
        """Whether calls begin with a state and return one."""
        return self.causal

    @property
    def matrices(self) -> tuple[Argument, ...]:
        """What calls multiply q and k by first: one for both, or one each; none for neither."""
        names = {tensor.name for tensor in self.feature_map.matrices}
        return tuple(x for x in self.plan.arguments if x.name in names)

    @property
    def matrix_of_q(self) -> Tensor:
        """The one that q is multiplied by."""
        return self.feature_map.matrices[0]

    @property
    def matrix_of_k(self) -> Tensor:
        """The one that k is multiplied by."""
        return self.feature_map.matrices[-1]

    @property
    def decay(self) -> Decay | None:
        """What a state is multiplied by before a key is added to it."""
        return self.normaliser.decay

    @property
    def decayed(self) -> bool:
        """Whether kernels read logarithms of such factors: where a run starts there is one, 0."""
        return self.has_decay or self.runs is not None

    @property
    def has_decay(self) -> bool:
        """Whether the spec has a decay."""
        return self.decay is not None

    @property
    def by_features(self) -> bool:
        """Whether each feature of a key has a decay of its own: a state is multiplied by rows."""
        return self.decay is not None and self.decay.features > 0

    @property
    def decay_tensor(self) -> str:
        """The argument that has a number for each key, and a gradient; ``""`` for none."""
        tensor = self.decay.tensor if self.decay is not None else None
        return tensor.name if tensor is not None else ""

    @property
    def decay_keyword(self) -> str:
        """The keyword of that argument."""
        name = self.decay_tensor
        return dict(self.plan.keywords).get(name, name)

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
        return repr(math.log2(math.e))

    @property
    def forgets(self) -> str:
        """The logarithm of base 2 below which a decay is 0."""
        return repr(float(FORGETS))

    @property
    def sums_beforehand(self) -> bool:
        """Whether the kernel that maps features sums them up, too.

        Features with decays of their own are summed up with these.
        """
        return self.normalise and not self.by_features

    @property
    def feature_width(self) -> int:
        """Columns of a tile of features with decays of their own: registers hold no wider one."""
        return min(self.qk_width, WIDEST // 2 if self.plan.itemsize < 4 else WIDEST // 4)

    @property
    def gradient_width(self) -> int:
        """The same where gradients of such features are computed, which takes more."""
        return min(self.qk_width, WIDEST // 4)

    @property
    def gradient_tiles(self) -> int:
        """How many of these tiles there are."""
        return self.qk_width // self.gradient_width

    @property
    def splits_logs(self) -> bool:
        """Whether sums of logarithms have two parts: for weights that are exact to float32.

        Without a decay they are multiples of one number.

        For 16 bits one part is enough: a chunk's sum is above -2**14, where float32 has steps of
        2**-10.
        """
        return self.plan.itemsize == 4 and self.has_decay and not self.by_features

    @property
    def balanced(self) -> str:
        """The least logarithm of base 2 from a chunk's middle that one product of features takes.

        Features are then multiplied by up to its inverse: in 16 bits that is far from overflow, and
        in float32 the logarithm's rounding is that of an exponential.
        """
        return repr(-16.0 if self.plan.itemsize == 4 else -64.0)

    @property
    def steep_chunks(self) -> int:
        """The most chunks that a program looks at for those below it, so that few have to."""
        return STEEP_CHUNKS

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
        """Columns of a tile of features: a power of two."""
        width = _power_of_two(self.features)
        return min(width, WIDEST) if self.by_tiles else width

    @property
    def v_width(self) -> int:
        """Columns of a tile of v and of the output: a power of two."""
        return _power_of_two(self.plan.v_head_dim)

    @property
    def x_width(self) -> int:
        """Columns of a tile of q or k: a power of two."""
        return _power_of_two(self.plan.qk_head_dim)

    @property
    def x_padded(self) -> bool:
        """Whether tiles of q and k are wider than their heads."""
        return self.x_width > self.plan.qk_head_dim

    @property
    def qk_padded(self) -> bool:
        """Whether tiles of features are wider than there are features."""
        return self.qk_width > self.features

    @property
    def v_padded(self) -> bool:
        """Whether tiles of v and of the output are wider than their heads."""
        return self.v_width > self.plan.v_head_dim

    @property
    def padded(self) -> bool:
        """Whether one of them is."""
        return self.qk_padded or self.v_padded

    @property
    def step_columns(self) -> int:
        """Columns of a state that a program has which adds one key to it."""
        return min(self.v_width, 32, max(WIDEST * 32 // self.qk_width, 1))

    @property
    def mapped(self) -> bool:
        """Whether features are anything but the elements themselves."""
        return self.vector or bool(self._map != ELEMENT)

    @property
    def vector(self) -> bool:
        """Whether features depend on whole vectors, or are others in number than elements."""
        return not self.feature_map.elementwise

    @property
    def sloped(self) -> bool:
        """Whether kernels of gradients multiply by the derivative of the map themselves."""
        return self.mapped and not self.vector

    @property
    def random(self) -> bool:
        """Whether features are random, of a matrix of the call."""
        return self.feature_map.random

    @property
    def reads_scale(self) -> bool:
        """Whether the operator takes the scale: it is inside of random features."""
        return self.random or not self.normalise

    @cached_property
    def program(self) -> VectorProgram:
        """What maps vectors, and its gradient, line by line."""
        return VectorProgram(self.feature_map.traced)

    @property
    def no_exponent(self) -> str:
        """The exponent of a state of random features to which no key was added."""
        return NO_EXPONENT

    @property
    def headroom(self) -> int:
        """The base-2 logarithm of the largest random feature of a key."""
        return HEADROOM

    @property
    def chunks_of_features(self) -> int:
        """The chunks that a program makes random features of, with one copy of the matrix."""
        return 4

    @property
    def rows_of_features(self) -> int:
        """The fewest rows that a program makes random features of: what wgmma takes of 16 bits."""
        return WGMMA_ROWS if self.plan.itemsize < 4 else 0

    @property
    def map(self) -> str:
        """The feature of ``x`` in a kernel."""
        return triton_of_element(self._map)

    @property
    def slope(self) -> str:
        """Its derivative by ``x`` in a kernel."""
        return triton_of_element(self._slope)

    @property
    def slope_comment(self) -> str:
        """The derivative for a reader."""
        return plain_source(self._slope)

    @property
    def flops_of_row(self) -> int:
        """Products of a query: with its state and into it, and with the keys of a chunk of 64."""
        features, v_dim = self.features, self.plan.v_head_dim
        return 4 * features * v_dim + (2 * 64 * (features + v_dim) if self.causal else 0)

    @property
    def map_torch(self) -> str:
        """The feature of ``x`` in eager torch."""
        return torch_of_element(self._map)

    @property
    def map_comment(self) -> str:
        """The features for a reader."""
        if self.random:
            return f"{self.features} of exp(w @ x - |x|**2 / 2), x = sqrt(scale) times q or k"
        return self.program.comment if self.vector else plain_source(self._map)

    @property
    def features_comment(self) -> str:
        """The same with what x is, where that is no element of q or k."""
        if not self.matrices:
            return self.map_comment
        of_q, of_k = (x.keyword for x in (self.matrices[0], self.matrices[-1]))
        return f"{self.map_comment} of x = q @ {of_q} and k @ {of_k}"

    @property
    def _map(self) -> Any:
        (piece,) = self.feature_map.traced.pieces
        return piece

    @cached_property
    def _slope(self) -> Any:
        return derivative(self._map, ELEMENT)


def _power_of_two(columns: int) -> int:
    return 1 << (columns - 1).bit_length()

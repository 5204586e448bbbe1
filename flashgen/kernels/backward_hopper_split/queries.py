"""HopperQueries: further variables of the Gluon kernel for the gradient of q."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashgen.kernels.backward_hopper.split import CALL
from flashgen.kernels.backward_hopper.visits import HopperVisits
from flashgen.kernels.backward_hopper_split.learned import LearnedOfQueries
from flashgen.plan.backward import BackwardPlan
from flashgen.plan.backward_code import BackwardCode
from flashgen.plan.code import codes_of
from flashgen.plan.mask_code import (
    Condition,
    MaskCode,
    columns_end,
    least_comparisons,
    mask_code,
    with_promise,
)
from flashgen.plan.promise import UNORDERED
from flashgen.symbolic.printer.code import Code, gathered_by, read_by
from flashgen.symbolic.printer.dialects import Gluon
from flashgen.symbols import KV_IDX, Q_FIRST

#: Queries of a program; each of two consumers has 64.
BLOCK_M = 128

#: By width: the keys of a tile, whose products registers hold beside the gradient of 64 queries,
#: and the buffers for tiles of values, as many as fit. In segments they always have room twice.
BLOCK_N = {64: 128, 128: 128, 256: 64}
V_STAGES = {64: 2, 128: 2, 256: 1}
V_STAGES_OF_SEGMENTS = 2

#: Buffers for tiles of keys, which are needed a step later than those of values.
K_STAGES = 2


#: Distances are what scores read most: cheaper than converting every position.
DIALECT = Gluon({KV_IDX - Q_FIRST: "_key_columns(scores, start_n - q_first, gl.float32)"})


@dataclass(frozen=True)
class HopperQueries:
    """The aggregates that the kernel's functions pass to one another, by their fields.

    Attributes:
        backward: the backward pass.
        width: columns that the kernel is written for.
        segmented: whether it computes some columns in segments.
        learns: whether it sums input gradients: all but those of keys.
    """

    backward: BackwardPlan
    width: int
    segmented: bool
    learns: bool = False

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's compile-time constants."""
        return {
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": self.block_n,
            "K_STAGES": K_STAGES,
            "V_STAGES": V_STAGES_OF_SEGMENTS if self.segmented else V_STAGES[self.width],
        }

    @property
    def block_n(self) -> int:
        """Keys of a tile; fewer where registers or shared memory have no room for more."""
        most, learned = BLOCK_N[self.width], self.learned
        drops = self.backward.plan.dropout
        further = bool(self.text.score_gradient or learned.partials or learned.elements) or drops
        if most == 128:
            no_room = bool(learned.stored) and self.width > 64
            return 64 if (self.learns and further) or drops or no_room else most
        return 32 if self.learns and further and not learned.diagonals else most

    @property
    def text(self) -> BackwardCode:
        """The kernel's code."""
        return self.backward.of_grad_q_and_inputs if self.learns else self.backward.of_grad_q

    @cached_property
    def learned(self) -> LearnedOfQueries:
        """What it sums for learned tensors."""
        return LearnedOfQueries(self.text, self.width)

    @cached_property
    def visits(self) -> HopperVisits:
        """Which tiles of keys a tile of queries visits."""
        masks = bool(self.conditions)
        return HopperVisits(self.backward.plan.tiles, "kv", masks=masks, differ=masks)

    @cached_property
    def call(self) -> tuple[str, ...]:
        """Values that are the same for the whole call."""
        by_parts = ("num_tiles",) * bool(self.learned.diagonals)
        dropping = ("threshold", "kept_scale", "seed") * self.backward.plan.dropout
        return (
            *CALL,
            *by_parts,
            *dropping,
            *self.backward.queries_arguments.names,
            *self.visits.reads,
        )

    work_tile = ("batch", "head", "q_first")

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """Values that a consumer computes once for its queries."""
        softmax = self.backward.plan.normaliser == "softmax"
        found = ["lse", "delta"] if softmax else ["delta"]
        if not self.backward.plan.reads_scale:
            found.append("qk_scale")
        code = self.text.code
        read = read_by(self._codes).union(("qk_scale",) * code.scaled)
        read |= {UNORDERED} if code.promise is not None else set()
        lines = (*code.scalars, *code.rows)
        return (*found, *(line.name for line in lines if line.name in read))

    @cached_property
    def conditions(self) -> tuple[Code, ...]:
        """The conditions of the mask: all hold for a visible pair."""
        return tuple(condition for condition, _ in self._conditions)

    @cached_property
    def mask_code(self) -> MaskCode:
        """Those conditions, pair by pair or by column bitmasks."""
        code = self.text.code
        rows = ("q_idx", *(line.name for line in code.rows))
        least = least_comparisons(self.block_n, scored=bool(code.score))
        return mask_code(self._conditions, "kv_idx", rows, least=least, tables=code.bits)

    @property
    def promised_mask_code(self) -> MaskCode:
        """All column bitmasks: the mask's, and those of the mask as it was written."""
        return with_promise(self.mask_code, "q_idx", self.text.code.promise)

    @cached_property
    def _conditions(self) -> tuple[Condition, ...]:
        """Each condition with its column bitmask."""
        of_keys = (columns_end("kv"),) * self.backward.plan.checks_kv_len
        code = self.text.code
        return (*of_keys, *zip(code.conditions, code.bitmasks, strict=True))

    @property
    def distances_read(self) -> bool:
        """Whether the kernel goes along diagonals."""
        return bool(self.learned.diagonals or self.text.code.distances)

    @property
    def changes_scores(self) -> bool:
        """Whether the softmax reads anything but the raw products."""
        return bool(self.conditions or self.text.code.score or self.learned.made)

    @property
    def scores_read_q_idx(self) -> bool:
        """Whether the score reads the position of each query of each element."""
        return "q_idx" in read_by((*self._score_codes, *self._partials))

    @property
    def scores_read_kv_idx(self) -> bool:
        """Whether the score reads the keys' positions besides distances."""
        return "kv_idx" in read_by((*self._score_codes, *self._partials), DIALECT)

    def sums_read(self, name: str) -> bool:
        """Whether what is added to the sums of a tile reads this position."""
        return name in read_by(self.learned.codes, DIALECT)

    @property
    def sums_read_positions(self) -> bool:
        """Whether those sums read keys' positions, or the distances that the dialect has."""
        return "kv_idx" in read_by(self.learned.codes)

    @property
    def sums_read_distances(self) -> bool:
        """Whether those sums read the dialect's distances, in the layout of `scores`."""
        return self.sums_read("scores")

    @property
    def masks_read_q_idx(self) -> bool:
        """Whether the mask reads the position of each query, pair by pair."""
        return "q_idx" in read_by((*self.mask_code.pairs, *codes_of(self.text.code.masked)))

    @property
    def masks_read_kv_idx(self) -> bool:
        """Whether the mask reads the position of each key, pair by pair."""
        return "kv_idx" in read_by((*self.mask_code.pairs, *codes_of(self.text.code.masked)))

    @property
    def rows_read_q_idx(self) -> bool:
        """Whether values computed once for queries read their positions."""
        return "q_idx" in read_by(codes_of(self.text.code.scalars, self.text.code.rows))

    @cached_property
    def gathers(self) -> tuple[int, ...]:
        """The numbers of dimensions that tensors are indexed by."""
        lines = codes_of(self.text.code.scalars, self.text.code.rows)
        codes = (*self._codes, *lines, *self.visits.bounds, self.backward.gradient_scale)
        of_hidden = self.backward.plan.hidden.gathers
        return tuple(sorted({*gathered_by(codes), *of_hidden}))

    @cached_property
    def _score_codes(self) -> tuple[Code | None, ...]:
        code = self.text.code
        lines = codes_of(code.columns, code.elements, code.distances)
        return (*lines, code.score, self.text.score_gradient)

    @cached_property
    def _codes(self) -> tuple[Code | None, ...]:
        """All code that is computed for a tile."""
        code = self.text.code
        of_promise = code.promise.conditions if code.promise is not None else ()
        learned = (*self._partials, *self.learned.codes)
        return (*self._score_codes, *learned, *self.conditions, *codes_of(code.masked), *of_promise)

    @property
    def _partials(self) -> tuple[Code | None, ...]:
        return tuple(item.partial for item in self.learned.partials)

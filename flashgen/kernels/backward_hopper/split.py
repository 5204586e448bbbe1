"""HopperSplit: which kernels a backward pass on Hopper consists of, and their widths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import sympy

from flashgen.block_lists import BlockLists
from flashgen.config import BACKWARD_KERNELS, BackwardKernel
from flashgen.kernels.backward_hopper.pairs import with_tile
from flashgen.plan.backward import BackwardPlan
from flashgen.plan.backward_code import BackwardCode
from flashgen.plan.head_dims import SMALLEST_SEGMENT, Segment, split_head_dim
from flashgen.plan.score_gradient import InputGradient

#: The arguments of a call that both kernels read, whatever its parameters.
CALL = ("num_q_heads", "num_kv_heads", "q_len", "kv_len", "rows_len", "scale")

#: The widths of q, k and v that the kernel over tiles of keys supports, and the queries of a tile
#: at each width: as many as registers allow beside the gradients of 64 keys.
BLOCK_M = {64: 128, 128: 64, 256: 64}

#: Keys of a program, by width: each of two consumers has 64, unless they take turns. At 256 columns
#: registers hold only one gradient of 64 keys: for the same keys one consumer computes dv, the
#: other dk.
CONSUMERS = 2
BLOCK_N = {64: 128, 128: 128, 256: 64}


@dataclass(frozen=True)
class HopperSplit:
    """One Gluon kernel for all gradients, or one for dk and dv and another kernel for dq.

    Attributes:
        backward: the backward pass.
    """

    backward: BackwardPlan

    @cached_property
    def text(self) -> BackwardCode:
        """What the kernel over tiles of keys computes, as text."""
        if self.of_keys_alone:
            return self.backward.of_grad_kv
        both = self.backward.of_both
        return with_tile(both, self.tiled) if self.tiled else both

    @cached_property
    def tiled(self) -> str:
        """The tensor of pairs that the producer loads in tiles; ``""`` for none."""
        items = () if self.split else self.backward.of_both.input_gradients
        return next((x.tensor for x in items if self.backward.is_of_pairs(x)), "")

    @property
    def tiled_in_ds(self) -> bool:
        """Whether these tiles arrive in the buffers of ds: above 64 columns no others have room.

        They have room there if their elements have 16 bits; a call with others gathers these.
        """
        return bool(self.tiled) and self.width > 64

    @property
    def split(self) -> bool:
        """Whether another kernel computes the gradient of q, so that all sums have a fixed order.

        That takes 7 products of a tile instead of 5. With roles, shared memory has no room for the
        sums of dq, and their L2 traffic would double.
        """
        return self._adds_nothing_up or self.queries_learn

    @cached_property
    def queries_learn(self) -> bool:
        """Whether a kernel over tiles of queries sums all input gradients but those of keys."""
        return bool(self.why_not_inputs(self.backward.of_both))

    @property
    def of_keys_alone(self) -> bool:
        """Whether the kernel over tiles of keys sums no input gradients but those of keys."""
        return self.queries_learn or self.queries_portable

    @cached_property
    def queries_portable(self) -> bool:
        """Whether the portable kernel computes dq, and the sums of input gradients."""
        return self.split and self.queries_learn and self._takes_logarithms

    @property
    def _takes_logarithms(self) -> bool:
        """Whether each score takes a logarithm, as the buckets of `t5_bias` do.

        The portable kernel over tiles of queries then took an H100 0.85 of the Gluon kernel's time.
        """
        plan = self.backward.plan
        traced = None if plan.spec.score is None else plan.spec.score.traced
        return traced is not None and not plan.spec.deterministic and traced.sym.has(sympy.log)

    @property
    def both_in_gluon(self) -> bool:
        """Whether the pass is split between two Gluon kernels."""
        return self.split and not self.queries_portable

    @property
    def replaces(self) -> tuple[BackwardKernel, ...]:
        """The portable kernels that the Gluon kernels replace."""
        return ("keys",) if self.queries_portable else BACKWARD_KERNELS

    def why_not_inputs(self, text: BackwardCode) -> str:
        """Why a kernel over tiles of keys cannot sum all input gradients; ``""`` if it can."""
        for item in text.input_gradients:
            sums = item.over in ("heads", "columns") or self._sums_distances(item)
            if not (sums or self._stores_pairs(item)):
                return f"elements of {item.tensor} are told apart by {item.over}"
            if text.is_of_products(item.partial) and not self._holds_partials(text):
                return f"what {item.tensor} learns depends on the scores"
            if self.has_roles and (text.score_gradient or item.over == "heads"):
                # Elements of a head are left to the kernel over queries, which has all factors.
                return f"no consumer has both factors of what {item.tensor} learns"
        return ""

    def _sums_distances(self, item: InputGradient) -> bool:
        """Whether the kernel over tiles of keys sums an item along diagonals, in any order."""
        slopes = self.backward.of_both.score_gradient is not None and self.width == 128
        return item.over == "diagonals" and not (self._adds_nothing_up or slopes)

    def _stores_pairs(self, item: InputGradient) -> bool:
        """Whether the single pass stores an item of pairs, through the buffer of dq's sums."""
        stored = self.backward.is_of_pairs(item) and self.backward.is_stored(item)
        return stored and not self._adds_nothing_up

    def _holds_partials(self, text: BackwardCode) -> bool:
        """Whether registers of a single pass hold all derivatives that depend on the scores.

        With 128 columns they spill; with 64 the third spills 1032 bytes.
        """
        found = [text.score_gradient, *(item.partial for item in text.input_gradients)]
        of_products = sum(map(text.is_of_products, found))
        return not self._adds_nothing_up and self.width == 64 and of_products <= 2

    @property
    def has_roles(self) -> bool:
        """Whether one consumer computes the gradient of the values, and the other that of k."""
        return self.width == 256

    @cached_property
    def in_turns(self) -> bool:
        """Whether two consumers have the same 64 keys, and take their visits in turn.

        Lists of blocks of 64 keys then have what each tile of keys visits; a tile of 128 keys would
        visit what either block is chosen by. Visits of one list are those of all heads of a group.
        """
        plan, listing = self.backward.plan, self.backward.plan.listing
        lists = [x for x in plan.predicate.params if isinstance(x, BlockLists)]
        if all(x.block % BLOCK_N[self.width] == 0 for x in lists):
            return False
        alike = listing is not None and (listing.by_group or not listing.by_head)
        plain = plan.spec.score is None and not (plan.hidden.keys or plan.hidden.queries)
        others = self.split or self.segmented or plan.dropout or self.text.input_gradients
        return alike and plain and not others

    @property
    def _adds_nothing_up(self) -> bool:
        """Whether the pass is split even without input gradients."""
        return self.has_roles or self.backward.plan.spec.deterministic or self._derives_and_drops

    @property
    def _derives_and_drops(self) -> bool:
        """Whether registers of a single pass hold no derivatives beside marked weights.

        With dropout at d=128 it spills 1204 bytes of softcap, and 776 of learned slopes; the kernel
        over keys of a split pass spills 552 and 296.
        """
        both = self.backward.of_both
        derives = both.score_gradient is not None or bool(both.input_gradients)
        return self.backward.plan.dropout and self.width == 128 and derives

    @property
    def width(self) -> int:
        """Columns that the kernel is written for."""
        return _width(max(self.backward.plan.qk_head_dim, self.backward.plan.v_head_dim))

    @cached_property
    def segmented(self) -> bool:
        """Whether tiles hold some head in two segments: above 64 columns, where that takes fewer.

        Tensors of Gluon have sides of powers of two. Other heads are padded to one.
        """
        plan = self.backward.plan
        return any(len(_segments(dim)) > 1 for dim in (plan.qk_head_dim, plan.v_head_dim))

    @cached_property
    def qk_parts(self) -> tuple[Segment, ...]:
        """The segments of a tile of q and k; TMA fills columns past the head dimension with zeros.

        A kernel whose consumers share the columns of dq has two segments, or 128 columns.
        """
        parts = self._parts(self.backward.plan.qk_head_dim)
        return parts if self.split or sum_of(parts) > 64 else _padded(self.width)

    @cached_property
    def v_parts(self) -> tuple[Segment, ...]:
        """The segments of a tile of v and grad_out; TMA fills them up in the same way."""
        return self._parts(self.backward.plan.v_head_dim)

    def _parts(self, head_dim: int) -> tuple[Segment, ...]:
        if self.segmented:
            return _segments(head_dim)
        return _padded(_width(head_dim) if self.has_roles else self.width)

    @property
    def columns(self) -> int:
        """Columns of the widest gradient, the padding of its last segment included."""
        return max(sum_of(self.qk_parts), sum_of(self.v_parts))

    @property
    def block_m(self) -> int:
        """Queries of a tile; fewer where registers do not hold all derivatives, or for dropout.

        Products of features keep their weights and what is hidden: at d=64 tiles of 128 spilled
        396 bytes with a window, and 1,120 with decays of heads; tiles of 64 spill none, and took
        an H200 as long.

        In a single pass at d=64 tiles of 128 spilled 2220 bytes with sums of rows and 760 with sums
        along diagonals; tiles of 64 spill up to 60.
        With dropout at d=64 tiles of 128 spilled 740 bytes and tiles of 64 spill 16; with tiles of
        64 an H200 takes 0.6 times as long.
        """
        most, text = BLOCK_M[self.width], self.text
        differs = text.score_gradient and self.of_keys_alone
        holds = not self.split and (text.input_gradients or text.code.distances)
        plan = self.backward.plan
        few = differs or holds or self.in_turns or plan.dropout or plan.products
        return min(most, 64) if few else most

    @property
    def block_n(self) -> int:
        """Keys of a program."""
        return 64 if self.in_turns else BLOCK_N[self.width]

    @property
    def cleared_columns(self) -> int:
        """Columns of the rows in which sums of `columns` are cleared: a power of two."""
        return self.columns & -self.columns


def sum_of(parts: tuple[Segment, ...]) -> int:
    """The columns of all segments."""
    return sum(part.width for part in parts)


def _width(head_dim: int) -> int:
    return min(width for width in BLOCK_M if width >= head_dim)


def _padded(width: int) -> tuple[Segment, ...]:
    return (Segment(0, width, ""),)


def _segments(head_dim: int) -> tuple[Segment, ...]:
    """Two segments, or one with the columns of a kernel's width, if that is no more.

    A third one would take as many instructions as the second, and save 16 or 32 columns.
    """
    if head_dim <= min(BLOCK_M):
        return _padded(min(BLOCK_M))
    first, *others = split_head_dim(head_dim)
    if not others:
        return (first,)
    second = max(1 << (head_dim - first.width - 1).bit_length(), SMALLEST_SEGMENT)
    if second == first.width:
        return _padded(first.width + second)
    return first, replace(others[0], width=second)

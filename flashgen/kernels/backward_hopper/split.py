"""HopperSplit: which kernels a backward pass on Hopper consists of, and their widths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashgen.config import BACKWARD_KERNELS, BackwardKernel
from flashgen.plan.backward import BackwardPlan
from flashgen.plan.backward_code import BackwardCode

#: What both kernels read of a call, whatever its parameters.
CALL = ("num_q_heads", "num_kv_heads", "q_len", "kv_len", "rows_len", "scale")

#: Columns of q, k and v that the kernel over tiles of keys is written for, and the queries of a
#: tile of each: what registers hold beside the gradients of 64 keys.
BLOCK_M = {64: 128, 128: 64, 256: 64}

#: Keys of a program, by the same: each of two consumers has 64. Of 256 columns registers hold one
#: gradient of 64 keys: one consumer computes that of the values, the other that of k, of the same.
CONSUMERS = 2
BLOCK_N = {64: 128, 128: 128, 256: 64}


@dataclass(frozen=True)
class HopperSplit:
    """One Gluon kernel for all gradients, or one for those of keys and another kernel.

    Attributes:
        backward: the backward pass.
    """

    backward: BackwardPlan

    @property
    def text(self) -> BackwardCode:
        """What the kernel over tiles of keys computes, as text."""
        return self.backward.of_grad_kv if self.queries_portable else self.backward.of_both

    @property
    def split(self) -> bool:
        """Whether another kernel computes the gradient of q: nothing is added up in any order.

        That takes 7 products of a tile in place of 5. Beside roles there is no room for this one's
        sums in shared memory, and twice the traffic of them in L2.
        """
        return self._adds_nothing_up or self.queries_portable

    @cached_property
    def queries_portable(self) -> bool:
        """Whether the portable kernel makes the gradient of q, and sums up input gradients."""
        if self.why_not_inputs(self.backward.of_both):
            return True
        # The Gluon kernel for the gradient of q asks a tile of queries, not each of them.
        return self._adds_nothing_up and self.backward.plan.tiles.reduce_rows

    @property
    def both_in_gluon(self) -> bool:
        """Whether the pass is split between two Gluon kernels."""
        return self.split and not self.queries_portable

    @property
    def replaces(self) -> tuple[BackwardKernel, ...]:
        """The portable kernels in whose place those in Gluon run."""
        return ("keys",) if self.queries_portable else BACKWARD_KERNELS

    def why_not_inputs(self, text: BackwardCode) -> str:
        """Why a kernel over tiles of keys cannot sum up all that a text learns; ``""``: it can."""
        for item in text.input_gradients:
            if item.over not in ("heads", "columns"):
                return f"elements of {item.tensor} are told apart by {item.over}"
            if text.is_of_products(item.partial):
                return f"what {item.tensor} learns depends on the scores"
            if self.has_roles:
                return f"no consumer has both factors of what {item.tensor} learns"
        return ""

    @property
    def has_roles(self) -> bool:
        """Whether one consumer computes the gradient of the values, and the other that of k."""
        return self.block_n == 64

    @property
    def _adds_nothing_up(self) -> bool:
        """Whether the pass is split whatever it learns."""
        return self.has_roles or self.backward.plan.spec.deterministic

    @property
    def width(self) -> int:
        """Columns that the kernel is written for."""
        return _width(max(self.backward.plan.qk_head_dim, self.backward.plan.v_head_dim))

    @property
    def qk_width(self) -> int:
        """Columns of a tile of q and k, of which TMA fills those past the last with zeros."""
        return _width(self.backward.plan.qk_head_dim) if self.has_roles else self.width

    @property
    def v_width(self) -> int:
        """Columns of a tile of v and grad_out, likewise."""
        return _width(self.backward.plan.v_head_dim) if self.has_roles else self.width

    @property
    def block_m(self) -> int:
        """Queries of a tile; fewer where registers lack room for all derivatives, or for dropout.

        With dropout at d=64 tiles of 128 spilled 740 bytes and tiles of 64 spill 16; an H200 takes
        0.6 times as long with these.
        """
        most = BLOCK_M[self.width]
        differs = self.queries_portable and self.text.score_gradient
        return min(most, 64) if differs or self.backward.plan.dropout else most

    @property
    def block_n(self) -> int:
        """Keys of a program."""
        return BLOCK_N[self.width]


def _width(head_dim: int) -> int:
    return min(width for width in BLOCK_M if width >= head_dim)

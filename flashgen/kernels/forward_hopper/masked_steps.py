"""MaskedSteps: what a step of the Gluon forward kernel computes besides products, by the plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashgen.kernels.forward_hopper.shape import NARROW
from flashgen.plan.code import codes_of
from flashgen.plan.kernel import KernelPlan
from flashgen.plan.mask_code import MaskCode, columns_end, mask_code, with_promise
from flashgen.symbolic.printer.code import read_by
from flashgen.symbolic.varies_over import Axes, varies_over
from flashgen.symbols import Load

#: Comparisons of the mask from which on column bitmasks pay in the steps. With one, an H200 took
#: 0.2 to 2% longer (causal, d=64 and 80); with two or three, 0.4 to 6% less.
LEAST_COMPARISONS = 2


@dataclass(frozen=True)
class MaskedSteps:
    """How masked steps evaluate the mask, and what else steps read.

    Attributes:
        plan: the kernel's.
    """

    plan: KernelPlan

    @cached_property
    def masks(self) -> bool:
        """Whether a masked tile evaluates any condition."""
        return bool(self.plan.code.conditions or self.plan.checks_kv_len)

    @cached_property
    def mask_code(self) -> MaskCode:
        """The conditions of a masked tile, pair by pair or by column bitmasks.

        Block tables are read pair by pair.
        """
        code = self.plan.code
        of_keys = (columns_end("kv"),) * self.plan.checks_kv_len
        bitmasks = (None,) * len(code.bitmasks) if code.tables else code.bitmasks
        conditions = (*of_keys, *zip(code.conditions, bitmasks, strict=True))
        rows = ("q_idx", *(line.name for line in code.rows))
        least = LEAST_COMPARISONS + self.plan.checks_kv_len  # which masks the last tile only
        own, own_lines = code.own_bits, code.own_lines
        return mask_code(conditions, "kv_idx", rows, least=least, own=own, own_lines=own_lines)

    @property
    def promised_mask_code(self) -> MaskCode:
        """All column bitmasks: the mask's, and those of the mask as it was written."""
        code = self.plan.code
        if self.gathers_bits:
            return MaskCode((), code.conditions, self.gathered_rows, gathered=True)
        return (
            self.mask_code if code.tables else with_promise(self.mask_code, "q_idx", code.promise)
        )

    @property
    def loads_keys(self) -> bool:
        """Whether consumers load elements by key in a masked tile."""
        return self.plan.mask_loads_keys

    @property
    def splits_handed(self) -> bool:
        """Whether elements of keys that were handed over are read eight columns at a time."""
        return False

    @property
    def gathers_bits(self) -> bool:
        """Whether a masked tile loads eight columns at a time, and collects bits of them.

        Elements that a mask loads by key take registers for their addresses: with those of all
        columns of a tile there is no room for three consumers. Blocks of tables are loaded one by
        one instead.
        """
        code = self.plan.code
        others = code.columns or code.elements or code.promise or code.tables
        reads = self.loads_keys or self.splits_handed
        return reads and not others and not self.mask_code.bitmasks

    @property
    def pairs_of_wide(self) -> bool:
        """Whether a masked tile of 128 keys loads the elements of all of its columns at once.

        Heads above 64 columns have such tiles with two consumers alone, whose registers hold the
        addresses. Elements of a query and a key together have too many.
        """
        code = self.plan.code
        axes = {line.name: Axes.ROW for line in code.rows}
        axes |= {line.name: Axes.COLUMN for line in code.masked}
        codes = (*code.conditions, *codes_of(code.masked))
        loads = (load for code in codes for load in code.expr.atoms(Load))
        places = (
            (load, {x: axes[x.name] for x in load.free_symbols if x.name in axes}) for load in loads
        )
        of_keys = all(varies_over(load, known) != Axes.ELEMENT for load, known in places)
        return self.gathers_bits and of_keys and sum(self.plan.v_segments) > NARROW

    @cached_property
    def gathered_rows(self) -> tuple[str, ...]:
        """The vectors of rows that such bits read."""
        code = self.plan.code
        read = read_by((*code.conditions, *codes_of(code.masked)))
        return ("q_idx", *(line.name for line in code.rows if line.name in read))

    @property
    def changes_scores(self) -> bool:
        """Whether the softmax reads anything but the raw products."""
        return self.masks or bool(self.plan.code.score)

    @property
    def changes_steps(self) -> bool:
        """Whether steps after the first one, which holds the end of the keys, change scores."""
        return self.plan.masks or bool(self.plan.code.score)

    @property
    def steps_read_keys(self) -> bool:
        """Whether a step reads the positions of its keys."""
        return self.changes_steps or self.plan.dropout

    @property
    def unmasked_read_keys(self) -> bool:
        """Whether a step without a mask reads the positions of its keys, too."""
        code = self.plan.code
        return bool(code.score or code.columns or code.elements or self.plan.dropout)

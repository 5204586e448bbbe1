"""HandedSteps: what consumers of the Gluon forward kernel get with keys, and load themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from flashgen.kernels.forward_hopper.handed import HandedColumns, handed_columns
from flashgen.kernels.forward_hopper.masked_steps import MaskedSteps
from flashgen.kernels.forward_hopper.shape import NARROW, HopperShape, hopper_shape
from flashgen.kernels.views import GluonView
from flashgen.plan.code import codes_of
from flashgen.symbolic.hoisting import Assignment
from flashgen.symbolic.printer.code import Code, read_by
from flashgen.symbols import KV_IDX, Load


@dataclass(frozen=True)
class HandedSteps(MaskedSteps):
    """Whether the producer hands visits over, and which elements of keys with them.

    Attributes:
        plan: the kernel's.
        of_sequences: whether tiles are of packed sequences, from a list.
        of_cache: whether keys and values of these sequences are in a cache: in rows or in pages.
        views: of packed sequences, the parts of tensors that a sequence has: see `views_in_gluon`.
    """

    of_sequences: bool = False
    of_cache: bool = False
    views: Mapping[str, GluonView] = field(default_factory=dict)

    @cached_property
    def shape(self) -> HopperShape:
        """The structure of the kernel."""
        return hopper_shape(self.plan)

    @property
    def hands_visits(self) -> bool:
        """Whether the producer hands a visit's entry of the list over with the visit's keys.

        Consumers then wait for no load of their own before they know a visit.
        """
        return self.plan.classifies and not (self.of_cache or self.shape.overlapped_tiles)

    @cached_property
    def handed(self) -> HandedColumns:
        """What the producer loads of a masked visit's keys, for all consumers."""
        code = self.plan.code
        if not self.hands_visits:
            return HandedColumns((), (), code.masked)
        tables = (read for table in code.tables for read in table.codes)
        read = read_by((*code.conditions, *codes_of(self.mask_code.own), *tables))
        arguments = self.plan.kernel_arguments
        heads, lengths = ("num_q_heads", "num_kv_heads"), ("q_len", "kv_len")
        known = ("batch", "head", "kv_idx", *heads, *lengths, *arguments.names)
        return handed_columns(code.masked, read, known, arguments.tensors)

    @property
    def views_handed(self) -> tuple[str, ...]:
        """The parts of tensors that the producer reads for that, as one sequence sees them."""
        read = read_by(codes_of(self.handed.lines))
        return tuple(name for name in self.views if name in read)

    @property
    def loads_keys(self) -> bool:
        """The same, besides what is handed over.

        What is loaded at a place that was handed over, as `table[ids[b, kv]]`, is loaded by key.
        """
        codes = (*self.plan.code.conditions, *codes_of(self.handed.others))
        loads = (load for code in codes for load in code.expr.atoms(Load))
        keys = {KV_IDX.name, *(line.name for line in self.plan.code.masked)}
        at_keys = (keys & {symbol.name for symbol in load.free_symbols} for load in loads)
        return self.plan.mask_loads_keys and any(at_keys)

    @property
    def splits_handed(self) -> bool:
        """Several of each key; and of packed sequences, where three consumers compare 128 columns.

        All columns of one take a register for each four, of which there are no more: at once they
        would spill 200 bytes, of two 1,600.
        """
        columns = len(self.handed.columns)
        narrow = sum(self.plan.v_segments) <= NARROW
        return columns > 1 or (columns == 1 and self.of_sequences and narrow)

    @property
    def handed_by_eights(self) -> bool:
        """Whether bits of columns are made of what is handed over, eight columns at a time."""
        return bool(self.handed.columns and (self.gathers_bits or self.mask_code.own))

    @property
    def own_lines(self) -> tuple[Assignment, ...]:
        """What consumers compute themselves for the bits of each column alone."""
        handed = {line for line in self.plan.code.masked if line not in self.handed.others}
        return tuple(line for line in self.mask_code.own_lines if line not in handed)

    @property
    def own_codes(self) -> tuple[Code, ...]:
        """What the bits of each column alone are computed from."""
        return tuple(codes_of(self.own_lines, self.mask_code.own))

    @property
    def own_bits_read_kv_idx(self) -> bool:
        """Whether these bits read the keys' positions."""
        return "kv_idx" in read_by(self.own_codes)

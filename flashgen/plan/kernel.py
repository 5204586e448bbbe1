"""KernelPlan: everything that a template prints, worked out beforehand; `lower` makes it of a spec.

Templates do no arithmetic: what is symbolic in a plan is either a sympy expression that the budget
evaluates, or text that `flashgen.symbolic.printer` has already printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import sympy

from flashgen.budget.targets import get_target
from flashgen.declared import Param
from flashgen.plan.arguments import Argument, argument
from flashgen.plan.head_dims import Segment, split_head_dim
from flashgen.plan.loops import KERNEL_NAMES, PrintedInterval, TileLoop, loops_over, print_interval
from flashgen.spec import AttentionSpec
from flashgen.symbolic.bounds import TileBounds, derive_bounds
from flashgen.symbolic.printer import torch_source, triton_source
from flashgen.symbolic.trace import Predicate, trace
from flashgen.symbols import Q_LAST

TRITON_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class KernelPlan:
    """One kernel, ready to budget and to print.

    Attributes:
        name: the variant's, and the generated module's.
        spec: what the user declared.
        predicate: the mask as sympy sees it.
        bounds: the KV ranges derived from it.
    """

    name: str
    spec: AttentionSpec
    predicate: Predicate
    bounds: TileBounds

    @property
    def qk_head_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.spec.qk_head_dim

    @property
    def v_head_dim(self) -> int:
        """Elements of a head's value and output."""
        return self.spec.v_head_dim

    @cached_property
    def qk_parts(self) -> tuple[Segment, ...]:
        """The segments that the columns of q and k are read in."""
        return split_head_dim(self.qk_head_dim)

    @cached_property
    def v_parts(self) -> tuple[Segment, ...]:
        """The segments that the columns of v and of the output are computed in."""
        return split_head_dim(self.v_head_dim)

    @property
    def qk_segments(self) -> tuple[int, ...]:
        """Widths of `qk_parts`, the padding of the last one included."""
        return tuple(part.width for part in self.qk_parts)

    @property
    def v_segments(self) -> tuple[int, ...]:
        """Widths of `v_parts`, the padding of the last one included."""
        return tuple(part.width for part in self.v_parts)

    @property
    def qk_padded(self) -> bool:
        """Whether the last segment of q and k reaches past the head dimension."""
        return sum(self.qk_segments) > self.qk_head_dim

    @property
    def v_padded(self) -> bool:
        """Whether the last segment of v and of the output reaches past the head dimension."""
        return sum(self.v_segments) > self.v_head_dim

    @property
    def mixes_widths(self) -> bool:
        """Whether tiles lie in shared memory in different ways: in rows of 32, 64 or 128 bytes."""
        widths = (*self.qk_segments, *self.v_segments)
        return len({min(width * self.itemsize, 128) for width in widths}) > 1

    @property
    def torch_dtype(self) -> str:
        """The dtype by torch's name, ``bfloat16``."""
        return self.spec.dtype

    @property
    def triton_dtype(self) -> str:
        """The dtype by Triton's name, ``bf16``."""
        return TRITON_DTYPES[self.spec.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of one element of q, k, v and the output."""
        return ITEMSIZES[self.spec.dtype]

    @property
    def input_precision(self) -> str | None:
        """How float32 enters the matrix units, ``"ieee"`` or ``"tf32"``; None for 16-bit types."""
        if self.spec.dtype != "float32":
            return None
        return self.spec.input_precision or "ieee"

    @property
    def scale(self) -> float:
        """The factor on q·k that a call without ``scale=`` gets."""
        return self.qk_head_dim**-0.5 if self.spec.scale is None else float(self.spec.scale)

    @property
    def params(self) -> tuple[Param, ...]:
        """What the call chooses, in the order of first use by mask, score and sink."""
        return self.spec.params

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The same as text."""
        return tuple(map(argument, self.params))

    @property
    def equal_lengths(self) -> bool:
        """Whether the mask has a meaning only for ``q_len == kv_len``."""
        return self.predicate.equal_lengths

    @property
    def targets(self) -> tuple[str, ...]:
        """The GPU architectures to choose a configuration for."""
        return self.spec.targets

    def uses_tma(self, target: str) -> bool:
        """Whether tiles come through tensor descriptors (TMA) on this target."""
        return get_target(target).has_tma

    @cached_property
    def masks(self) -> bool:
        """Whether the mask hides anything beyond the ends of the sequence."""
        return bool(self.predicate.expr != True)  # noqa: E712  (a sympy Boolean)

    @cached_property
    def mask_triton(self) -> tuple[str, ...]:
        """The conditions of the predicate, all of which hold for a visible key; none if all are."""
        return tuple(triton_source(term, KERNEL_NAMES) for term in self._mask_terms)

    @cached_property
    def mask_torch(self) -> tuple[str, ...]:
        """The same for the index tensors ``q_idx`` and ``kv_idx`` of the eager reference."""
        return tuple(torch_source(term) for term in self._mask_terms)

    @property
    def _mask_terms(self) -> tuple[object, ...]:
        expr = self.predicate.expr
        if not self.masks:
            return ()
        return tuple(expr.args) if isinstance(expr, sympy.And) else (expr,)

    @cached_property
    def intervals(self) -> tuple[PrintedInterval, ...]:
        """The bounds as text."""
        several = len(self.bounds.intervals) > 1
        return tuple(
            print_interval(interval, f"_{i}" if several else "")
            for i, interval in enumerate(self.bounds.intervals)
        )

    @cached_property
    def loops(self) -> tuple[TileLoop, ...]:
        """The kernel's loops in order: of each run its masked head, full middle and masked tail."""
        return tuple(loop for interval in self.intervals for loop in loops_over(interval))

    @cached_property
    def extra_symbols(self) -> tuple[str, ...]:
        """Run-time integers that the predicate reads besides indices, batch and kv_len, sorted."""
        return tuple(sorted(self._predicate_names - {"q_idx", "kv_idx", "b", "h", "kv_len"}))

    @property
    def bounds_read_q_last(self) -> bool:
        """Whether the range of keys depends on the last query of a tile."""
        return any(
            Q_LAST in end.free_symbols
            for run in self.bounds.intervals
            for end in (run.begin, run.end, run.full_begin, run.full_end, run.condition)
        )

    def reads(self, *names: str) -> bool:
        """Whether the predicate depends on any of these symbols: q_idx, kv_idx, b, h, q_len..."""
        return not self._predicate_names.isdisjoint(names)

    @cached_property
    def _predicate_names(self) -> frozenset[str]:
        return frozenset(symbol.name for symbol in self.predicate.expr.free_symbols)


def lower(spec: AttentionSpec, name: str) -> KernelPlan:
    """Traces the mask and derives from it everything that the kernel needs to know."""
    predicate = trace(spec.mask)
    return KernelPlan(name=name, spec=spec, predicate=predicate, bounds=derive_bounds(predicate))

"""ForwardHopper: the Gluon forward kernel for Hopper."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashgen.budget.targets import Target, get_target
from flashgen.budget.traffic import Workload
from flashgen.budget.usage import SramUsage
from flashgen.codegen.digest import source_digest
from flashgen.codegen.environment import render
from flashgen.codegen.functions import laid_out
from flashgen.config import HOPPER, KernelChoice, KernelConfig
from flashgen.kernels.base import ForwardKernel, Needs, Space, ViewOf
from flashgen.kernels.forward_hopper.pack_gqa import heads_of_a_tile, launched
from flashgen.kernels.forward_hopper.plan import DIALECT, OUT_COLUMNS, HopperNames
from flashgen.kernels.forward_hopper.shape import hopper_shape, segment_table, tables_of_segments
from flashgen.kernels.forward_hopper.shared_memory import (
    hopper_usage,
    visiting_rows,
    worst_hopper_usage,
)
from flashgen.kernels.forward_hopper.space import (
    hopper_space,
    predict_hopper,
    rank_hopper,
    why_not,
    without_form,
)
from flashgen.kernels.forward_hopper.weight_range import RANGES
from flashgen.kernels.views import views_in_gluon
from flashgen.plan import KernelPlan


def render_hopper(
    plan: KernelPlan,
    *,
    of_sequences: bool = False,
    of_cache: bool = False,
    view_of: ViewOf | None = None,
) -> str:
    """The functions of the forward kernel for Hopper: those in Gluon, `_attention_hopper` last.

    Where tiles of queries start at segments, `_find_segment_tiles` comes before them, in Triton.

    Args:
        plan: what it computes.
        of_sequences: whether of packed sequences.
        of_cache: whether of sequences whose keys are in a cache.
        view_of: of packed sequences, what each sees of a tensor.
    """
    views = views_in_gluon(plan.kernel_arguments, view_of) if view_of is not None else {}
    names = HopperNames(plan, of_sequences or of_cache, of_cache, views)
    text = render(
        "forward_hopper/kernel.py.jinja",
        DIALECT,
        plan=plan,
        shape=hopper_shape(plan),
        names=names,
        weights=RANGES[plan.torch_dtype],
    )
    kernel = laid_out(text, names.aggregates)
    if not names.segments:
        return kernel
    starts = render("forward_hopper/segment_tiles.py.jinja", segments=names.segments)
    return f"{starts}\n\n{kernel}"


class ForwardHopper(ForwardKernel):
    """Warp-specialised, persistent, fed by TMA."""

    name = "forward_hopper"
    key = "hopper"
    seal = "hopper"
    title = "Gluon kernel"
    elsewhere = "where TMA cannot read q, k or v"
    launcher = "_launch_hopper"
    own = "this Gluon kernel"

    def runs_on(self, target: str) -> bool:
        """On Hopper alone."""
        return target == HOPPER

    def why_not(self, plan: KernelPlan) -> str:
        """Elements, columns or segments that its instructions and tiles do not support."""
        return without_form(plan)

    def replaces(self, plan: KernelPlan) -> tuple[str, ...]:
        """The portable kernel."""
        return ("portable",)

    def space(self, plan: KernelPlan, target: str) -> Space:
        """Tiles of two or three consumers, and stages."""
        space = hopper_space(plan)
        return space if space.candidates else replace(space, why_not=why_not(plan))

    def rank(
        self, plan: KernelPlan, target: str, candidates: Sequence[KernelConfig]
    ) -> list[KernelConfig]:
        """By their modelled time."""
        return rank_hopper(plan, candidates)

    def usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """For parameters that are contiguous, as usual."""
        return hopper_usage(plan, config)

    def worst_usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """For any strides and any version of Triton."""
        return worst_hopper_usage(plan, config)

    def source(self, plan: KernelPlan, before: Collection[str] = ()) -> str:
        """The kernel's functions; no other kernel's functions precede them."""
        return render_hopper(plan)

    def digest(self, plan: KernelPlan) -> str:
        """Over the whole source."""
        return source_digest(render_hopper(plan))

    def needs(self, plan: KernelPlan) -> Needs:
        """A counter, and L2 for heads side by side, where tiles of queries differ in length."""
        names = HopperNames(plan)
        return Needs(
            gluon=True,
            sms=True,
            counter=names.counts,
            l2=plan.tiles.uneven,
            reinterprets=names.handed_by_eights,
        )

    def names(self, plan: KernelPlan, choice: KernelChoice) -> Mapping[str, Any]:
        """The variables that the launcher reads."""
        names, held = HopperNames(plan), bool(choice.configs)
        segments = names.segments if held else None
        return {
            "hopper": choice,
            "hopper_limit": get_target(HOPPER).max_shared,
            "out_columns": OUT_COLUMNS,
            "segments": segments,
            "tables_of_segments": tables_of_segments(plan, segments)
            if segments is not None
            else (),
            "counts": held and names.counts,
            "packs": held and names.packs,
            "tells_parts": held and names.tells_parts,
        }

    def why_not_packed(self, plan: KernelPlan) -> str:
        """Nothing: it serves the same plans."""
        return ""

    def packed_source(self, plan: KernelPlan, view_of: ViewOf) -> str:
        """`_list_and_fill` in Triton, then the functions of the kernel."""
        fill = render("forward_hopper/without_keys.py.jinja")
        return f"{fill}\n\n{render_hopper(plan, of_sequences=True, view_of=view_of)}"

    def packed_needs(self, plan: KernelPlan) -> Needs:
        """Memory as another shape, where these alone read elements eight at a time."""
        names = HopperNames(plan, of_sequences=True)
        return Needs(reinterprets=names.handed_by_eights)

    def cached_source(self, plan: KernelPlan) -> str:
        """The functions of the kernel for sequences whose keys are in a cache."""
        return render_hopper(plan, of_cache=True)

    def predict(
        self, plan: KernelPlan, config: KernelConfig, target: Target, work: Workload
    ) -> tuple[float, str]:
        """The modelled time; the model names no unit that the kernel waits for."""
        return predict_hopper(plan, config, work), ""

    def launched(
        self, plan: KernelPlan, config: KernelConfig, target: Target, work: Workload
    ) -> tuple[KernelConfig, int]:
        """Heads that share keys in one tile, and two consumers where a third saves no tile."""
        heads = heads_of_a_tile(plan, config, target, work)
        return launched(plan, config, work, heads), heads

    def visiting(self, plan: KernelPlan, config: KernelConfig) -> KernelConfig:
        """A consumer's rows, if it skips tiles of keys that only other consumers see."""
        return visiting_rows(plan, config)

    def remarks(self, plan: KernelPlan) -> tuple[str, ...]:
        """Where tiles start."""
        if HopperNames(plan).rests:
            return (
                "where heads share lists, the Gluon kernel starts tiles of queries anew for each "
                "list; the account has them at multiples of their queries",
            )
        if segment_table(plan) is None:
            return ()
        return (
            "the Gluon kernel starts tiles of queries where segments begin, where that saves tiles "
            "of keys; the account has them at multiples of BLOCK_M",
        )

"""Modules whose backward pass is watched on a Hopper GPU made of the CPU, and their kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, Mask, Tensor, alibi, block_sparse, causal, t5_bias
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from support.cases import Case
from support.contract import native_inputs
from support.specialised import Specialisations, watch, watch_hopper
from support.variants import rendered_module, shipped_specs
from support.vocabulary import VOCABULARY

ENDS = Tensor("ends", ("batch", "q_len"), "int32")
ROWS = Tensor("rows", ("batch", "q_len"))
LEARNS = AttentionSpec((56, 72), mask=causal(), score=alibi(Tensor("slopes", ("num_q_heads",))))

EACH_ROW = Mask(lambda b, h, q, kv: kv < ENDS[b, q], "each row has its end")


@functools.cache
def names_of(spec: AttentionSpec) -> HopperBackwardSplit:
    return HopperBackwardSplit(backward_plan(lower(spec, "x")))


SPECS = {name: spec for name, spec in shipped_specs().items() if not names_of(spec).why_not}
SPECS["learns"] = LEARNS
SPECS["deterministic"] = replace(shipped_specs()["window_d128"], deterministic=True)
SPECS["listed"] = AttentionSpec(64, mask=block_sparse(block=16))
SPECS["listed_twice"] = replace(SPECS["listed"], deterministic=True)
SPECS["slopes_d192"] = replace(LEARNS, head_dim=192)
SPECS["drops_d192"] = replace(shipped_specs()["dropout_causal_d64"], head_dim=192)
SPECS["portable"] = AttentionSpec(
    64, score=t5_bias().then(lambda score, b, h, q, kv: score + ROWS[b, q])
)
SPECS["by_rows"] = AttentionSpec(64, mask=EACH_ROW, deterministic=True)
for entry in ("t5_bias_causal", "softcap_by_head"):
    SPECS[entry] = VOCABULARY[entry].spec("bfloat16", 64)

KERNELS = ("_backward_rows", "_backward_hopper", "_place_sums")
DIVIDED = ("_backward_rows", "_backward_hopper", "_backward_queries_hopper")
BESIDE = ("_backward_rows", "_backward_hopper", "_backward_of_queries")
LISTS = ("_list_tiles", "_transpose_lists")
DECIDED = ("_classify_tiles", "_list_tiles")
PORTABLE = ("_backward_of_keys", "_backward_of_queries")
LENGTHS = (1, 2, 15, 16, 17, 31, 64, 100, 127, 128, 129, 200, 256, 300, 513, 640)
CASE = Case(200, 200, batch=2, q_heads=4, kv_heads=2)


def kernels_of(name: str) -> tuple[str, ...]:
    """Those that are launched, in their order, but for what lists tiles."""
    names = names_of(SPECS[name])
    if names.queries_portable:
        return (*BESIDE, *("_sum_diagonals",) * bool(names.backward.of_queries.diagonals))
    by_distance = names.queries_learn and names.of_queries.learned.diagonals
    return (*DIVIDED, *("_sum_strips",) * bool(by_distance)) if names.split else KERNELS


def lists_of(name: str) -> tuple[str, ...]:
    """What lists tiles, in each call anew."""
    names = names_of(SPECS[name])
    listed = DECIDED if names.backward.plan.classifies else LISTS
    return listed if names.visits.tiles.listed else ()


class Watched:
    """A module with a Hopper GPU made of the CPU, whose kernels launch nothing."""

    def __init__(
        self,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
        edit_source: Callable[[str], str] = lambda source: source,
    ) -> None:
        self.spec = SPECS[name]
        self.module: ModuleType = rendered_module(
            self.spec, name=name, hopper=True, edit_source=edit_source
        )
        watch_hopper(self.module, monkeypatch)
        monkeypatch.setattr(self.module, "_target", lambda device: "sm_90")
        if hasattr(self.module, "_find_rows"):
            # Of the mask's tables, not of gradients: nothing of it is kept.
            watch(self.module, monkeypatch, "_find_rows")
            monkeypatch.setattr(self.module, "_triton_launch", lambda kernel, grid: None)
        for kernel in vars(self.module).copy():
            if kernel.startswith(("_find_elements_", "_sum_elements")):
                watch(self.module, monkeypatch, kernel)  # after the kernels of gradients
        names = (*KERNELS, *DIVIDED[2:], *PORTABLE, *LISTS, *DECIDED[:1])
        names += ("_sum_diagonals", "_sum_strips")
        self.kernels: dict[str, Specialisations] = {
            kernel: watch(self.module, monkeypatch, kernel)
            for kernel in names
            if hasattr(self.module, kernel)
        }

    def call(self, case: Case, grad_out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Gradients of nothing, of tensors that have passed the checks."""
        tensors = native_inputs(case, self.spec)
        params = case.arguments(self.spec)
        q = tensors[0]
        shape = (*q.shape[:3], self.spec.v_head_dim)
        grad_out = q.new_ones(shape) if grad_out is None else grad_out
        lse = torch.zeros(q.shape[:3])
        bits: tuple[torch.Tensor, ...] = ()
        if hasattr(self.module, "_tile_bits"):
            bits = (self.module._tile_bits(q, tensors[1].shape[2], *params.values()),)
        given = (*tensors, 0.1, *params.values(), *bits, q.new_zeros(shape))
        given = (*given, lse, grad_out, lse.clone())
        results: tuple[torch.Tensor, ...] = self.module.op_backward(*given)
        return results

    @property
    def launched(self) -> set[str]:
        """What has been."""
        return {name for name, kernel in self.kernels.items() if kernel.grids}

"""Gluon forward kernels with marks, or with notes of programs, compile, and read their clocks."""

from __future__ import annotations

import pytest

from benchmarks.marks import marked, statements_of
from benchmarks.programs import noted
from compile.usage import AS_PTXAS_12_8_DOES
from flashgen.kernels.forward_hopper.kernel import render_hopper
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from support.compiling import hopper as compiled_hopper
from support.compiling.hopper import compile_hopper
from support.variants import shipped_plan


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("name", ["documents_d128", "causal_d64", "causal_d256", "causal_d80"])
def test_they_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = shipped_plan(name)
    config = rank_hopper(plan, hopper_space(plan).candidates)[0]
    plain = compile_hopper(plan, config)
    text = render_hopper(plan)
    monkeypatch.setattr(compiled_hopper, "render_hopper", lambda _: marked(text, 1 << 40, 7))
    with_marks = compile_hopper(plan, config)
    assert with_marks.shared == plain.shared and with_marks.warnings == ()
    marks = with_marks.opcodes["STG"] - plain.opcodes["STG"]
    of_steps = sum("warpgroup_mma_wait" in statement for statement in statements_of(text))
    roles = config.BLOCK_M // 64 + 1
    assert marks >= len(statements_of(text)) + of_steps * (roles - 2)


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("name", ["causal_d256", "documents_d128"])
def test_so_do_those_with_notes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = shipped_plan(name)
    config = rank_hopper(plan, hopper_space(plan).candidates)[0]
    plain = compile_hopper(plan, config)
    text = render_hopper(plan)
    monkeypatch.setattr(compiled_hopper, "render_hopper", lambda _: noted(text, 1 << 40))
    with_notes = compile_hopper(plan, config)
    assert with_notes.shared == plain.shared and with_notes.warnings == ()
    assert with_notes.opcodes["STG"] - plain.opcodes["STG"] >= 3 * config.BLOCK_M // 64

"""Copies of Gluon forward kernels that do less still make all products, or none."""

from __future__ import annotations

import pytest

from benchmarks.products import LOADS, PRODUCTS, alone
from compile.usage import AS_PTXAS_12_8_DOES
from flashgen.kernels.forward_hopper.kernel import render_hopper
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from support.compiling import hopper as compiled_hopper
from support.compiling.hopper import compile_hopper
from support.turns import some
from support.variants import shipped_plan


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize(
    "name", some(["causal_d80", "documents_d128", "causal_d192_v128"], every=3)
)
def test_what_is_left_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas drops what is not used: all of the products are, and exponentials are gone."""
    plan = shipped_plan(name)
    config = rank_hopper(plan, hopper_space(plan).candidates)[0]
    whole = compile_hopper(plan, config).opcodes
    text, counts = render_hopper(plan), {}
    for what in (PRODUCTS, LOADS):
        copy = alone(text, what)
        monkeypatch.setattr(compiled_hopper, "render_hopper", lambda _, copy=copy: copy)
        compiled = compile_hopper(plan, config)
        assert compiled.warnings == () and compiled.spilled == 0
        counts[what] = compiled.opcodes
    assert counts[PRODUCTS]["HGMMA"] == whole["HGMMA"]
    assert counts[LOADS]["HGMMA"] == 0
    for found in counts.values():
        assert found["UTMALDG"] == whole["UTMALDG"]
        assert found["MUFU"] < whole["MUFU"] / 10

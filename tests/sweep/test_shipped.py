"""Every shipped variant against float64, in every way that a call can differ from another.

`support.trials` has the calls: those by pairs, and, marked `full`, all that were ever tried.
"""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch

from support.cases import LAYOUTS, MIXED, Case, every_remainder, inputs
from support.oracle import check
from support.pairs import LENGTHS
from support.trials import FULL, GLUON, HOPPER_BACKWARD, SPECS, TILES, Kernel, Trial, fast, full
from support.variants import shipped_module
from sweep.launch import check_kernel, sweep_dtype
from sweep.run import check_trial

MODULES: dict[str, ModuleType] = {name: shipped_module(name) for name in SPECS}


@pytest.mark.parametrize("trial", [trial for kernel in FULL for trial in fast(kernel)], ids=str)
def test_pairs(trial: Trial) -> None:
    check_trial(trial)


@pytest.mark.full
@pytest.mark.parametrize("trial", [trial for kernel in FULL for trial in full(kernel)], ids=str)
def test_everything(trial: Trial) -> None:
    check_trial(trial)


def test_no_variant_is_left_out() -> None:
    without_gluon = {"causal_fp32_d64"}
    assert set(SPECS) - set(GLUON) == without_gluon
    assert not any(names.why_not for names in HOPPER_BACKWARD.values())
    for kernel in FULL:
        named = set(SPECS) - (without_gluon if kernel.endswith("hopper") else set())
        assert {trial.spec for trial in fast(kernel)} == named
        assert {trial.spec for trial in full(kernel)} == named


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_the_fast_set_has_each_pair(kernel: Kernel) -> None:
    """Of the things that matter most: the variant, and where lengths end inside of tiles."""
    of_spec: dict[str, set[str]] = {name: set() for name in SPECS}
    ends: set[tuple[str, int, int, bool]] = set()
    for trial in fast(kernel):
        of_spec[trial.spec].add(trial.case.layout)
        m, n = trial.config.BLOCK_M, trial.config.BLOCK_N
        ends.add((trial.case.layout, trial.case.q_len % m, trial.case.kv_len % n, trial.tma))
    assert all(layouts == {*LAYOUTS, MIXED} for layouts in of_spec.values())
    for layout, tma in itertools.product((*LAYOUTS, MIXED), (False, True)):
        assert any(end[0] == layout and end[3] == tma for end in ends)
    for side, index in ((32, 1), (16, 1), (32, 2), (16, 2)):
        remainders = {length(side) % side for length in LENGTHS.values()}
        assert remainders <= {end[index] for end in ends}


EMPTY = [
    Case(5, 5, batch=0),
    Case(0, 0),
    Case(0, 9, batch=2),
    Case(7, 0, q_heads=2, kv_heads=2),
]


@pytest.mark.parametrize("case", EMPTY, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_nothing_to_do(name: str, case: Case) -> None:
    if SPECS[name].equal_lengths and case.q_len != case.kv_len:
        tensors = inputs(case, SPECS[name], getattr(torch, SPECS[name].dtype))
        with pytest.raises(ValueError, match=rf"^k: got kv_len {case.kv_len} for q_len "):
            MODULES[name].attention(*tensors, **case.arguments(SPECS[name]))
    else:
        check_kernel(MODULES[name], SPECS[name], case)


@pytest.mark.parametrize("name", SPECS)
def test_attention_runs_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public call, with the variant's own dtype and configuration."""
    module, spec = MODULES[name], SPECS[name]
    monkeypatch.delattr(module, "reference")  # what it would run instead
    case = Case(70, 70, batch=2, q_heads=4, kv_heads=2)
    tensors = inputs(case, spec, getattr(torch, spec.dtype))
    params = case.arguments(spec)
    out, lse = module.attention(*tensors, return_lse=True, **params)
    check(out, lse, tensors, spec, case)
    assert torch.equal(module.attention(*tensors, **params), out)


@pytest.mark.parametrize("name", SPECS)
def test_descriptors_are_used_where_they_can_be(name: str) -> None:
    """TMA reads these layouts and no others: trials of the rest take pointers."""
    case = dict(q_len=9, kv_len=9, batch=2, q_heads=2, kv_heads=2)
    read = {
        layout: MODULES[name]._tma_reads(
            inputs(Case(**case, layout=layout), SPECS[name], sweep_dtype(SPECS[name]))[0]
        )
        for layout in LAYOUTS
    }
    no = {"unaligned", "one_head", "one_row"}
    assert read == {layout: layout not in no for layout in LAYOUTS}


def test_the_full_set_covers_every_remainder() -> None:
    for (m, n), equal in itertools.product(TILES, (True, False)):
        cases = list(every_remainder(m, n, equal_lengths=equal))
        pairs = [cases] if equal else [[c for c in cases if c.q_len != c.kv_len], cases]
        for some in pairs:
            assert {case.q_len % m for case in some} == set(range(m))
            assert {case.kv_len % n for case in some} == set(range(n))
        if not equal:
            full_tiles = [c for c in cases if c.q_len >= m and c.kv_len >= n]
            shifts = [c.kv_len - c.q_len for c in full_tiles]
            assert {shift % n for shift in shifts if shift > 0} == set(range(n))
            assert {shift % n for shift in shifts if shift < 0} == set(range(n))

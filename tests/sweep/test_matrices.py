"""Products before the kernels of linear attention, and defects that the calls find."""

from __future__ import annotations

import pytest

from support.matrices import CASES, check_matrices
from support.slip import with_slip
from support.variants import rendered_module

#: Defects: the text, what stands in its place, and the call that finds it.
DEFECTS = {
    "another matrix of keys": ("k @ of_k", "k @ (of_k + of_q[::2])", "pair"),
    "a matrix without a gradient": ("k @ of_k", "k @ of_k.detach()", "shared"),
    "matrices of other heads": (".repeat_interleave(q.shape[1] // k.shape[1], 0)",
                                ".repeat(q.shape[1] // k.shape[1], 1, 1)", "heads"),
    "NaN of padding": ("q, k = q.masked_fill(hidden, 0.0), k.masked_fill(hidden, 0.0)",
                       "pass", "documents"),
    "NaN behind the last sequence": ("q = q.masked_fill(_of_none(q, cu_seqlens_q, None), 0.0)",
                                     "pass", "varlen"),
    "NaN that kv_lens leave out": ("outside = outside | (", "outside = outside & (", "room"),
    "first tokens that kv_lens leave out": ("at, right=True)", "at)", "room"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_calls(name: str) -> None:
    check_matrices(rendered_module(CASES[name].spec), CASES[name])


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    old, new, found_by = DEFECTS[name]
    case = CASES[found_by]
    with pytest.raises(AssertionError, match="error"):
        check_matrices(rendered_module(case.spec, edit_source=with_slip(old, new)), case)

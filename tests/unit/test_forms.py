"""The forms of a spec: their order, and what depends on them."""

from dataclasses import replace

import pytest

from flashgen.build import as_asked
from flashgen.config import FORMS
from flashgen.errors import FlashgenError
from flashgen.forms.varlen import packed_tensor, view_of
from flashgen.loader import Variant
from flashgen.masks import causal
from flashgen.params import Tensor
from flashgen.spec import AttentionSpec

DENSE = AttentionSpec(head_dim=64, mask=causal())


def test_forms_have_one_order():
    spec = AttentionSpec(64, forms=["cache", "varlen", "dense", "cache"])
    assert spec.forms == ("dense", "varlen", "cache")
    assert spec.has_form("cache") and not DENSE.has_form("cache")


def test_the_dense_form_alone_leaves_the_digest_of_a_spec():
    assert replace(DENSE, forms=("dense",)).digest == DENSE.digest
    assert len({replace(DENSE, forms=FORMS[:n]).digest for n in (1, 2, 3)}) == 3
    before_specs_had_forms = "0192aa82"
    assert DENSE.digest.startswith(before_specs_had_forms)


def test_the_command_line_adds_forms():
    variants = [Variant("a", DENSE, ""), Variant("b", replace(DENSE, forms=FORMS[:2]), "")]
    asked = as_asked(variants, (), ("cache",))
    assert [v.spec.forms for v in asked] == [("dense", "cache"), FORMS]
    assert as_asked(variants, (), ()) == variants


def test_the_command_line_refuses_an_unknown_form():
    with pytest.raises(FlashgenError) as error:
        as_asked([], (), ("paged",))
    message = "--form=paged: unknown form; write one of dense, varlen, cache"
    assert str(error.value) == message


def test_packed_sequences_read_shared_rows_within_their_tensor() -> None:
    """The padding, and a sequence with broken lengths, have more queries than max_q_len."""
    tensors = {"rows": packed_tensor(Tensor("rows", ("num_q_heads", "q_len", "kv_len")))}
    sizes = view_of(tensors, "rows", "rows").sizes
    assert sizes == ("rows_size_0", "min(q_len, rows_size_1)", "kv_len")

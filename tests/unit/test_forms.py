"""The forms of a spec: their order, and what depends on them."""

from dataclasses import replace

import pytest
import torch

from flashgen.build import as_asked
from flashgen.config import FORMS
from flashgen.constants import Constant
from flashgen.errors import FlashgenError
from flashgen.forms.registry import why_no_form
from flashgen.forms.varlen import Varlen, dense_kernels, packed_tensor, view_of
from flashgen.functions import log
from flashgen.loader import Variant
from flashgen.masks import causal, document
from flashgen.normalisers import softmax
from flashgen.offsets import with_offsets
from flashgen.params import Tensor
from flashgen.plan import lower
from flashgen.reference import visibility
from flashgen.scores import alibi
from flashgen.spec import AttentionSpec
from flashgen.tracing.expr import kv_len
from support.data_masks import data_mask
from support.variants import any_hopper

DENSE = AttentionSpec(head_dim=64, mask=causal())


def test_forms_have_one_order():
    spec = AttentionSpec(64, forms=["cache", "varlen", "dense", "cache"])
    assert spec.forms == ("dense", "varlen", "cache")
    assert spec.has_form("cache") and not DENSE.has_form("cache")


def test_the_dense_form_alone_leaves_the_digest_of_a_spec():
    assert replace(DENSE, forms=("dense",)).digest == DENSE.digest
    assert len({replace(DENSE, forms=FORMS[:n]).digest for n in (1, 2, 3, 4)}) == 4
    before_specs_had_forms = "0192aa82"
    assert DENSE.digest.startswith(before_specs_had_forms)


def test_the_command_line_adds_forms():
    variants = [Variant("a", DENSE, ""), Variant("b", replace(DENSE, forms=FORMS[:2]), "")]
    asked = as_asked(variants, (), ("cache",))
    assert [v.spec.forms for v in asked] == [("dense", "cache"), FORMS[:3]]
    assert as_asked(variants, (), ()) == variants


def test_the_command_line_refuses_an_unknown_form():
    with pytest.raises(FlashgenError) as error:
        as_asked([], (), ("paged",))
    message = "--form=paged: unknown form; write one of dense, varlen, cache, mesh"
    assert str(error.value) == message


@pytest.mark.parametrize(("head_dim", "eights"), [(64, True), (128, False)])
def test_packed_sequences_of_narrow_heads_take_memory_as_another_shape(
    head_dim: int, eights: bool
) -> None:
    """They read eight columns of what is handed over at a time; the dense kernel reads all."""
    spec = AttentionSpec(head_dim, mask=data_mask("islands"), forms=("dense", "varlen"))
    plan = lower(spec, "islands")
    held = any_hopper(plan)
    assert Varlen().needs(plan, held).reinterprets == eights
    [kernel] = [x for x in dense_kernels(plan, held) if x.key == "hopper"]
    assert not kernel.needs(plan).reinterprets


def test_the_mesh_form_moves_mask_and_score_once() -> None:
    spec = AttentionSpec(64, mask=causal(), score=alibi(4), forms=("dense", "mesh"))
    again = replace(spec, targets=("sm_90",))
    assert again.mask == spec.mask and again.score == spec.score
    assert str(spec.mask.traced) == "q_idx + q_offset >= kv_idx + kv_offset"
    assert not spec.equal_lengths and spec.unaligned == ("causal()", "alibi(4)")


def test_the_lengths_of_a_mask_are_those_of_the_whole() -> None:
    """Also of a declared tensor; `reference.visibility` runs the same function on tensors."""
    ids = Tensor("ids", ("batch", "kv_len"), "int32", sorted=True)
    mask = with_offsets(document(ids) & causal(align="bottom_right"))
    assert mask.params[0].names == ("batch", "whole_kv_len")
    assert with_offsets(mask) is mask
    given = {"ids": torch.tensor([[0, 0, 1, 1, 1, 2]], dtype=torch.int32)}
    whole = {"whole_q_len": 6, "whole_kv_len": 6} | given
    every = visibility(mask, 1, 1, 6, 6, params=whole, device=torch.device("cpu"))
    at = {"q_offset": 3, "kv_offset": 2}
    part = visibility(mask, 1, 1, 3, 2, params=whole | at, device=torch.device("cpu"))
    assert torch.equal(part, every[..., 3:, 2:4]) and 0 < part.sum() < 6


REFUSED = {
    "calls of the form 'varlen' have no offsets": {"forms": ("dense", "varlen", "mesh")},
    "'mesh' has no sink that depends on a length": {
        "normaliser": softmax(sink=lambda b, h: log(kv_len))
    },
    "the constant ids has the length of a whole, which no part has": {
        "mask": lambda b, h, q, kv: OF_KEYS[q] == OF_KEYS[kv]
    },
}
OF_KEYS = Constant("ids", [0, 0, 1], dims=("kv_len",))


@pytest.mark.parametrize("reason", REFUSED)
def test_what_has_no_mesh_form_is_refused(reason: str) -> None:
    fields = {"mask": causal(), "forms": ("dense", "mesh")} | REFUSED[reason]
    assert why_no_form("mesh", lower(AttentionSpec(64, **fields), "refused")) == reason


def test_packed_sequences_read_shared_rows_within_their_tensor() -> None:
    """The padding, and a sequence with broken lengths, have more queries than max_q_len."""
    tensors = {"rows": packed_tensor(Tensor("rows", ("num_q_heads", "q_len", "kv_len")))}
    sizes = view_of(tensors, "rows", "rows").sizes
    assert sizes == ("rows_size_0", "min(q_len, rows_size_1)", "kv_len")

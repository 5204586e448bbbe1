"""`varlen_attention` of linear attention: what it refuses, broken lengths, states, the operator."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Tensor,
    causal,
    chunked,
    document,
    elu_plus_one,
    favor,
    identity,
    linear,
)
from flashgen.forms.registry import why_no_form
from flashgen.plan import lower
from support.linear_lengths import (
    CU,
    FORMS,
    SPECS,
    check_broken,
    check_nan,
    check_nothing,
    check_steps,
    drawn,
    parts,
    states,
)
from support.linear_packed import offsets
from support.specialised import watch
from support.variants import rendered_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

OF_FEATURES = Tensor("decay", ("batch", "num_kv_heads", "kv_len", 16))

REFUSED = [
    ("q", torch.zeros(1, 2, 33, 16), ValueError,
     "q: got 4 dimensions; pass (tokens, heads, head_dim), or call attention with "
     "(batch, heads, seq, head_dim)"),
    ("v", torch.zeros(12, 1, 16), ValueError, "v: got 12 tokens, k has 33; pass as many as k"),
    ("decay", torch.zeros(33, 1), ValueError, "decay: got shape (33, 1); pass (1, 33)"),
    ("cu_seqlens_q", CU.long(), TypeError, "cu_seqlens_q: got torch.int64; pass torch.int32"),
    ("max_q_len", CU[1], TypeError, "max_q_len: got Tensor; pass an int, which the host knows"),
    ("initial_state", (torch.zeros(3, 1, 16, 16), torch.zeros(3, 1, 16)), ValueError,
     "initial_state[0]: got shape (3, 1, 16, 16); pass (4, 1, 16, 16)"),
    ("initial_state", torch.zeros(4, 1, 16, 16), TypeError,
     "initial_state: got Tensor; pass a pair of tensors, kv and z"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED)
def test_what_a_call_refuses(name: str, value: Any, error: type[Exception], message: str) -> None:
    module, given = rendered_module(SPECS["decays"]), drawn()
    module.varlen_attention(**given)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        module.varlen_attention(**{**given, name: value})


def test_equal_lengths_take_the_same_offsets() -> None:
    module, given = rendered_module(SPECS["decays"]), drawn()
    with pytest.raises(ValueError, match=r"^cu_seqlens_kv: is another tensor"):
        module.varlen_attention(**{**given, "cu_seqlens_kv": CU.clone()})
    with pytest.raises(ValueError, match=r"^kv_lens: got lengths of keys alone"):
        module.varlen_attention(**given, kv_lens=CU[1:])


@pytest.mark.parametrize(
    ("normalise", "reason"), [(False, "weights are not divided by"), (True, "may be negative")]
)
def test_sums_without_a_logarithm(normalise: bool, reason: str) -> None:
    """There is none, or one that may be negative."""
    normaliser = replace(SPECS["plain"].normaliser, normalise=normalise)
    module = rendered_module(replace(SPECS["plain"], normaliser=normaliser))
    with pytest.raises(ValueError, match=f"^return_lse: got True; .*{reason}"):
        module.varlen_attention(**drawn("plain"), return_lse=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"normaliser": linear(favor(32))}, "'varlen' has no random features"),
        ({"normaliser": linear(identity(), decay=OF_FEATURES)}, "'varlen' has no decays of feat"),
        ({"mask": causal() & document()}, "'varlen' has no runs within sequences"),
        ({"mask": causal() & chunked(8)}, "'varlen' has no runs within sequences"),
    ],
)
def test_what_specs_cannot_have(change: dict[str, Any], reason: str) -> None:
    given = {"mask": causal(), "normaliser": linear(elu_plus_one()), "forms": FORMS} | change
    assert why_no_form("varlen", lower(AttentionSpec(16, "float32", **given), "x")).startswith(
        reason
    )


@pytest.mark.parametrize("name", SPECS)
def test_broken_lengths_are_nan_and_no_other_changes(name: str) -> None:
    check_broken(rendered_module(SPECS[name]), name)


def test_nan_of_a_sequence_stays_in_it() -> None:
    check_nan(rendered_module(SPECS["decays"]))


@pytest.mark.parametrize("name", ["decays", "plain"])
def test_step_goes_on_from_a_returned_state(name: str) -> None:
    check_steps(rendered_module(SPECS[name]), name)


def test_no_sequence_and_no_token() -> None:
    check_nothing(rendered_module(SPECS["decays"]))


def test_broken_lengths_raise_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = rendered_module(SPECS["decays"]), drawn()
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    given["decay"][:, 30:] = 0.0
    module.varlen_attention(**given)
    with pytest.raises(ValueError, match=r"^max_q_len: is 5; pass at least 20, of sequence 0$"):
        module.varlen_attention(**{**given, "max_q_len": 5})
    with pytest.raises(ValueError, match=r"^decay: holds numbers above 0"):
        module.varlen_attention(**{**given, "decay": given["decay"] + 9.0})


@pytest.mark.parametrize("name", SPECS)
def test_the_reference_is_that_of_each_sequence(name: str) -> None:
    """In float64, with second derivatives, which the reference computes."""
    module, given = rendered_module(SPECS[name]), drawn(name)
    names = ["q", "k", "v"] + ["decay"] * (name != "all")
    leaves = [given[x].double().requires_grad_() for x in names]
    given |= dict(zip(names, leaves, strict=True))
    out = module.varlen_reference(**given)
    alone = []
    for begin, end in pairwise(CU):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in leaves[:3])
        more = {"decay": leaves[3][None, :, begin:end]} if name != "all" else {}
        alone.append(module.reference(q, k, v, **more)[0].transpose(0, 1))
    right = torch.cat([*alone, out.new_zeros(3, 2, 16)])
    torch.testing.assert_close(out, right, rtol=0, atol=0)
    grads = []
    for x in (out, right):
        first = torch.autograd.grad(x.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(y.square().sum() for y in first), leaves)
        grads.append((*first, *second))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", SPECS)
def test_the_operator(name: str) -> None:
    module, given = rendered_module(SPECS[name]), drawn(name)
    tensors = [given[x] for x in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")]
    args = [*tensors, 20, 20, None] + [0.5] * (name == "plain")
    if name != "all":
        args += [given["decay"], *parts(states(name)), True]
    assert module.varlen_op.name().endswith("_varlen")
    torch.library.opcheck(module.varlen_op, args, test_utils=("test_schema", "test_faketensor"))
    torch._dynamo.reset()
    compiled = torch.compile(module.varlen_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given), module.varlen_attention(**given), rtol=0, atol=0)
    given["q"].requires_grad_()
    with pytest.raises(Exception, match="gradients of packed sequences by the eager reference"):
        compiled(**given)


KERNELS = {
    "decays": (
        "_linear_decays_varlen",
        "_linear_features_varlen",
        "_linear_states_varlen",
        "_linear_scan_varlen",
        "_linear_forward_varlen",
        "_weighted_features_varlen",
        "_linear_backward_of_queries_varlen",
        "_linear_states_of_queries_varlen",
        "_linear_backward_of_keys_varlen",
        "_linear_backward_of_values_varlen",
        "_linear_backward_of_decays_varlen",
        "_list_sequence_tiles",
    ),
    "all": (
        "_linear_features_varlen",
        "_linear_states_varlen",
        "_add_parts",
        "_linear_forward_varlen",
        "_weighted_features_varlen",
        "_linear_backward_of_queries_varlen",
        "_linear_states_of_queries_varlen",
        "_linear_backward_of_keys_varlen",
        "_linear_backward_of_values_varlen",
        "_list_sequence_tiles",
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_one_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of tokens, sequences and heads; of a first state and of none."""
    module = rendered_module(SPECS[name])
    watched = {kernel: watch(module, monkeypatch, kernel) for kernel in KERNELS[name]}
    monkeypatch.setattr(module.triton.knobs.runtime, "interpret", True)  # to launch without a GPU
    monkeypatch.setattr(module, "_multiprocessors", lambda device: 132)
    for lens in ((1000,), (300, 400), (16,) * 40, (7, 0, 1000), (640, 640)):
        cu = offsets(lens)
        given = drawn(name, sum(lens), heads=2)
        given |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_q_len": 1000, "max_kv_len": 1000}
        given["q"].requires_grad_()
        module.varlen_attention(**given).sum().backward()
    # Features are mapped with and without their sums; segments are added up both ways; lists are of
    # queries and of keys.
    several = {"_linear_features_varlen": 2, "_linear_scan_varlen": 2}
    several |= {"_list_sequence_tiles": 2} if name == "all" else {}
    for kernel, seen in watched.items():
        assert 1 <= len(seen.keys) <= several.get(kernel, 1), (kernel, len(seen.keys))

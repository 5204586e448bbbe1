"""The cache form of a module on the CPU: what it computes, refuses, and tells torch."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from flashgen import AttentionSpec, causal, tree
from support.cached import FORMS, PAGES, SPEC, CacheCall, cached, hold
from support.variants import rendered_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

TREE = AttentionSpec(16, "float32", mask=tree(), forms=FORMS)
ROWS = CacheCall((20, 9, 0), 2, slots=True)


@pytest.mark.parametrize("call", [ROWS, PAGES], ids=["rows", "pages"])
def test_cpu_tensors_run_the_reference(call: CacheCall) -> None:
    given = cached(call, SPEC, torch.float32)
    with torch.no_grad():
        out, lse = rendered_module(SPEC).cache_attention(**given.arguments, return_lse=True)
    hold(out, lse, given, SPEC, call)


def test_padding_of_a_given_output_is_not_written() -> None:
    given = cached(PAGES, SPEC, torch.float32)
    out = torch.full_like(given.arguments["q"], 7.0)
    with torch.no_grad():
        rendered_module(SPEC).cache_attention(**given.arguments, out=out)
    assert (out[-PAGES.padding :] == 7.0).all() and not (out[: -PAGES.padding] == 7.0).any()


def test_the_reference_by_hand() -> None:
    """Two pages of sequence 1, of which the second holds one key; its query sees both."""
    module, pages = rendered_module(TREE), torch.randn(4, 16, 1, 16)
    q, lens = torch.randn(2, 1, 2, 16), torch.tensor([0, 17], dtype=torch.int32)
    table = torch.tensor([[-1, -1], [3, 1]], dtype=torch.int32)
    seen = torch.ones(2, 1, 1, dtype=torch.bool)
    call = {"kv_lens": lens, "block_table": table, "ancestors": seen}
    out = module.cache_reference(q, pages, pages, **call)
    keys = torch.cat([pages[3, :, 0], pages[1, :1, 0]])
    right = (q[1, 0] @ keys.T / 4).softmax(-1) @ keys
    torch.testing.assert_close(out[1, 0], right)
    assert not out[0].any()


#: What is changed of the arguments, and the message.
REFUSED: dict[str, tuple[CacheCall, dict[str, Any], type[Exception], str]] = {
    "dense layout": (
        ROWS, {"k_cache": torch.zeros(3, 2, 27, 16), "v_cache": torch.zeros(3, 2, 27, 16)},
        ValueError,
        "k_cache: got 27 heads for 4 of q; pass (..., heads, head_dim) with a divisor of q's "
        "heads, not attention's (batch, heads, seq, head_dim)",
    ),
    "dtype": (ROWS, {"v_cache": torch.zeros(5, 27, 2, 16).half()}, TypeError,
              "v_cache: got torch.float16; rendered was built for torch.float32"),
    "int64": (ROWS, {"kv_lens": torch.tensor([1, 2, 3])}, TypeError,
              "kv_lens: got torch.int64; pass torch.int32"),
    "no tensor": (ROWS, {"kv_lens": [1, 2, 3]}, TypeError,
                  "kv_lens: got list; pass a torch.Tensor"),
    "device": (ROWS, {"kv_lens": torch.zeros(3, dtype=torch.int32, device="meta")}, ValueError,
               "kv_lens: is on meta, not on cpu; pass one device"),
    "one length": (ROWS, {"kv_lens": torch.zeros(2, dtype=torch.int32)}, ValueError,
                   "kv_lens: got 2 lengths, q has batch 3; pass one of each sequence"),
    "one slot": (ROWS, {"cache_slots": torch.zeros(2, dtype=torch.int32)}, ValueError,
                 "cache_slots: got 2 for 3 sequences; pass one of each"),
    "no slots": (ROWS, {"cache_slots": None}, ValueError,
                 "k_cache: got batch 5 for 3 sequences; pass equal batches, cache_slots or a "
                 "block_table"),
    "head_dim": (ROWS, {"q": torch.zeros(3, 2, 4, 8)}, ValueError,
                 "q: got head_dim 8; rendered was built for 16"),
    "dimensions": (ROWS, {"q": torch.zeros(6, 4, 16)}, ValueError,
                   "q: got 3 dimensions; pass (batch, q_len, heads, head_dim)"),
    "columns apart": (ROWS, {"q": torch.zeros(3, 2, 4, 32)[..., ::2]}, ValueError,
                      "q: its last dimension has stride 2; make it contiguous"),
    "other values": (ROWS, {"v_cache": torch.zeros(5, 27, 1, 16)}, ValueError,
                     "v_cache: got shape (5, 27, 1, 16); pass (5, 27, 2, 16), as k_cache"),
    "both places": (ROWS, {"block_table": torch.zeros(3, 1, dtype=torch.int32)}, ValueError,
                    "cache_slots: there is a block_table too; pass one of them"),
    "max_q_len": (ROWS, {"max_q_len": 2}, ValueError,
                  "max_q_len: is for cu_seqlens_q, which is None; leave it out"),
    "splits": (ROWS, {"num_splits": 0}, ValueError,
               "num_splits: got 0; pass 1 to 256, or None"),
    "splits of a kind": (ROWS, {"num_splits": 2.0}, TypeError,
                         "num_splits: got float; pass an int or None"),
    "output": (ROWS, {"out": torch.zeros(3, 4, 2, 16)}, ValueError,
               "out: got shape (3, 4, 2, 16); pass (3, 2, 4, 16)"),
    "expanded output": (ROWS, {"out": torch.zeros(1, 2, 4, 16).expand(3, 2, 4, 16)}, ValueError,
                        "out: is expanded, and is written; pass a tensor with memory of its own"),
    "parameter": (ROWS, {"slopes": torch.zeros(3)}, ValueError,
                  "slopes: got shape (3,); pass (4,)"),
    "scale": (ROWS, {"scale": -1.0}, ValueError,
              "scale: got -1.0; pass a positive number of 32 bits, below 2**127"),
    "packed": (PAGES, {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, ValueError,
               "cu_seqlens_q: got 3 elements for 3 sequences; pass 4"),
    "packed without max": (PAGES, {"max_q_len": None}, TypeError,
                           "max_q_len: got NoneType; pass an int with cu_seqlens_q"),
    "tokens": (PAGES, {"q": torch.zeros(1, 1, 16).expand(2**31, 4, 16)}, ValueError,
               "q: got 2147483648 tokens for 3 sequences; pass fewer"),
    "no queries": (PAGES, {"max_q_len": 0}, ValueError, "max_q_len: got 0; pass at least 1"),
    "page size": (PAGES, {"k_cache": torch.zeros(9, 8, 2, 16), "v_cache": torch.zeros(9, 8, 2, 16)},
                  ValueError, "k_cache: got pages of 8 keys; pass one of 1, 16, 32, 64, 128, 256"),
    "table": (PAGES, {"block_table": torch.zeros(2, 3, dtype=torch.int32)}, ValueError,
              "block_table: got 2 rows for 3 sequences; pass one of each"),
    "table of one row": (PAGES, {"block_table": torch.zeros(3, dtype=torch.int32)}, ValueError,
                         "block_table: got 1 dimensions; pass 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_named(name: str) -> None:
    call, change, kind, message = REFUSED[name]
    arguments = cached(call, SPEC, torch.float32).arguments | change
    with torch.no_grad(), pytest.raises(kind) as error:
        rendered_module(SPEC).cache_attention(**arguments)
    assert str(error.value) == message


def test_an_expanded_cache_is_not_appended_to() -> None:
    new, cache = torch.zeros(3, 1, 2, 16), torch.zeros(3, 8, 2, 16)
    lens = torch.ones(3, dtype=torch.int32)
    for name, caches in (("k_cache", (cache[:1].expand_as(cache), cache)),
                         ("v_cache", (cache, cache[:1].expand_as(cache)))):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}: is expanded, and is written"):
            rendered_module(SPEC).append(new, new, *caches, lens)


def test_gradients_are_refused() -> None:
    given = cached(ROWS, SPEC, torch.float32)
    given.arguments["q"].requires_grad_()
    module = rendered_module(SPEC)
    with pytest.raises(RuntimeError, match="no gradients through a cache: call cache_attention"):
        module.cache_attention(**given.arguments)
    new = torch.zeros(5, 1, 2, 16, requires_grad=True)
    lens = torch.ones(5, dtype=torch.int32)
    caches = given.arguments["k_cache"], given.arguments["v_cache"]
    with pytest.raises(RuntimeError, match="no gradients through a cache: call append under"):
        module.append(new, new, *caches, lens)


def test_opcheck() -> None:
    module = rendered_module(SPEC)
    a = cached(PAGES, SPEC, torch.float32).arguments
    tensors = (a["q"], a["k_cache"], a["v_cache"], a["kv_lens"], a["cu_seqlens_q"], 5)
    out = torch.empty_like(a["q"])
    call = (*tensors, a["block_table"], None, out, 0.25, a["slopes"])
    torch.library.opcheck(module.op_cache, call)
    new = torch.randn(3, 1, 2, 16)
    caches = torch.zeros(2, 3, 8, 2, 16)
    angles = torch.zeros(9, 4)
    call = (new, new, *caches, torch.ones(3, dtype=torch.int32), None, None, angles, angles, False)
    torch.library.opcheck(module.op_append, (*call, new.clone(), torch.empty_like(new)))


def test_a_compiled_step_has_no_graph_break_and_one_graph_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = rendered_module(SPEC)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where torch looks for its names
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(
        q: Any, k: Any, v: Any, cos: Any, sin: Any, lens: Any, caches: Any, slopes: Any
    ) -> Any:
        q = module.append(k, v, *caches, lens, None, cos, sin, q=q)
        return module.cache_attention(q, *caches, lens, slopes=slopes)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    caches, others = torch.zeros(2, 2, 3, 40, 2, 16)
    angles = torch.randn(40, 8)
    for length in (1, 17, 30):
        lens = torch.tensor([length, length + 3, 5], dtype=torch.int32)
        q, (k, v) = torch.randn(3, 1, 4, 16), torch.randn(2, 3, 1, 2, 16)
        call = (q, k, v, angles.cos(), angles.sin(), lens)
        with torch.no_grad():
            got = compiled(*call, caches, torch.ones(4))
            right = step(*call, others, torch.ones(4))
        torch.testing.assert_close(got, right, rtol=0, atol=0)
        assert torch.equal(caches, others) and caches.any()
    assert counter.frame_count == 1


def test_fake_tensors_have_the_shapes() -> None:
    module = rendered_module(SPEC)
    arguments = cached(PAGES, SPEC, torch.float32).arguments
    with FakeTensorMode() as mode, torch.no_grad():
        fake = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
                for n, x in arguments.items()}  # fmt: skip
        out, lse = module.cache_attention(**fake, return_lse=True)
    assert out.shape == (10, 4, 16) and lse.shape == (10, 4) and lse.dtype == torch.float32


def _rotated(x: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The first columns of x as complex numbers, times those of the angle."""
    n = angle.shape[-1]
    pairs = x[..., : 2 * n].unflatten(-1, (n, 2) if interleaved else (2, n))
    pairs = pairs if interleaved else pairs.mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(n), angle)
    turned = torch.view_as_real(turned)
    turned = (turned if interleaved else turned.mT).flatten(-2)
    return torch.cat([turned, x[..., 2 * n :]], dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_append(interleaved: bool) -> None:
    """Two keys each of sequences of 3 and 17, in pages of 16: the latter's begin a page."""
    module = rendered_module(SPEC)
    k_new, v_new = torch.randn(2, 2, 2, 2, 16)
    q = torch.randn(2, 2, 4, 16)
    caches = torch.zeros(2, 4, 16, 2, 16)
    table = torch.tensor([[2, -1], [3, 0]], dtype=torch.int32)
    angles = torch.randn(20, 6)
    lens = torch.tensor([3, 17], dtype=torch.int32)
    with torch.no_grad():
        turned = module.append(
            k_new, v_new, *caches, lens, table, angles.cos(), angles.sin(),
            interleaved=interleaved, q=q,
        )  # fmt: skip
    for b, (i, position, page, row) in ((0, (0, 1, 2, 1)), (0, (1, 2, 2, 2)),
                                        (1, (0, 15, 3, 15)), (1, (1, 16, 0, 0))):  # fmt: skip
        angle = angles[position]
        key = _rotated(k_new[b, i], angle, interleaved)
        torch.testing.assert_close(caches[0, page, row], key)
        torch.testing.assert_close(caches[1, page, row], v_new[b, i], rtol=0, atol=0)
        torch.testing.assert_close(turned[b, i], _rotated(q[b, i], angle, interleaved))
        caches[:, page, row] = 0
    assert not caches.any()


def test_tree_ancestors() -> None:
    """By walking from each token to the root, for trees of every size up to 20."""
    module = rendered_module(TREE)
    for count in (1, 2, 3, 5, 8, 20):
        parents = torch.tensor([[-1, *(max(0, i - 1 - i % 3) for i in range(1, count))],
                                [i - 1 for i in range(count)]], dtype=torch.int32)  # fmt: skip
        right = torch.zeros(2, count, count, dtype=torch.bool)
        for b in range(2):
            for i in range(count):
                at = i
                while at >= 0:
                    right[b, i, at] = True
                    at = int(parents[b, at])
        assert torch.equal(module.tree_ancestors(parents), right)
        assert torch.equal(module.tree_ancestors(parents[1]), right[1])


#: Parents, which tokens have none but for a fault, and the first fault.
WRONG_PARENTS = [
    ([[1, 0, 0, 9]], [0, 1, 2, 3], "parents[0, 0]: is 1;"),  # a cycle, and one that does not exist
    ([-1, 0, 1, 5, 3, 1], [3, 4], "parents[3]: is 5;"),
    ([-1, 1, -1, 2], [1], "parents[1]: is 1;"),
    ([-1, 0, -2, 2], [2, 3], "parents[2]: is -2;"),
    ([2**31 - 1, -(2**31), -1], [0, 1], "parents[0]: is 2147483647;"),
]


@pytest.mark.parametrize(("parents", "at_fault", "message"), WRONG_PARENTS)
def test_wrong_parents_have_no_tokens(
    parents: Any, at_fault: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that does not have itself is never the longest right path."""
    module, given = rendered_module(TREE), torch.tensor(parents, dtype=torch.int32)
    found = module.tree_ancestors(given).view(given.shape[-1], -1)
    alone = given.clone().view(-1)
    alone[at_fault] = -1
    right = module.tree_ancestors(alone)
    right[at_fault] = False
    assert torch.equal(found, right)
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    with pytest.raises(ValueError, match=f"^{re.escape(message)} pass -1 or the number of a token"):
        module.tree_ancestors(given)
    module.tree_ancestors(alone)


@pytest.mark.parametrize(
    ("parents", "kind", "message"),
    [
        (torch.zeros(3), TypeError, "parents: got torch.float32; pass a tensor of torch.int32"),
        ([0], TypeError, "parents: got list; pass a tensor of torch.int32"),
        (torch.zeros(1, 1, 1, dtype=torch.int32), ValueError,
         "parents: got 3 dimensions; pass (batch, tokens) or (tokens,)"),
    ],
)  # fmt: skip
def test_wrong_parents_are_named(parents: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        rendered_module(TREE).tree_ancestors(parents)
    assert str(error.value) == message


def test_a_module_may_have_all_forms() -> None:
    """With Gluon kernels for packed sequences, which are no cache kernels."""
    spec = AttentionSpec(
        64, "float16", mask=causal(align="bottom_right"), forms=("dense", "varlen", "cache")
    )
    module = rendered_module(spec, hopper=True)
    q, k, v = torch.randn(3, 9, 2, 64).half()
    begins, lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 9], [4, 5]))
    with torch.no_grad():
        packed = module.varlen_attention(q, k, v, begins, begins, 5, 5)
        caches = torch.zeros(2, 2, 8, 2, 64).half()
        module.append(k, v, *caches, lens, cu_seqlens=begins)
        of_cache = module.cache_attention(q, *caches, lens, cu_seqlens_q=begins, max_q_len=5)
    torch.testing.assert_close(of_cache, packed)

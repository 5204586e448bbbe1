"""CPU tensors outside the interpreter: eager torch by tiles of queries, with the derived bounds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashgen import (
    AttentionSpec,
    Tensor,
    additive_bias,
    causal,
    document,
    maximum,
    sink_tokens,
    sliding_window,
)
from flashgen.masks import Mask
from support.cases import Case
from support.contract import native_inputs
from support.gradients import leaves_of
from support.slip import with_slip
from support.variants import ROOT, rendered_module
from support.vocabulary import VOCABULARY

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")
#: Three tiles of queries of each head, the last one of a row.
CASE = Case(33, 33, batch=2, q_heads=4, kv_heads=2)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> object:
    """Has modules take 16 queries at a time."""

    def of(module: ModuleType) -> ModuleType:
        monkeypatch.setattr(module, "EAGER_TILE", 1)
        return module

    return of


def both(module: ModuleType, spec: AttentionSpec, case: Case) -> list[list[torch.Tensor]]:
    """Results and gradients of a call, by tiles and by the reference."""
    found = []
    for attention in (module.attention, module.reference):
        given = case.arguments(spec)
        qkv, params, learned = leaves_of(native_inputs(case, spec), given)
        results = attention(*qkv, return_lse=True, scale=case.scale, **params)
        drawn = torch.Generator().manual_seed(1)
        outer = [torch.randn(x.shape, generator=drawn).to(x.dtype) for x in results]
        outer[1].masked_fill_(results[1].isinf(), 0.0)
        leaves = (*qkv, *learned.values())
        grads = torch.autograd.grad(results, leaves, outer, materialize_grads=True)
        found.append([*(x.detach() for x in results), *grads])
    return found


@pytest.mark.parametrize("name", VOCABULARY)
def test_tiles_compute_what_the_reference_does(name: str, small_tiles) -> None:
    entry = VOCABULARY[name]
    spec = entry.spec("float32")
    lengths = [(33, 33)] if entry.equal_lengths else [(33, 40), (33, 17)]
    for q_len, kv_len in lengths:
        case = entry.case(Case(q_len, kv_len, 2, 4, 2, scale=0.7))
        for tiles, whole in zip(*both(small_tiles(rendered_module(spec)), spec, case), strict=True):
            torch.testing.assert_close(tiles, whole, rtol=2e-5, atol=2e-5)


def test_a_bound_that_is_an_extreme_over_rows_is_for_kernels_alone(small_tiles) -> None:
    spec = AttentionSpec(16, "float32", lambda b, h, q, k: k <= (maximum(q, 3) & 15))
    module = small_tiles(rendered_module(spec))
    for tiles, whole in zip(*both(module, spec, Case(100, 100, 2, 4, 2)), strict=True):
        torch.testing.assert_close(tiles, whole, rtol=2e-5, atol=2e-5)


#: Tiles of it have keys that all their queries see, at the sequence's begin and in the window.
SINKS = AttentionSpec(16, "float32", causal() & (sink_tokens(4) | sliding_window(40, 0)))


def check_sinks(module: ModuleType) -> None:
    for tiles, whole in zip(*both(module, SINKS, Case(100, 100, 2, 4, 2)), strict=True):
        torch.testing.assert_close(tiles, whole, rtol=2e-5, atol=2e-5)


def test_keys_that_all_queries_of_a_tile_see_need_no_mask(small_tiles) -> None:
    check_sinks(small_tiles(rendered_module(SINKS)))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("masked.append((end, full_begin))", "pass"),  # what the tile's last query has left behind
        ("masked.append((end, kv_end))", "pass"),  # what its first one does not see yet
        ("in sorted(full)", "in [(full[0][0], full[1][1])]"),  # what lies between the two
    ],
)
def test_a_mask_that_a_tile_lacks_is_found(right: str, wrong: str, small_tiles) -> None:
    module = small_tiles(rendered_module(SINKS, edit_source=with_slip(right, wrong)))
    with pytest.raises(AssertionError, match="not close"):
        check_sinks(module)


class _Made(TorchDispatchMode):
    """Counts results in memory of their own, of some bytes or more."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.held: dict[int, torch.UntypedStorage] = {}  # no address is used again

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() >= self.size:
            self.held[result.untyped_storage().data_ptr()] = result.untyped_storage()
        return result


@pytest.mark.parametrize(
    ("right", "wrong", "more"),
    [
        ("", "", 0),
        ("row_max, out=memory)", "row_max)", 2),
        ("masked.append((end, kv_end))", "masked.append((0, kv_end))", 4),
    ],
    ids=["as it is", "weights", "mask"],
)
def test_tiles_make_nothing_of_the_size_of_their_scores(
    right: str, wrong: str, more: int, small_tiles
) -> None:
    """But the memory that they share: new pages for each took as long as all else."""
    spec = AttentionSpec(16, "float32", causal(align="bottom_right"))
    module = small_tiles(rendered_module(spec, edit_source=with_slip(right, wrong)))
    q, k, v = native_inputs(Case(32, 1000, 1, 4, 1), spec)
    with _Made(16 * 900) as made:  # of bools; two tiles of 16 queries of 4 heads
        module._attend_in_tiles(q, k, v, 0.25)
    given = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    assert len(made.held.keys() - given) == 1 + more


def test_tiles_make_no_gradient_of_all_that_is_learned(small_tiles) -> None:
    """autograd has one of all elements for each read, and ten times the time for a bias."""
    pairs = "batch", "num_q_heads", "q_len", "kv_len"
    spec = AttentionSpec(16, "float32", score=additive_bias(Tensor("bias", pairs)))
    module = small_tiles(rendered_module(spec))
    q, k, v = native_inputs(Case(208, 64, 1, 2, 2), spec)
    bias = torch.randn(1, 2, 208, 64, requires_grad=True)
    out = module.attention(q, k, v, bias=bias)
    with _Made(bias.nbytes) as made:
        out.sum().backward()
    given = {x.untyped_storage().data_ptr() for x in (q, k, v, bias)}
    assert len(made.held.keys() - given) == 1


def test_a_number_among_the_indices_of_what_is_learned(small_tiles) -> None:
    table = Tensor("table", ("batch", 1, "kv_len"))

    def score(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score + table[b, 0, kv_idx]

    spec = AttentionSpec(16, "float32", causal(), score)
    drawn = torch.randn(2, 1, 33)
    case = Case(33, 33, 2, 4, 2, params={"table": drawn})
    for tiles, whole in zip(*both(small_tiles(rendered_module(spec)), spec, case), strict=True):
        torch.testing.assert_close(tiles, whole, rtol=1e-4, atol=1e-4)


def test_tiles_drop_the_same_weights(small_tiles) -> None:
    spec = AttentionSpec(16, "float32", causal(), dropout=True)
    case = Case(33, 33, 2, 4, 2, params={"dropout_p": 0.4})
    for tiles, whole in zip(*both(small_tiles(rendered_module(spec)), spec, case), strict=True):
        torch.testing.assert_close(tiles, whole, rtol=2e-5, atol=2e-5)


def test_keys_behind_the_bounds_are_not_read(small_tiles) -> None:
    spec = AttentionSpec(16, "float32", causal(align="top_left"))
    module = small_tiles(rendered_module(spec))
    q, k, v = native_inputs(Case(33, 99), spec)
    right = module.attention(q, k, v)
    k[:, :, 33:], v[:, :, 33:] = torch.nan, torch.nan
    assert torch.equal(module.attention(q, k, v), right)


PACKED = AttentionSpec(16, "float32", document() & causal())


def test_keys_of_other_documents_are_not_read(small_tiles) -> None:
    """16 tokens each: three times as many in all would take 1.8 times a causal mask's time."""
    module = small_tiles(rendered_module(PACKED))
    q, k, v = native_inputs(Case(48, 48), PACKED)
    ids = torch.tensor([5] * 16 + [7] * 16 + [2] * 16, dtype=torch.int32)[None]
    right = module.attention(q, k, v, document_ids=ids)
    k[:, :, 16:32], v[:, :, 16:32] = torch.nan, torch.nan
    out = module.attention(q, k, v, document_ids=ids)
    for tokens in (slice(0, 16), slice(32, 48)):
        assert torch.equal(out[:, :, tokens], right[:, :, tokens])


#: Of each batch entry its ids: in order, with padding, one document, and in no order.
IDS = {
    "unequal": [[i // 9 for i in range(50)], [3] * 40 + [4] * 10],
    "padding behind": [[i // 20 for i in range(45)] + [-1] * 5, [2] * 16 + [3] * 14 + [-1] * 20],
    "padding before": [[-1] * 20 + [i // 9 for i in range(30)], [1] * 50],
    "started over": [[2**31 - 1] * 17 + [-(2**31)] * 20 + [-7] * 13, [-1] * 50],
    "returning": [[i // 9 for i in range(50)], [1] * 20 + [0] * 20 + [1] * 10],
    "falling": [[9 - i // 9 for i in range(50)], [i // 9 for i in range(50)]],
}


def check_documents(mask: Mask, edit: Callable[[str], str], small_tiles) -> None:
    spec = AttentionSpec(16, "float32", mask)
    module = small_tiles(rendered_module(spec, edit_source=edit))
    for ids in IDS.values():
        params = {"document_ids": torch.tensor(ids, dtype=torch.int32)}
        case = Case(50, 50, 2, 4, 2, params=params)
        for tiles, whole in zip(*both(module, spec, case), strict=True):
            torch.testing.assert_close(tiles, whole, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "mask",
    [
        document() & causal(), document(), ~document(), ~document() & causal(),
        document() & sliding_window(9, 9), (document() | ~document()) & causal(),
    ],
    ids=str,
)  # fmt: skip
def test_documents_of_batch_entries(mask: Mask, small_tiles) -> None:
    check_documents(mask, str, small_tiles)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("rows.masked_fill(unordered, 0)", "rows"),  # begins where ids return
        ("rows.masked_fill(unordered, num_keys)", "rows"),  # ends there
        ("keys[:, :1] if cyclic", "-(2**31) if cyclic"),  # where padding has the least id
        (".amin(0)", "[0]"),  # of the first entry
        (".amax(0)", "[0]"),
    ],
)
def test_a_table_that_is_wrong_is_found(right: str, wrong: str, small_tiles) -> None:
    if wrong.startswith("-"):  # it costs time alone
        module = small_tiles(rendered_module(PACKED, edit_source=with_slip(right, wrong)))
        ids = torch.tensor([IDS["padding behind"][0]], dtype=torch.int32)
        assert module._eager_table(ids, ids, False, True, -1)[0][44] == 0
        module = rendered_module(PACKED)
        assert module._eager_table(ids, ids, False, True, -1)[0][44] == 40
        return
    with pytest.raises(AssertionError, match="not close"):
        check_documents(document(), with_slip(right, wrong), small_tiles)


def test_hidden_ids_have_no_keys() -> None:
    ids = torch.tensor([[0, 0, 1, -1, -1]], dtype=torch.int32)
    table = rendered_module(PACKED)._eager_table
    begins, ends = (table(ids, ids, right, True, -1)[0] for right in (False, True))
    assert (begins, ends) == ([0, 0, 2, 5, 5], [2, 2, 3, 3, 3])
    assert table(ids, ids, False, True, None)[0] == [0, 0, 2, 3, 3]


def test_ids_without_values_bound_nothing() -> None:
    table = rendered_module(PACKED)._eager_table
    ids = torch.zeros(2, 5, dtype=torch.int32)
    assert table(ids.to("meta"), ids.to("meta"), False, True, -1) == ([0] * 5, [5] * 5)
    assert table(ids[:, :0], ids[:, :0], False, True, -1) == ([0], [0])


def test_memory_is_that_of_a_tile(tmp_path) -> None:
    """16,384 tokens in under 1 GB: the scores of one head alone are one."""
    program = f"""
import resource, sys, warnings
sys.path.insert(0, {str(ROOT)!r})
warnings.simplefilter("ignore")
import torch
from generated import window_d128
q = torch.randn(1, 1, 16384, 128, dtype=torch.bfloat16)
window_d128.attention(q[:, :, :64], q[:, :, :64], q[:, :, :64], left=64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
window_d128.attention(q, q, q, left=64)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2**18  # in kB: 256 MB

"""The recipes of docs/guide, as they stand there, beside what they are for in float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashgen.loader import load
from flashgen.validate import validate
from support.variants import ROOT, rendered_module

PAGES = ("recipes", "porting", "chosen")
SHOWN = "\n".join((ROOT / "docs" / "guide" / f"{n}.md").read_text() for n in PAGES)
BF16 = torch.bfloat16


def blocks(mark: str) -> Iterator[tuple[str, str]]:
    """The name and the text of each block of code under such a mark."""
    yield from re.findall(rf"<!-- {mark}: (\w+) -->\n```python\n(.*?)```", SHOWN, re.DOTALL)


SPECS = dict(blocks("recipe"))
CALLS: dict[str, list[str]] = {}
for _name, _text in blocks("call"):
    CALLS.setdefault(_name, []).append(_text)


@pytest.fixture(scope="module")
def module_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModuleType]:
    """The module of a recipe's spec, which is read from a file as a build reads it."""
    folder = tmp_path_factory.mktemp("specs")
    made: dict[str, ModuleType] = {}

    def module(name: str) -> ModuleType:
        if name not in made:
            (folder / f"{name}.py").write_text(SPECS[name])
            [variant] = load([Path(folder / f"{name}.py")])
            assert validate(variant) == []
            made[name] = rendered_module(variant.spec, name=name)
        return made[name]

    return module


@pytest.fixture
def call(module_of: Callable[[str], ModuleType]) -> Callable[..., Any]:
    """Runs a recipe's call with these names; returns the names that it leaves."""

    def run(name: str, number: int = 0, **names: Any) -> SimpleNamespace:
        names |= {"torch": torch, name: module_of(name)}
        exec(CALLS[name][number], names)
        return SimpleNamespace(**{key: x for key, x in names.items() if key != "__builtins__"})

    return run


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def qkv(batch: int = 2, length: int = 150, heads: int = 4) -> list[torch.Tensor]:
    return [random(batch, h, length, 64, seed=h) for h in (heads, heads // 2, heads // 2)]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores,
) -> torch.Tensor:  # fmt: skip
    """Plain attention in float64; a row that sees no key is 0."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = change(q @ k.mT / 8).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a rounding of bfloat16 of the values, which are about 1."""
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def positions(q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of queries, aligned at the bottom right, and of keys."""
    return torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)


def test_every_recipe_has_a_spec_a_call_and_a_test() -> None:
    assert SPECS.keys() == CALLS.keys()
    tests = Path(__file__).read_text()
    assert all(f'call("{name}"' in tests or f'call("{name}",' in tests for name in SPECS)
    assert len(CALLS["serve"]) == 2


def test_padding_on_the_left(call: Callable[..., Any]) -> None:
    q, k, v = qkv()
    attention_mask = torch.ones(2, 150, dtype=torch.long)
    attention_mask[1, :70] = 0
    done = call("left_padded", attention_mask=attention_mask, q=q, k=k, v=v)
    rows, columns = positions(150, 150)
    visible = (rows >= columns) & attention_mask.bool()[:, None, None, :]
    close(done.out, attend(q, k, v, visible))
    assert not done.out[1, :, :70].any()


def test_packed_training(call: Callable[..., Any]) -> None:
    lengths = [70, 1, 60]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv(1, sum(lengths)))
    sequences = [range(length) for length in lengths]
    done = call("packed", sequences=sequences, q=q, k=k, v=v)
    assert done.cu_seqlens.tolist() == [0, 70, 71, 131] and done.cu_seqlens.dtype == torch.int32
    at = 0
    for length in lengths:
        one = [x[at : at + length].transpose(0, 1)[None] for x in (q, k, v)]
        rows, columns = positions(length, length)
        expected = attend(*one, rows >= columns)
        close(done.out[at : at + length].transpose(0, 1)[None], expected)
        at += length


def test_the_prefix_of_an_image(call: Callable[..., Any]) -> None:
    q, k, v = qkv()
    input_ids = torch.full((2, 150), 5)
    input_ids[0, :80] = input_ids[1, :9] = 7
    done = call("image_prefix", input_ids=input_ids, image_token=7, q=q, k=k, v=v)
    rows, columns = positions(150, 150)
    visible = (rows >= columns) | (input_ids == 7)[:, None, None, :]
    close(done.out, attend(q, k, v, visible))


def _chosen(lists: torch.Tensor, query_block: int) -> torch.Tensor:
    """Which of the keys each query sees, by its list of blocks of 64."""
    length = lists.shape[2] * query_block
    rows, columns = positions(length, length)
    mine = lists[:, :, rows[:, 0] // query_block]
    return (mine[..., None, :] == columns[:, None] // 64).any(-1).repeat_interleave(2, 1)


def test_selected_blocks(call: Callable[..., Any]) -> None:
    q, k, v = qkv(length=384)
    done = call("selected", q=q, k=k, v=v)
    rows, columns = positions(384, 384)
    assert (done.chosen[:, :, 320:] >= 0).all() and (done.chosen[:, :, :64, 1:] == -1).all()
    close(done.out, attend(q, k, v, _chosen(done.chosen, 1) & (rows >= columns)))


def test_chosen_cubes(call: Callable[..., Any]) -> None:
    q, k, v = (random(2, 2, 384, 64, seed=i) for i in range(3))
    done = call("cubes", q=q, k=k, v=v)
    close(done.out, attend(q, k, v, _chosen(done.chosen, 64)[:, ::2]))


def test_a_bias_for_each_distance(call: Callable[..., Any]) -> None:
    q, k, v = qkv(length=200)
    rows, columns = positions(200, 200)
    done = call("distance_bias", q=q, k=k, v=v, heads=4)
    assert done.table.grad.shape == (4, 128)

    values = random(4, 128).float()  # a table that is not 0 tests more
    table = values.double().requires_grad_()
    distance = (rows - columns).clamp(0, 127)
    expected = attend(q, k, v, rows >= columns, lambda scores: scores + table[:, distance])
    expected.sum().backward()
    given = values.clone().requires_grad_()
    out = done.distance_bias.attention(q, k, v, table=given)
    out.float().sum().backward()
    close(out, expected)
    torch.testing.assert_close(given.grad.double(), table.grad, rtol=5e-2, atol=5e-1)


def test_sdpa_with_a_mask_and_a_bias(call: Callable[..., Any]) -> None:
    q, k, v = qkv()
    generator = torch.Generator().manual_seed(1)
    allowed = torch.rand(2, 1, 150, 150, generator=generator) < 0.3
    bias = torch.randn(4, 150, 150, generator=generator)
    done = call("from_sdpa", q=q, k=k, v=v, allowed=allowed, bias=bias)
    mask = bias.masked_fill(~allowed, -torch.inf).double()
    theirs = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), mask, enable_gqa=True
    )
    close(done.out, theirs)


def test_flash_attn(call: Callable[..., Any]) -> None:
    """By its definition: with more keys than queries, the last of each are at one position."""
    q = random(2, 40, 4, 64)
    k, v = random(2, 150, 2, 64, seed=1), random(2, 150, 2, 64, seed=2)
    flash_attn_func = call("from_flash_attn").flash_attn_func
    rows, columns = positions(40, 150)
    visible = (rows >= columns) & (rows - columns <= 33)
    expected = attend(
        *(x.transpose(1, 2) for x in (q, k, v)), visible, lambda s: 5 * torch.tanh(s / 5)
    )
    out = flash_attn_func(q, k, v, window_size=(33, 0), softcap=5.0)
    close(out.transpose(1, 2), expected)
    with pytest.raises(NotImplementedError):
        flash_attn_func(q, k, v, causal=False)


def cached(lengths: list[int], queries: list[int]) -> list[tuple[torch.Tensor, ...]]:
    """For each sequence its queries, keys and values, (1, heads, seq, 64), and what it gives."""
    sequences = []
    for seed, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        q = random(1, 4, count, 64, seed=3 * seed)
        k, v = (random(1, 2, length, 64, seed=3 * seed + i) for i in (1, 2))
        rows, columns = positions(count, length)
        sequences.append((q, k, v, attend(q, k, v, rows >= columns)))
    return sequences


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_of_vllm(call: Callable[..., Any], layout: str) -> None:
    lengths, queries, size = [40, 17, 1], [1, 5, 1], 16
    sequences = cached(lengths, queries)
    kv_cache = torch.full((2, 9, size, 2, 64), torch.nan, dtype=BF16)
    if layout == "HND":
        kv_cache = kv_cache.transpose(2, 3).contiguous().transpose(2, 3)
    block_table = torch.tensor([[7, 2, 5], [0, 8, -1], [3, -1, -1]], dtype=torch.int32)
    for i, (_, k, v, _) in enumerate(sequences):
        for token in range(lengths[i]):
            page = block_table[i, token // size]
            kv_cache[0, page, token % size] = k[0, :, token]
            kv_cache[1, page, token % size] = v[0, :, token]
    padding = torch.zeros(3, 4, 64, dtype=BF16)
    query = torch.cat([*(q[0].transpose(0, 1) for q, *_ in sequences), padding])
    metadata = SimpleNamespace(
        num_actual_tokens=7,
        max_query_len=5,
        query_start_loc=torch.tensor([0, 1, 6, 7], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=block_table,
    )
    forward = call("serve", 0).forward
    with torch.no_grad():
        out = forward(query, kv_cache, metadata, torch.zeros_like(query), 1 / 8)
    for i, (*_, expected) in enumerate(sequences):
        first, end = metadata.query_start_loc[i : i + 2].tolist()
        close(out[first:end].transpose(0, 1)[None], expected)
    assert not out[7:].any()


def test_a_pool_of_sglang(call: Callable[..., Any]) -> None:
    lengths = [40, 17, 1]
    sequences = cached(lengths, [1, 1, 1])
    pools = torch.full((2, 80, 2, 64), torch.nan, dtype=BF16)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(0)).int()
    req_to_token = torch.zeros(6, 50, dtype=torch.int32)
    req_pool_indices = torch.tensor([4, 0, 2])
    for i, (_, k, v, _) in enumerate(sequences):
        own, slots = slots[: lengths[i]], slots[lengths[i] :]
        req_to_token[req_pool_indices[i], : lengths[i]] = own
        pools[0, own.long()] = k[0].transpose(0, 1)
        pools[1, own.long()] = v[0].transpose(0, 1)
    q = torch.cat([q[:, :, 0] for q, *_ in sequences])
    decode = call("serve", 1).decode
    with torch.no_grad():
        out = decode(q, *pools, req_to_token, req_pool_indices, torch.tensor(lengths), 1 / 8)
    close(out, torch.cat([expected[:, :, 0] for *_, expected in sequences]))


def in_rows(sequences: list[tuple[torch.Tensor, ...]], max_len: int) -> list[torch.Tensor]:
    """Caches of keys and of values with a row for each sequence; behind its length is NaN."""
    caches = torch.full((2, len(sequences), max_len, 2, 64), torch.nan, dtype=BF16)
    for i, (_, *kv, _) in enumerate(sequences):
        for cache, given in zip(caches, kv, strict=True):
            cache[i, : given.shape[2]] = given[0].transpose(0, 1)
    return list(caches)


def test_a_length_for_each_sequence(call: Callable[..., Any]) -> None:
    lengths = [40, 17, 1]
    sequences = cached(lengths, [1, 1, 1])
    k_cache, v_cache = in_rows(sequences, 48)
    q, k_new, v_new = (
        torch.cat([given[i][:, :, -1:] for given in sequences]).transpose(1, 2) for i in range(3)
    )
    for i, length in enumerate(lengths):
        k_cache[i, length - 1 :] = v_cache[i, length - 1 :] = torch.nan  # the call appends it
    kv_lens = torch.tensor(lengths, dtype=torch.int32) - 1
    found = call("decoded", **{
        "q": q, "k_new": k_new, "v_new": v_new, "k_cache": k_cache, "v_cache": v_cache,
        "kv_lens": kv_lens,
    })  # fmt: skip
    close(found.out.transpose(1, 2), torch.cat([expected for *_, expected in sequences]))


def test_a_tree_of_drafts(call: Callable[..., Any]) -> None:
    lengths = [40, 17]
    sequences = cached(lengths, [4, 4])
    k_cache, v_cache = in_rows(sequences, 48)
    q = torch.cat([q for q, *_ in sequences]).transpose(1, 2)
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    found = call("drafted", q=q, k_cache=k_cache, v_cache=v_cache, kv_lens=kv_lens)
    for i, (own, k, v, _) in enumerate(sequences):
        visible = torch.ones(4, lengths[i], dtype=torch.bool)
        visible[:, -4:] = False
        for draft in range(4):
            at = draft
            while at >= 0:  # itself, and the drafts that it follows
                visible[draft, lengths[i] - 4 + at] = True
                at = int(found.parents[i, at])
        close(found.out[i].transpose(0, 1)[None], attend(own, k, v, visible))

"""Steps of decoding in transformers: what is read once, and what has to be read every time."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from flashgen.integrations.layers import calls
from flashgen.integrations.transformers import (
    DescribedMask,
    attention,
    described_mask,
    masks,
    register,
    unregister,
)
from flashgen.integrations.transformers.remembered import signature
from support.hugging_face import FAMILIES, padding, pair, tokens

BATCH, HEADS, KEYS, WIDTH = 2, 2, 32, 32
LAYER = SimpleNamespace(is_causal=True)


@pytest.fixture(autouse=True, scope="module")
def registered(own_cache):
    yield register()
    unregister()


def step(mask_function=causal_mask_function, attended=None, **changes):
    """The arguments of a step."""
    given = {"batch_size": BATCH, "q_length": 1, "kv_length": KEYS, "q_offset": KEYS - 1}
    given |= {"mask_function": mask_function, "attention_mask": attended}
    return given | changes


def is_right(**given):
    """Whether a step's mask shows what transformers' own does, by its kernels too."""
    mask = described_mask(**given)
    right = sdpa_mask(**given, allow_is_causal_skip=False).expand(BATCH, 1, -1, -1)
    q_len, keys = given["q_length"], given["kv_length"]
    q, k = torch.zeros(BATCH, HEADS, q_len, WIDTH), torch.zeros(BATCH, HEADS, keys, WIDTH)
    v = torch.eye(WIDTH)[:keys].expand(BATCH, HEADS, -1, -1)
    with torch.no_grad():
        seen = attention(LAYER, q, k, v, mask)[0][:, :, 0, :keys] > 0
    return torch.equal(seen, right[:, 0])


LIMIT = 3
TABLE = torch.arange(KEYS) % 3 == 0
SETTINGS = SimpleNamespace(limit=3)


def with_default(limit):
    def mask(b, h, q, kv, limit=limit):
        return kv < limit

    return mask


def of_numbers(limit):
    return lambda b, h, q, kv: kv < limit


def by_global(b, h, q, kv):
    return kv < LIMIT


def by_attribute(b, h, q, kv):
    return kv < SETTINGS.limit


def by_function(b, h, q, kv):
    return by_global(b, h, q, kv)


def by_table(b, h, q, kv):
    return TABLE[kv]


def by_import(b, h, q, kv):
    from builtins import limit

    return kv < limit


def by_random(b, h, q, kv):
    return (kv < 40) & torch.rand(()).lt(0.5)


def inside(b, h, q, kv):
    return any(map(lambda limit: bool(limit), (0,))) | (kv < LIMIT)


def test_functions_that_compute_the_same_are_one():
    for made in (
        lambda: causal_mask_function,
        lambda: sliding_window_causal_mask_function(7),
        lambda: and_masks(causal_mask_function, or_masks(by_global, with_default(2))),
        lambda: by_function,
    ):
        assert signature(made()) == signature(made()) is not None
        hash(signature(made()))


def test_captured_numbers_are_compared():
    """Their types too: 1 is True."""
    makers = (sliding_window_causal_mask_function, with_default, of_numbers)
    for made in makers:
        assert signature(made(7)) != signature(made(8))
        assert signature(made(1)) != signature(made(True)) != signature(made(1.0))
    assert signature(of_numbers(0.0)) != signature(of_numbers(-0.0))
    assert signature(of_numbers((1, 2))) != signature(of_numbers((1, True)))
    assert signature(and_masks(of_numbers(1), of_numbers(2))) != signature(
        and_masks(of_numbers(2), of_numbers(1))
    )


@pytest.mark.parametrize(
    "function",
    [
        chunked_causal_mask_function(6, torch.tensor([0, 4])),
        of_numbers(torch.tensor(3)),
        of_numbers([3]),
        of_numbers(SETTINGS),
        and_masks(causal_mask_function, of_numbers([3])),
        by_attribute,
        by_table,
        by_import,
        by_random,
        inside,
        SETTINGS.__eq__,
        of_numbers(SETTINGS.__eq__),
        len,
    ],
)
def test_what_may_change_without_a_trace_is_read_every_time(function):
    assert signature(function) is None


def test_a_function_of_a_function(monkeypatch):
    """A global that a global function reads."""
    known = signature(by_function)
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert signature(by_function) != known
    monkeypatch.setitem(globals(), "LIMIT", torch.tensor(4))
    assert signature(by_function) is None
    monkeypatch.delitem(globals(), "LIMIT")
    assert signature(by_function) is None


def test_a_function_with_a_state():
    function = with_default(3)
    assert signature(function) is not None
    function.calls = 0
    assert signature(function) is None


def test_steps_see_what_their_functions_say(monkeypatch):
    """One code and another window; tensors and globals that are written to between steps."""
    for window in (7, 8, 1, 7):
        assert is_right(**step(sliding_window_causal_mask_function(window)))
    sliding = sliding_window_causal_mask_function(9)
    for kv_offset in (0, 5, 6):  # as of a sliding cache
        assert is_right(**step(sliding, kv_offset=kv_offset, q_offset=KEYS - 1 + kv_offset))
    first = and_masks(causal_mask_function, lambda b, h, q, kv: kv >= LIMIT)
    for limit, kv_offset in ((3, 0), (3, 2), (9, 2), (9, 0)):
        monkeypatch.setitem(globals(), "LIMIT", limit)
        assert is_right(**step(first, kv_offset=kv_offset, q_offset=KEYS - 1 + kv_offset))
    table = torch.arange(KEYS) % 3 == 0
    of_table = and_masks(causal_mask_function, lambda b, h, q, kv: table[kv])
    start = torch.tensor([0, 4])
    for _ in range(3):
        assert is_right(**step(of_table))
        assert is_right(**step(chunked_causal_mask_function(6, start)))
        table[:] = table.roll(1)
        start += 1


def test_functions_are_read_once(monkeypatch):
    read, found = masks.read, []
    monkeypatch.setattr(masks, "read", lambda function: found.append(function) or read(function))
    monkeypatch.setattr(masks, "_SHOWN", {})
    for _ in range(3):
        described_mask(**step(sliding_window_causal_mask_function(7)))
        described_mask(**step(sliding_window_causal_mask_function(8)))
    assert len(found) == 2
    for limit in range(600):
        described_mask(**step(and_masks(causal_mask_function, of_numbers(limit))))
    assert len(masks._SHOWN) <= 256


def test_padding_that_changes_between_steps():
    attended = padding(KEYS, (4, KEYS), (0, 30)).bool()
    for _ in range(3):
        assert is_right(**step(attended=attended))
        assert is_right(**step(attended=~attended))
        attended = attended.roll(5, -1)
    written = attended.clone()
    for column in (7, 9, 31):
        written[1, column] ^= True
        assert is_right(**step(attended=written))


class Launches(TorchDispatchMode):
    """Counts what would launch a kernel."""

    views = re.compile("view|slice|expand|alias|detach|empty|select|unsqueeze|as_strided")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.count += not self.views.search(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 1),  # the lengths
        ({"kv_offset": 5, "q_offset": KEYS + 4}, 2),  # and a slice at 16 bytes
        ({"q_offset": torch.tensor(KEYS - 1)}, 2),  # the length, before a static cache adds to it
    ],
)
def test_a_step_launches_few_kernels(changes, most):
    attended = padding(KEYS + 5, (4, KEYS + 5), (0, 36)).bool()
    attended = attended if "kv_offset" in changes else attended[:, :KEYS].contiguous()
    with Launches() as launches:
        mask = described_mask(**step(attended=attended, **changes))
    assert launches.count <= most
    assert mask.bounds is not None


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("offset", [0, 1, 5, 16])
def test_slices_of_padding_lie_at_16_bytes(batch, offset):
    """Kernels are compiled for that: each layer's launch would be one of Triton's own."""
    attended = torch.rand(batch, KEYS + 16, generator=torch.Generator().manual_seed(0)) < 0.5
    for given in (attended, attended.long(), attended[:1]):
        where = {"batch_size": batch, "kv_offset": offset, "q_offset": KEYS - 1 + offset}
        [table] = described_mask(**step(attended=given, **where)).tables
        assert table.data_ptr() % 16 == 0
        assert table.is_contiguous()
        assert torch.equal(table, attended[: len(given), offset : offset + KEYS].expand(batch, -1))


def test_bounds_are_found_once_where_dense_kernels_need_them(monkeypatch):
    """A bias, or gradients: the layers that share a mask share them."""
    found, bounds_of = [], masks.padding
    monkeypatch.setattr(
        masks, "padding", lambda *given, **how: found.append(given) or bounds_of(*given, **how)
    )
    attended = padding(KEYS, (4, KEYS), (0, 30)).bool()
    mask = described_mask(**step(attended=attended))
    q, (k, v) = torch.randn(BATCH, HEADS, 1, WIDTH), torch.randn(2, BATCH, HEADS, KEYS, WIDTH)
    with torch.no_grad():
        right, _ = attention(LAYER, q, k, v, mask)
        assert not found
        bias = torch.zeros(1, HEADS, 1, KEYS)
        for _ in range(2):
            out, _ = attention(LAYER, q, k, v, mask, position_bias=bias)
            torch.testing.assert_close(out, right)
    out, _ = attention(LAYER, q.requires_grad_(), k, v, mask)
    torch.testing.assert_close(out, right)
    assert len(found) == 1
    moved = mask.to("cpu").bounded()
    assert isinstance(moved, DescribedMask)
    assert moved.kind == mask.bounded().kind


def test_layers_that_share_a_mask_share_its_module(monkeypatch):
    """A softcap, other heads, or another precision: another one."""
    found, module_of = [], calls.module_of
    monkeypatch.setattr(calls, "module_of", lambda **kind: found.append(kind) or module_of(**kind))
    mask = described_mask(**step(attended=padding(KEYS, (4, KEYS), (0, 30)).bool()))
    q, (k, v) = torch.randn(BATCH, HEADS, 1, WIDTH), torch.randn(2, BATCH, HEADS, KEYS, WIDTH)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    with torch.no_grad():
        for times, changes in (
            (1, {}),
            (2, {"softcap": 2.0}),
            (3, {"s_aux": torch.ones(HEADS)}),
        ):
            outs = [attention(LAYER, q, k, v, mask, **changes)[0] for _ in range(3)]
            assert len(found) == times
            assert torch.equal(outs[0], outs[1])
        narrow = attention(LAYER, q, k, v[..., :12], mask)[0]
        assert len(found) == 4
        torch.testing.assert_close(narrow, attention(LAYER, q, k, v, mask)[0][..., :12])
        sinks = [attention(LAYER, q, k, v, mask, s_aux=x * torch.ones(HEADS))[0] for x in (0, 5)]
        assert not torch.equal(*sinks)
        for precision in ("highest", "high"):  # of float32, which torch may change at any time
            monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda p=precision: p)
            attention(LAYER, q.float(), k.float(), v.float(), mask)
    assert len(found) == 6


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "t5"])
def test_generated_tokens(name, cache, registered):
    """In two turns, with other padding: what was read in the first serves the second."""
    eager, model = pair(FAMILIES[name], registered)
    for prompt, rows in ((20, ((5, 20), (0, 20))), (19, ((0, 19), (9, 19)))):
        given = {
            "attention_mask": padding(prompt, *rows),
            "max_new_tokens": 15,
            "do_sample": False,
            "cache_implementation": cache,
            "disable_compile": True,
        }
        mine, right = (m.generate(tokens(2, prompt), **given) for m in (model, eager))
        assert torch.equal(mine, right), prompt

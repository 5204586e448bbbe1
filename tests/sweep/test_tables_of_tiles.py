"""Masks that read a table of queries and keys: rows of several tiles are loaded together.

Tables lie as callers have them: at odd addresses, with gaps between elements, by columns, one for
all heads, with more rows and keys than the call, and of numbers in place of flags.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Mask, Tensor
from support.bits import with_bits
from support.decided import TILE, check_bits, tiles_of
from support.slip import with_slip
from support.variants import lowered, rendered_module

HEADS = 2

#: Queries and keys, and how many more of each tables have: lengths that tiles divide and others,
#: more than eight tiles of keys and fewer, and a word of tiles that positions hide.
CALLS = ((128, 640, 0), (150, 205, 0), (150, 205, 3), (70, 2200, 0))

_SEEN = Tensor("seen", ("batch", "num_q_heads", None, None), "bool")
_HEAT = Tensor("heat", (None, None))
_LABEL = Tensor("label", ("kv_len",), "int32")
_GATE = Tensor("gate", ("num_q_heads", "q_len", None), "bool")

MASKS: dict[str, Callable[..., Any]] = {
    "seen": lambda b, h, q, kv: _SEEN[b, h, q, kv],
    "unseen": lambda b, h, q, kv: ~_SEEN[b, h, q, kv],
    "turned": lambda b, h, q, kv: _SEEN[b, h, kv, q],
    "some": lambda b, h, q, kv: (kv <= q + 200) & ((q + kv) % 99 > 0) & (_HEAT[q, kv] > 0.5),
    "gate": lambda b, h, q, kv: (kv <= q + 200) & _GATE[h, q, kv // 64],
    "wide": lambda b, h, q, kv: (kv <= q + 200) & _GATE[h, q, kv // 128],
    "either": lambda b, h, q, kv: _GATE[h, q, kv // 64] & ((_LABEL[kv] > 0) | (q == kv)),
}


@functools.cache
def _spec(name: str) -> AttentionSpec:
    return AttentionSpec(16, "float32", mask=Mask(MASKS[name], name))


def _at_odd_addresses(x: torch.Tensor) -> torch.Tensor:
    """Among elements that say the opposite, as are all that no kernel may read."""
    whole = (~x if x.dtype == torch.bool else 1 - x).flatten().repeat(3)
    place = whole[x.numel() - 1 :].as_strided(x.shape, x.stride())
    return place.copy_(x)


def _with_gaps(x: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack([x, ~x if x.dtype == torch.bool else 1 - x], -1)
    return pairs[..., 0]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as made": lambda x: x,
    "odd addresses": _at_odd_addresses,
    "gaps": _with_gaps,
    "columns": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}


def _drawn(rows: int, keys: int, *lead: int) -> torch.Tensor:
    """Flags, alike in most tiles: a few have one element that is not, the last for one."""
    generator = torch.Generator().manual_seed(rows)
    sizes = (*lead, -(-rows // TILE), -(-keys // TILE))
    tiles = torch.randint(0, 3, sizes, generator=generator) > 0
    found = tiles.repeat_interleave(TILE, -2).repeat_interleave(TILE, -1)[..., :rows, :keys]
    found = found.clone()
    for row, key in ((63, 63), (64, 0), (rows - 1, keys - 1), (rows // 2, keys // 3)):
        found[..., row, key] = ~found[..., row, key]
    return found


def _call(name: str, q_len: int, kv_len: int, layout: str, more: int) -> dict[str, torch.Tensor]:
    """The parameters of a call; tables have so many more rows and keys than it."""
    put = LAYOUTS[layout]
    rows, keys = (kv_len, q_len) if name == "turned" else (q_len, kv_len)
    seen = put(_drawn(rows + more, keys + more, 2, 1)).expand(-1, HEADS, -1, -1)
    gate = _drawn(q_len, 64 * (-(-kv_len // 64) + more), HEADS)[..., ::64]
    values = {
        "seen": seen,
        "heat": put(_drawn(q_len + more, kv_len + more).float()),
        "label": (torch.arange(kv_len) // 70 % 4).int(),
        "gate": put(gate.contiguous()),
    }
    return {param.name: values[param.name] for param in _spec(name).params}


def _visible(name: str, q_len: int, kv_len: int, p: dict[str, torch.Tensor]) -> torch.Tensor:
    """bool (batch, heads, queries, keys), with an entry for each list."""
    b, h = torch.arange(2)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    q, kv = torch.arange(q_len)[:, None], torch.arange(kv_len)
    rules: dict[str, Callable[[], torch.Tensor]] = {
        "seen": lambda: p["seen"][b, h, q, kv],
        "unseen": lambda: ~p["seen"][b, h, q, kv],
        "turned": lambda: p["seen"][b, h, kv, q],
        "some": lambda: (kv <= q + 200) & ((q + kv) % 99 > 0) & (p["heat"][q, kv] > 0.5),
        "gate": lambda: (kv <= q + 200) & p["gate"][h, q, kv // 64],
        "wide": lambda: (kv <= q + 200) & p["gate"][h, q, kv // 128],
        "either": lambda: p["gate"][h, q, kv // 64] & ((p["label"][kv] > 0) | (q == kv)),
    }
    listing = lowered(_spec(name)).listing
    assert listing is not None
    visible = rules[name]().expand(2, HEADS, q_len, kv_len)
    visible = visible if listing.by_batch else visible[:1]
    return visible if listing.by_head else visible[:, :1]


def _check(module: ModuleType, name: str, q_len: int, kv_len: int, layout: str, more: int) -> None:
    q, k = torch.zeros(2, HEADS, q_len, 16), torch.zeros(2, 1, kv_len, 16)
    given = _call(name, q_len, kv_len, layout, more)
    visible = _visible(name, q_len, kv_len, given)
    some, every = tiles_of(visible, TILE, TILE)
    assert not some.all() and (every.any() or name == "some") and (some & ~every).any()
    check_bits(with_bits(module, _spec(name), q, k, given)[-1], visible)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_those_of_the_elements(name: str, layout: str) -> None:
    module = rendered_module(_spec(name))
    for q_len, kv_len, more in CALLS:
        _check(module, name, q_len, kv_len, layout, more)


#: What makes them wrong, for a mask that shows it.
SLIPS = {
    "no later rows": ("seen", "tl.range(0, TILE, ROWS)", "tl.range(0, ROWS, ROWS)"),
    "keys past the last": ("unseen", "(kv_idx - kv_len) >> 31", "(kv_idx | -1) >> 31"),
    "rows past the last": ("unseen", "tl.where(rows < q_len, counts, 0)", "counts"),
    "full without the last rows": ("seen", "q_last + 1 - q_first)", "q_last - q_first)"),
    "full without the last keys": ("seen", "kv_first + TILE, kv_len) -", "kv_first + 9, kv_len) -"),
    "another tile's keys": ("seen", "first_tile * TILE + tl.arange(0, 8", "0 + tl.arange(0, 8"),
    "what the first tile asks": ("some", "* TILE) // TILE) & 1", "* TILE) // TILE * 0) & 1"),
    "the table alone": ("some", "visible &= (q_idx + kv_idx)", "(q_idx + kv_idx)"),
    "the same tile of a table": ("gate", "max_contiguous(word * 32 + bit, 4)", "zeros_like(bit)"),
    "hidden too early": ("gate", "(seen.to(tl.int32), 0) == 0", "(seen.to(tl.int32), 0) >= 0"),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_found(slip: str) -> None:
    name, right, wrong = SLIPS[slip]
    module = rendered_module(_spec(name), edit_source=with_slip(right, wrong))
    with pytest.raises(AssertionError):
        for q_len, kv_len, more in CALLS:
            _check(module, name, q_len, kv_len, "as made", more)

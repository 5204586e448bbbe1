"""Masks whose bounds are too wide, for tests of the kernels that decide tiles.

Only the data knows what they show; or, of the last one, a few ranges do not hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen import Float, Int, Mask, Tensor, q_len
from support.cases import Case

_IMG = Tensor("img", ("batch", "kv_len"), "int32")
_FLAG = Tensor("flag", ("kv_len",), "bool")
_GATE = Tensor("gate", ("num_q_heads", "q_len", None), "bool")
_DENSE = Tensor("dense", ("batch", "num_q_heads", "q_len", "kv_len"), "bool")
_KEEP = Tensor("keep", ("batch", "kv_len"), "int32")
_IDS = Tensor("ids", ((q_len + 63) // 64, 2), "int32")
_HUES = Tensor("hues", (None,), "int32")
_HEAT = Tensor("heat", ("kv_len",))
_WIDTH, _LEAST = Int("width", 40), Float("least", 0.0)
_PERIOD = Int("period", 640, min=1)
_LOWEST = Int("lowest", 1)  # of a number, bounds would find the range

#: Masks of equal lengths; the numbers in them have tiles of 64 seen, hidden and in between.
DATA_MASKS: dict[str, Callable[..., Any]] = {
    "islands": lambda b, h, q, kv: (kv <= q) | ((_IMG[b, q] == _IMG[b, kv]) & (_IMG[b, q] > 0)),
    "flags": lambda b, h, q, kv: _FLAG[q] | _FLAG[kv] | (abs(q - kv) <= _WIDTH),
    "gate": lambda b, h, q, kv: (kv <= q) & _GATE[h, q, kv // 64],
    "dense": lambda b, h, q, kv: _DENSE[b, h, q, kv],
    "padding": lambda b, h, q, kv: (kv <= q) & (_KEEP[b, kv] >= _LOWEST),
    "chosen": lambda b, h, q, kv: (_IDS[q // 64, 0] == kv // 64) | (_IDS[q // 64, 1] == kv // 64),
    "hues": lambda b, h, q, kv: (_HUES[q // 32] % 3 == _HUES[kv // 32] % 3) & (q % 9 > 1),
    "heat": lambda b, h, q, kv: (_HEAT[q] < _LEAST) | (_HEAT[kv] < _HEAT[q]) & (kv % 50 > h),
    "stripes": lambda b, h, q, kv: (kv <= q) & ((q - kv) % _PERIOD < 200),
}


def data_mask(name: str) -> Mask:
    """One of them."""
    return Mask(DATA_MASKS[name], name, equal_lengths=True)


def data_case(name: str, length: int, batch: int = 1, heads: int = 2) -> Case:
    """A call of it, with runs of ids and of flags, such as data have."""
    generator = torch.Generator().manual_seed(length)
    at = torch.arange(length)
    tiles, entry = -(-length // 64), torch.arange(batch)[:, None]

    def drawn(high: int, *sizes: int) -> torch.Tensor:
        return torch.randint(0, high, sizes, generator=generator)

    gate = (drawn(3, heads, tiles, tiles) == 0).repeat_interleave(64, 1)[:, :length]
    values = {
        "img": ((at + 70 * entry) // 50 % 3 * ((at + 70 * entry) // 50 % 2)).int(),
        "flag": at == 3 * length // 4,
        "gate": gate | (at[:, None] % 64 == 5),
        "dense": (at[:, None] // 70 > at // 30) & (drawn(9, batch, heads, length, 1) > 0),
        "keep": (at >= entry * (length // 2) + length // 5).int(),
        "ids": torch.cat([torch.tensor([[tiles - 1, -1]]), drawn(tiles, tiles - 1, 2)]).int(),
        "hues": drawn(2**31, -(-length // 32)).int(),
        "heat": (at // 40 % 4 - 1.5) + torch.rand(length, generator=generator) / 8,
    }
    names = {p.name for p in data_mask(name).params}
    params = {key: value for key, value in values.items() if key in names}
    if "heat" in params:
        params["heat"][::90] = torch.nan
    return Case(length, length, batch, heads, 1, params=params)


def shown(name: str, case: Case) -> torch.Tensor:
    """bool (batch, heads, queries, keys): the mask by brute force in torch."""
    p = {**{"width": 40, "least": 0.0, "period": 640}, **case.params}
    b = torch.arange(case.batch)[:, None, None, None]
    h = torch.arange(case.q_heads)[:, None, None]
    q, kv = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)
    rules: dict[str, Callable[[], torch.Tensor]] = {
        "islands": lambda: (kv <= q) | ((p["img"][b, q] == p["img"][b, kv]) & (p["img"][b, q] > 0)),
        "flags": lambda: p["flag"][q] | p["flag"][kv] | ((q - kv).abs() <= p["width"]),
        "gate": lambda: (kv <= q) & p["gate"][h, q, kv // 64],
        "dense": lambda: p["dense"][b, h, q, kv],
        "padding": lambda: (kv <= q) & (p["keep"][b, kv] >= 1),
        "chosen": lambda: (p["ids"][q // 64] == kv[:, None] // 64).any(-1),
        "hues": lambda: (p["hues"][q // 32] % 3 == p["hues"][kv // 32] % 3) & (q % 9 > 1),
        "heat": lambda: (
            (p["heat"][q] < p["least"]) | (p["heat"][kv] < p["heat"][q]) & (kv % 50 > h)
        ),
        "stripes": lambda: (kv <= q) & ((q - kv) % p["period"] < 200),
    }
    return rules[name]().expand(case.batch, case.q_heads, case.q_len, case.kv_len)

"""60 masks with values at 4,096 tokens: what their derived bounds visit, beside what they need.

From the vocabulary, from models and papers, and as people write them for FlexAttention. The values
are the same in every run.
"""

# ruff: noqa: D103 (a mask is said by its name and its one line)

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashgen import (
    Int,
    Mask,
    Tensor,
    bigbird,
    causal,
    chunked,
    clamp,
    dilated,
    document,
    global_tokens,
    natten_2d,
    prefix_lm,
    sink_tokens,
    sliding_window,
    strided,
)

#: Queries and keys of every mask here.
LENGTH = 4096

Values = Callable[[np.random.Generator], dict[str, Any]]


@dataclass(frozen=True)
class Listed:
    """A mask and what a call passes.

    Attributes:
        mask: with equal lengths of queries and keys.
        values: draws the value of each parameter: a number, or an array with a batch of one.
    """

    mask: Mask
    values: Values = field(default=lambda random: {})

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of a call, the same ones each time."""
        return self.values(np.random.default_rng(0))


MASKS: dict[str, Listed] = {}


def _mask(values: Values = lambda random: {}) -> Callable[[Callable[..., Any]], Any]:
    """Puts a mask function into the list, by its name."""

    def put(mask_mod: Callable[..., Any]) -> Callable[..., Any]:
        name = mask_mod.__name__.strip("_")
        MASKS[name] = Listed(Mask(mask_mod, name, equal_lengths=True), values)
        return mask_mod

    return put


_KEYS = ("batch", "kv_len")
_IDS = Tensor("ids", _KEYS, "int32")
_SORTED = Tensor("sorted_ids", _KEYS, "int32", sorted=True)
_STARTS = Tensor("starts", (None,), "int32")
_SORTED_STARTS = Tensor("starts", (None,), "int32", sorted=True)
_KEEP = Tensor("keep", _KEYS, "bool")
_FLAG = Tensor("flag", ("kv_len",), "bool")
_PREFIX, _CHUNK, _LEFT = Int("prefix", min=0), Int("chunk", min=1), Int("left", min=0)
_HIDE_FROM, _HIDE_TO = (Tensor(name, _KEYS, "int32") for name in ("hide_from", "hide_to"))
_LAST_SEEN = Tensor("last_seen", _KEYS, "int32")
_GATE = Tensor("gate", ("kv_len", None), "bool")
_BLOCKS = Tensor("blocks", (None, 8), "int32")
_DENSE = Tensor("dense", ("q_len", "kv_len"), "bool")

_ENDS = np.array([300, 1411, 1500, 2700, 2828, LENGTH])
_FIRSTS = np.concatenate([[0], _ENDS[:-1]])


def _documents() -> np.ndarray:
    return np.repeat(np.arange(len(_ENDS), dtype=np.int32), _ENDS - _FIRSTS)


def _packed(random: np.random.Generator) -> dict[str, Any]:
    """Six documents; ids ascend."""
    ids = _documents()[None]
    return {"ids": ids, "sorted_ids": ids, "starts": _FIRSTS, "document_ids": ids}


def _runs(random: np.random.Generator) -> dict[str, Any]:
    """Documents in another order, with padding of -1 between and behind them."""
    ids = np.array([3, -1, 0, 7, -1, 2], dtype=np.int32)[_documents()]
    ids[2400:2700] = -1
    return {"ids": ids[None]}


def _pictures(random: np.random.Generator) -> dict[str, Any]:
    """Three pictures of 256 tokens in text."""
    ids = np.zeros((1, LENGTH), dtype=np.int32)
    for number, first in enumerate([400, 1700, 3100], 1):
        ids[:, first : first + 256] = number
    return {"ids": ids}


def _padding(first: int, end: int) -> Values:
    at = np.arange(LENGTH)
    return lambda random: {"keep": ((at >= first) & (at < end))[None]}


def _flags(random: np.random.Generator) -> dict[str, Any]:
    flag = np.zeros(LENGTH, dtype=bool)
    flag[random.choice(LENGTH, 16, replace=False)] = True
    return {"flag": flag}


def _hidden(random: np.random.Generator) -> dict[str, Any]:
    """Each key is hidden from the queries behind its document, and seen again by the last 512."""
    start = _ENDS[_documents()].astype(np.int32)
    return {
        "hide_from": start[None],
        "hide_to": np.maximum(start, LENGTH - 512).astype(np.int32)[None],
        "last_seen": (start - 1)[None],
    }


def _chosen(random: np.random.Generator) -> dict[str, Any]:
    """Eight blocks of 64 keys for each block of 64 queries: its own, the first and six before."""
    rows = LENGTH // 64
    blocks = np.stack([random.integers(0, i + 1, 8) for i in range(rows)]).astype(np.int32)
    blocks[:, 0], blocks[:, 1] = np.arange(rows), 0
    gate = np.zeros((LENGTH, rows), dtype=bool)
    gate[np.arange(LENGTH)[:, None], np.repeat(blocks, 64, axis=0)] = True
    return {"blocks": np.sort(blocks, axis=1), "gate": gate}


def _by(mask: Mask, name: str, **numbers: Any) -> None:
    MASKS[name] = Listed(mask, lambda random: numbers)


_by(causal(), "causal")
_by(~causal(), "after the query")
_by(sliding_window(1023, 0), "window")
_by(sliding_window(_LEFT, 100), "window, run time", left=700)
_by(causal() & sliding_window(200, 900), "causal & wide window")
_by(prefix_lm(700), "prefix")
_by(prefix_lm(_PREFIX), "prefix, run time", prefix=1111)
_by(chunked(500), "chunks")
_by(chunked(_CHUNK) & causal(), "chunks & causal", chunk=700)
_by(causal() & (sink_tokens(4) | sliding_window(511, 0)), "sinks & window")
_by(global_tokens(16) | sliding_window(256, 256), "Longformer, first tokens")
_by(dilated(2) & sliding_window(512, 0), "dilated window")
_by(strided(64), "strided")
_by(natten_2d(64, 64, 13), "natten 64 x 64")
_by(~chunked(512) & causal(), "other chunks")
MASKS["BigBird"] = Listed(
    bigbird(64, random=Tensor("random", (None, None), "bool")),
    lambda random: {"random": random.random((64, 64)) < 0.05},
)
MASKS["documents"] = Listed(document(), _packed)
MASKS["documents & causal"] = Listed(document() & causal(), _packed)
MASKS["documents & window"] = Listed(document() & sliding_window(300, 0), _packed)
MASKS["other documents"] = Listed(~document() & causal(), _packed)


@_mask()
def batchify(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 700 == k // 700) & (q % 700 >= k % 700)


@_mask(lambda random: {"chunk": 700})
def batchify_run_time(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // _CHUNK == k // _CHUNK) & (q % _CHUNK >= k % _CHUNK)


@_mask()
def batchify_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    behind = q % 1024 - k % 1024
    return (q // 1024 == k // 1024) & (behind >= 0) & (behind <= 128)


@_mask()
def batchify_both_sides(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 1024 == k // 1024) & (abs(q % 1024 - k % 1024) <= 128)


@_mask()
def batchify_prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 1024 == k // 1024) & ((k % 1024 < 300) | (q % 1024 >= k % 1024))


@_mask()
def chunk_and_the_one_before(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 512 - k // 512 <= 1) & (k <= q)


@_mask()
def first_of_each_chunk(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((q // 512 == k // 512) | (q % 512 < 64))


@_mask()
def last_of_each_chunk(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((q // 512 == k // 512) | (k % 512 >= 448))


@_mask()
def same_remainder(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (q % 1024 == k % 1024)


@_mask()
def video_temporal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k < 256) | (q < 256) | (abs((q - 256) % 960 - (k - 256) % 960) < 180)


@_mask()
def video_spatial(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k < 256) | (q < 256) | (abs(q - k) < 384)


@_mask()
def frames_before(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k // 390 <= q // 390


@_mask()
def half_of_the_rows(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (q % 2048 >= 1024)


@_mask()
def shared_prefix_of_branches(b: Any, h: Any, q: Any, k: Any) -> Any:
    same = (q >= 1024) & (k >= 1024) & ((q - 1024) // 768 == (k - 1024) // 768)
    return (k <= q) & ((k < 1024) | same)


@_mask(lambda random: {**_packed(random), "prefix": 300})
def shared_prefix_of_documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((k < _PREFIX) | (_SORTED[b, q] == _SORTED[b, k]))


@_mask(lambda random: {**_packed(random), "prefix": 300})
def shared_prefix_of_plain_ids(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((k < _PREFIX) | (_IDS[b, q] == _IDS[b, k]))


@_mask(_packed)
def documents_by_starts(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (k >= _SORTED_STARTS[_SORTED[b, q]])


@_mask(_packed)
def documents_by_plain_starts(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (k >= _STARTS[_IDS[b, q]])


@_mask(_packed)
def documents_by_positions(b: Any, h: Any, q: Any, k: Any) -> Any:
    mine, theirs = _SORTED[b, q], _SORTED[b, k]
    return (mine == theirs) & (q - _STARTS[mine] >= k - _STARTS[theirs])


@_mask(_packed)
def documents_with_prefixes(b: Any, h: Any, q: Any, k: Any) -> Any:
    inside = k - _STARTS[_SORTED[b, k]]
    return (_SORTED[b, q] == _SORTED[b, k]) & ((inside < 200) | (k <= q))


@_mask(_packed)
def plain_ids(b: Any, h: Any, q: Any, k: Any) -> Any:
    return _IDS[b, q] == _IDS[b, k]


@_mask(_runs)
def runs(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (_IDS[b, q] == _IDS[b, k]) & (_IDS[b, q] != -1)


@_mask(_runs)
def runs_causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (_IDS[b, q] == _IDS[b, k]) & (_IDS[b, q] >= 0)


@_mask(_runs)
def runs_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (abs(q - k) <= 200) & (_IDS[b, q] == _IDS[b, k]) & (_IDS[b, k] >= 0)


@_mask(_pictures)
def pictures_in_text(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) | ((_IDS[b, q] == _IDS[b, k]) & (_IDS[b, q] > 0))


@_mask(_pictures)
def pictures_in_a_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    near = (k <= q) & (q - k < 1024)
    return near | ((_IDS[b, q] == _IDS[b, k]) & (_IDS[b, q] > 0))


@_mask(_padding(900, LENGTH))
def padding_left(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & _KEEP[b, k]


@_mask(_padding(0, 3000))
def padding_right(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & _KEEP[b, k]


@_mask(_padding(700, 3500))
def padding_of_an_encoder(b: Any, h: Any, q: Any, k: Any) -> Any:
    return _KEEP[b, k]


@_mask(_padding(700, 3500))
def padding_of_both(b: Any, h: Any, q: Any, k: Any) -> Any:
    return _KEEP[b, q] & _KEEP[b, k]


@_mask(_padding(900, LENGTH))
def padding_left_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (q - k < 512) & _KEEP[b, k]


@_mask(lambda random: {**_packed(random), **_padding(0, 3000)(random)})
def padding_of_documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (_SORTED[b, q] == _SORTED[b, k]) & _KEEP[b, k]


@_mask(_hidden)
def hidden_queries(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((q < _HIDE_FROM[b, k]) | (q >= _HIDE_TO[b, k]))


@_mask(_hidden)
def hidden_behind(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (q < _HIDE_FROM[b, k])


@_mask(_hidden)
def last_query_of_a_key(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (q <= _LAST_SEEN[b, k])


@_mask(_flags)
def global_by_a_flag(b: Any, h: Any, q: Any, k: Any) -> Any:
    return _FLAG[q] | _FLAG[k] | (abs(q - k) <= 256)


@_mask(_chosen)
def moba(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & _GATE[q, k // 64]


@_mask(_chosen)
def chosen_blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
    chosen = _BLOCKS[q // 64, 0] == k // 64
    for i in range(1, 8):
        chosen = chosen | (_BLOCKS[q // 64, i] == k // 64)
    return (k <= q) & chosen


@_mask()
def tiled_neighbourhood(b: Any, h: Any, q: Any, k: Any) -> Any:
    """An image of 64 x 64 in tiles of 8 x 8: windows of 3 x 3 tiles."""
    seen = True
    for part in (lambda at: at // 64 // 8, lambda at: at // 64 % 8):
        centre = clamp(part(q), 1, 6)
        seen = (part(k) >= centre - 1) & (part(k) <= centre + 1) & seen
    return seen


@_mask(lambda random: {"dense": random.random((64, 64)).repeat(64, 0).repeat(64, 1) < 0.1})
def dense(b: Any, h: Any, q: Any, k: Any) -> Any:
    return _DENSE[q, k]

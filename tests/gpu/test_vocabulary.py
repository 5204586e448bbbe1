"""Every mask, score function and normaliser that flashgen ships, on the GPU against float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import pytest

from flashgen import AttentionSpec, Int
from flashgen.config import KernelConfig
from gpu.launch import check_attention, check_config, check_hopper, on_hopper
from support.cases import LAYOUTS, Case, around_tiles
from support.variants import rendered_module
from support.vocabulary import VOCABULARY, Entry

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Way:
    """One way to compile an entry's kernel."""

    dtype: str
    head_dim: int
    config: KernelConfig
    tma: bool
    hopper: bool = False

    def __str__(self) -> str:
        tile = f"{self.config.BLOCK_M}x{self.config.BLOCK_N}"
        form = "gluon" if self.hopper else "tma" if self.tma else "pointers"
        return f"{self.dtype}-d{self.head_dim}-{tile}-{form}"


WAYS = (
    Way("bfloat16", 64, KernelConfig(128, 64, num_warps=8, num_stages=2), tma=True),
    Way("bfloat16", 64, KernelConfig(64, 128, num_warps=4, num_stages=2), tma=False),
    Way("float32", 32, KernelConfig(64, 32, num_warps=4, num_stages=2), tma=False),
)

# Of the Gluon kernel, one for each structure that head dimensions ask for.
HOPPER_WAYS = (
    Way("bfloat16", 64, KernelConfig(192, 128, num_warps=12, num_stages=3), True, hopper=True),
    Way("float16", 128, KernelConfig(128, 128, num_warps=8, num_stages=2), True, hopper=True),
    Way("bfloat16", 256, KernelConfig(128, 64, num_warps=8, num_stages=2), True, hopper=True),
)

LONG = [(2048, 2048), (1023, 1023), (777, 2000), (2000, 777), (128, 1500), (1, 2049)]


def _cases(entry: Entry, way: Way) -> Iterator[Case]:
    """Lengths at and beside the tiles' multiples, then long ones; layouts and heads take turns."""
    equal = entry.equal_lengths
    edges = [
        (case.q_len, case.kv_len)
        for case in around_tiles(way.config.BLOCK_M, way.config.BLOCK_N, equal_lengths=equal)
    ]
    lengths = edges + [(q, kv) for q, kv in LONG if q == kv or not equal]
    heads = ((2, 4, 2), (1, 4, 1), (1, entry.odd_heads, entry.odd_heads))
    layouts = list(LAYOUTS)
    for i, (q_len, kv_len) in enumerate(lengths):
        case = Case(q_len, kv_len, *heads[i % len(heads)], layouts[i % len(layouts)])
        yield entry.case(case)


@functools.cache
def _spec(name: str, way: Way) -> AttentionSpec:
    return VOCABULARY[name].spec(way.dtype, way.head_dim)


@functools.cache
def _module(name: str, way: Way) -> ModuleType:
    return rendered_module(_spec(name, way), hopper=way.hopper)


def _check(name: str, way: Way, case: Case) -> None:
    module, spec = _module(name, way), _spec(name, way)
    if way.hopper:
        check_hopper(module, spec, case, way.config)
    else:
        check_config(module, spec, case, way.config, USE_TMA=way.tma)


def _needs(way: Way) -> None:
    if way.hopper and not on_hopper():
        pytest.skip("the Gluon kernel needs a Hopper GPU")


@pytest.mark.parametrize("way", WAYS + HOPPER_WAYS, ids=str)
@pytest.mark.parametrize("name", VOCABULARY)
def test_around_tiles_and_far_beyond(name: str, way: Way) -> None:
    _needs(way)
    for case in _cases(VOCABULARY[name], way):
        try:
            _check(name, way, case)
        except Exception as error:
            error.add_note(str(case))
            raise


@pytest.mark.parametrize("way", (WAYS[1], *HOPPER_WAYS[:2]), ids=str)
@pytest.mark.parametrize("name", VOCABULARY)
def test_every_remainder(name: str, way: Way) -> None:
    """By both sides of a tile, with the lengths apart by every remainder too."""
    _needs(way)
    entry = VOCABULARY[name]
    for r in range(128):
        q_len, kv_len = 64 + r, 64 + r if entry.equal_lengths else 100 + 7 * r % 128
        _check(name, way, entry.case(Case(q_len, kv_len, q_heads=2, kv_heads=1)))


@pytest.mark.parametrize("name", VOCABULARY)
def test_the_public_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole numbers from the least to ones that reach past every key."""
    entry, way = VOCABULARY[name], WAYS[0]
    spec, module = _spec(name, way), _module(name, way)
    config = {**way.config.as_dict(), "USE_TMA": way.tma}
    monkeypatch.setattr(module, "_config", lambda device: config)
    numbers = [p for p in spec.params if isinstance(p, Int) and p.name not in entry.values(_ONE)]
    for turn in range(5 if numbers else 1):
        values = {p.name: (p.min, p.min + 1, 128, 1000, 10**6)[turn] for p in numbers}
        case = entry.case(Case(1100, 1100, batch=2, q_heads=4, kv_heads=2, scale=0.2))
        chosen = replace(case, params={**case.params, **values})
        check_attention(module, spec, chosen)


_ONE = Case(1, 1)

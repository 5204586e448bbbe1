"""A cache that grows: its launches are repeated where Triton compiles the same kernel, only."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Tensor
from support.fake_gpu import fake_gpu, is_address, module_on
from support.slip import with_slip

KEPT = Tensor("kept", ("batch", "kv_len"), "bool")
#: Its cache kernels are two: one lists the tiles that elements of a tensor show.
SPEC = AttentionSpec(
    24,  # rows of 48 bytes: which strides are multiples of 16 depends on the length
    mask=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & KEPT[b, kv_idx],
    align="bottom_right",
    forms=("dense", "cache"),
)
#: Lengths on both sides of multiples of 16, and one key.
LENGTHS = (40, 41, 47, 48, 49, 1, 2, 3, 64, 65, 33, 100, 112)


class Cache:
    """Steps on a GPU that notes alone."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, edit: Callable[[str], str] = lambda source: source
    ) -> None:
        self.gpu = fake_gpu(monkeypatch)
        self.module: ModuleType = module_on(self.gpu, SPEC, monkeypatch, edit_source=edit)
        counters = torch.zeros(4096, dtype=torch.int32)
        monkeypatch.setattr(self.module, "_cache_counters", lambda *_: counters)
        monkeypatch.setattr(self.module, "_num_sms_of", lambda device: 132)

    def tensors(self, length: int, batch: int = 2, stride: int | None = None) -> dict[str, Any]:
        """As of a cache of transformers: heads before keys in memory."""
        k, v = torch.zeros(2, batch, 2, length, 24, dtype=torch.bfloat16).transpose(2, 3)
        if stride is not None:
            k = k.as_strided(k.shape, (stride, *k.stride()[1:]))
        return {
            "q": torch.zeros(batch, 1, 4, 24, dtype=torch.bfloat16),
            "k_cache": k,
            "v_cache": v.clone(),
            "kv_lens": torch.full((batch,), length, dtype=torch.int32),
            "kept": torch.ones(batch, length, dtype=torch.bool),
        }

    @torch.no_grad()
    def step(self, given: dict[str, Any], **options: Any) -> tuple[Any, ...]:
        """What both kernels of a step are, what is allocated for them, and what they get."""
        before = len(self.gpu.calls)
        self.module.cache_attention(**given, **options)
        launch = list(self.module._LAUNCHES.values())[-1]
        hashes = [x.kernel.hash for x in (launch.config["before"], launch)]
        names = {x.data_ptr(): name for name, x in given.items()}
        sizes = {name: x for name, x in launch.config.items() if name != "before"}
        return hashes, sizes, [_named(call, names) for call in self.gpu.calls[before:]]

    def ordinary(self, given: dict[str, Any], **options: Any) -> tuple[Any, ...]:
        """The same of launches that Triton prepares."""
        for kept in ("_LAUNCHES", "_COMPILED", "_ALIKE", "_LAST"):
            getattr(self.module, kept).clear()
        return self.step(given, **options)

    def wrong(self) -> list[Any]:
        """The steps that differ from ordinary ones."""
        steps: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (self.tensors(length), {}) for length in LENGTHS
        ]
        steps += [(self.tensors(40, batch=1, stride=n), {}) for n in (3, 1, 2**30, 2**31, 2**40)]
        steps += [(self.tensors(40), {"num_splits": n}) for n in (1, 3)]
        steps += [(self.tensors(50), {"return_lse": x, "scale": 0.5}) for x in (True, False)]
        found = [self.step(given, **options) for given, options in steps]
        right = [self.ordinary(given, **options) for given, options in steps]
        return [n for n, pair in enumerate(zip(found, right, strict=True)) if pair[0] != pair[1]]


def _named(x: Any, names: dict[int, str]) -> Any:
    if isinstance(x, tuple):
        return tuple(_named(y, names) for y in x)
    return names.get(x, "its own") if is_address(x) and x % 2**30 else x


def test_steps_are_as_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cache(monkeypatch).wrong() == []


SLIPS = {
    "multiples of 16": (" + (x % 16 == 0) * 2", ""),
    "ones": (" + (x == 1)", ""),
    "64 bits": ("x.bit_length() // 32 * 4", "0"),
    "constants": ("device, grid, constants, *options", "device, grid, *options"),
    "grids": ("device, grid, constants, *options", "device, constants, *options"),
    "sizes": ("other.args = [None", "other.args = self.args or [None"),
    "addresses": ("launch.repeat_at(addresses,", "launch.repeat_at(addresses[::-1],"),
    "lists": ("other.is_grown = config,", "other.is_grown = self.config,"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_found(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cache(monkeypatch, with_slip(*SLIPS[slip])).wrong() != []


def test_triton_looks_at_few_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second layer's call is like the first one's."""
    cache = Cache(monkeypatch)
    for length in range(33, 66):
        cache.step(cache.tensors(length))
    binds = cache.gpu.binds
    # Lengths that are odd, even, and multiples of 16; the kernel before that has no odd strides.
    assert binds == 3 + 2
    found = []
    again = cache.module._again
    monkeypatch.setattr(
        cache.module, "_again", lambda *given: found.append(again(*given)) or found[-1]
    )
    for length in range(66, 90):
        for _ in range(2):
            cache.step(cache.tensors(length))
    assert cache.gpu.binds == binds
    assert [x is not None for x in found] == [False, True] * 24


def test_an_address_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_for = Cache(monkeypatch).module._compiled_for
    memory = torch.zeros(100, dtype=torch.int32)
    assert compiled_for((memory[:4],))[0] == compiled_for((memory[4:],))[0]
    assert compiled_for((memory[:4],))[0] != compiled_for((memory[1:],))[0]
    assert compiled_for((memory, "text")) == compiled_for((-1,)) == (None, None)


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(monkeypatch)
    compiled = cache.module._COMPILED
    monkeypatch.setattr(
        cache.module, "_compiled_for", lambda args: ([len(compiled), id(args)], None)
    )
    for n in range(400):
        compiled[n] = None
    cache.step(cache.tensors(40))
    assert 1 <= len(compiled) <= 2

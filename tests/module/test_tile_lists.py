"""Lists that are kept with the tiles of `tiles`: which calls make some, on a GPU that notes."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashgen import AttentionSpec
from support.data_masks import data_mask
from support.fake_gpu import FakeGpu, fake_gpu, module_on
from support.slip import with_slip

LENGTH, DIM = 300, 64


@functools.cache
def _spec(name: str, deterministic: bool = False) -> AttentionSpec:
    return AttentionSpec(DIM, mask=data_mask(name), deterministic=deterministic)


class Layers:
    """A module on a GPU that notes launches, and what layers pass.

    Attributes:
        gpu: where launches are noted.
        module: the module.
        params: what the mask reads.
    """

    def __init__(
        self,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
        *,
        form: str = "hopper",
        deterministic: bool = False,
        edit_source: Callable[[str], str] = lambda source: source,
    ) -> None:
        self.gpu: FakeGpu = fake_gpu(monkeypatch)
        spec = _spec(name, deterministic)
        self.module: ModuleType = module_on(self.gpu, spec, monkeypatch, edit_source=edit_source)
        if form == "portable":
            for runs in ("_runs_hopper", "_runs_hopper_backward"):
                monkeypatch.setattr(self.module, runs, lambda *_: False)
        self.params: dict[str, Any] = {}
        if name == "islands":
            self.params["img"] = torch.zeros(1, LENGTH, dtype=torch.int32)
        self.q, self.k, self.v = (
            torch.zeros(1, 2, LENGTH, DIM, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
        )

    def tiles(self) -> Any:
        return self.module.tiles(self.q, self.k, **self.params)

    def forward(self, tiles: Any) -> torch.Tensor:
        out: torch.Tensor = self.module.attention(
            self.q, self.k, self.v, **self.params, tiles=tiles
        )
        return out

    def launched(self, call: Callable[[], Any]) -> int:
        """How often a call lists tiles."""
        before = len(self.gpu.calls)
        call()
        return sum("function _list_tiles" in repr(x) for x in self.gpu.calls[before:])

    def both_passes(self, tiles: Any) -> tuple[int, int]:
        """The same of a forward and a backward pass."""
        outs: list[torch.Tensor] = []
        forward = self.launched(lambda: outs.append(self.forward(tiles)))
        return forward, self.launched(lambda: outs[0].backward(torch.zeros_like(outs[0])))


#: (mask, kernels, deterministic gradients, lists of their pass).
PASSES = {
    "one_pass": ("islands", "hopper", False, 1),
    "no_tensors": ("stripes", "hopper", False, 1),
    "split": ("islands", "hopper", True, 2),
    "portable": ("islands", "portable", False, 2),
}


@pytest.mark.parametrize("name", PASSES)
def test_layers_with_the_same_tiles_share_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, form, deterministic, of_gradients = PASSES[name]
    layers = Layers(mask, monkeypatch, form=form, deterministic=deterministic)
    tiles = layers.tiles()
    once = layers.both_passes(tiles)
    assert once[0] == 1
    assert 1 <= once[1] <= of_gradients  # the forward pass may have listed tiles of queries
    assert len(tiles.bits.lists) == sum(once)
    assert layers.both_passes(tiles) == layers.both_passes(tiles) == (0, 0)
    assert layers.both_passes(layers.tiles()) == once
    for _ in range(2):  # calls without tiles keep none
        assert layers.both_passes(None) == (1, of_gradients)
    with torch.no_grad():
        assert layers.launched(lambda: layers.forward(tiles)) == 0


def _with_lists(monkeypatch: pytest.MonkeyPatch) -> tuple[Layers, Any]:
    """Layers, and tiles whose lists they have made."""
    layers = Layers("islands", monkeypatch)
    tiles = layers.tiles()
    layers.both_passes(tiles)
    return layers, tiles


def test_both_passes_find_lists_where_layers_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers, tiles = _with_lists(monkeypatch)

    def gradients() -> None:
        for reentrant in (False, True):
            out = checkpoint(lambda q: layers.forward(tiles), layers.q, use_reentrant=reentrant)
            out.backward(torch.zeros_like(out))

    assert layers.launched(gradients) == 0


def test_a_copy_that_is_saved_for_gradients_has_lists_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers, tiles = _with_lists(monkeypatch)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        assert layers.both_passes(tiles) == (0, 1)
    assert layers.both_passes(tiles) == (0, 0)


def _launches(
    monkeypatch: pytest.MonkeyPatch, edit_source: Callable[[str], str] = lambda source: source
) -> dict[str, int]:
    """How many lists are made by each of some calls, one after another."""
    layers = Layers("islands", monkeypatch, edit_source=edit_source)
    module, gpu, q, img = layers.module, layers.gpu, layers.q, layers.params["img"]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tiles, made = layers.tiles(), {}

    def note(
        name: str, bits: torch.Tensor, *sizes: int, turned: bool = False, **parts: Any
    ) -> None:
        lists = module._turned if turned else module._listed
        made[name] = layers.launched(lambda: lists(q, LENGTH, *(sizes or (64, 64)), bits, **parts))

    note("first", tiles.bits)
    note("again", tiles.bits)
    note("tiles of more queries", tiles.bits, 128, 64)
    note("tiles of more keys", tiles.bits, 64, 128)
    note("of keys", tiles.bits, turned=True)
    note("of keys again", tiles.bits, turned=True)
    note("with parts", tiles.bits, partwise=True)
    gpu.stream += 1
    note("on another stream", tiles.bits)
    gpu.stream -= 1
    note("on the first stream again", tiles.bits)
    note("of other tiles", layers.tiles().bits)

    own = module._tile_bits(q, LENGTH, img)
    note("of a call's own bits", own)
    note("of a call's own bits again", own)
    note("of copied bits", copy.deepcopy(tiles).bits)
    note("of bits from a file", pickle.loads(pickle.dumps(tiles)).bits)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_is_capturing", lambda q: True)
        note("gradients in a CUDA graph", tiles.bits)
        note("gradients in a CUDA graph, otherwise", tiles.bits, 192, 64)
        captured = layers.tiles()
    note("otherwise outside of it", tiles.bits, 192, 64)
    note("of a CUDA graph's bits", captured.bits)
    note("of a CUDA graph's bits again", captured.bits)

    out = layers.forward(tiles).detach()
    lse = torch.zeros(out.shape[:3])
    given = (q.detach(), layers.k.detach(), layers.v.detach(), 0.1, img, tiles.bits)
    made["operator"] = layers.launched(lambda: module.op(*given, [img]))
    gradients = (*given, out, lse, torch.zeros_like(out), None)
    for name in ("operator of gradients", "operator of gradients again"):
        made[name] = layers.launched(lambda: module.op_backward(*gradients))
    return made


KEPT = {
    "again",
    "of keys again",
    "on the first stream again",
}


def test_lists_are_made_once_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _launches(monkeypatch)
    assert {name for name, number in made.items() if number == 0} == KEPT
    assert set(made.values()) == {0, 1}


#: What is left out, and who then takes a list of another's.
SLIPS = {
    "any_stream": (", _stream(q))", ",)", "on another stream"),
    "any_direction": ("(own, listed, of_keys, ", "(own, listed, ", "of keys"),
    "any_own": ("key = (own, listed,", "key = (listed,", "tiles of more queries"),
    "any_listed": ("key = (own, listed,", "key = (own,", "tiles of more keys"),
    "any_parts": ("partwise, _stream(q))", "_stream(q))", "with parts"),
    "any_bits": (
        'getattr(bits, "lists", None)',
        'bits.__dict__.setdefault("lists", _Lists())',
        "of a call's own bits again",
    ),
    "copies": ("return _Lists, ()", "return dict, (dict(self),)", "of copied bits"),
    "in_graphs": ("and _is_capturing(q):", "and False:", "gradients in a CUDA graph"),
    "of_graphs": (
        "if not (captured or torch.compiler",
        "if not (torch.compiler",
        "of a CUDA graph's bits again",
    ),
    "operator": (
        "_check_bits(bits, of)\n    bits = _without_lists(bits)\n",
        "_check_bits(bits, of)\n",
        "operator",
    ),
    "operator_of_gradients": (
        "]:\n    bits = _without_lists(bits)\n",
        "]:\n    pass\n",
        "operator of gradients again",
    ),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, changed = SLIPS[name]
    made = _launches(monkeypatch, with_slip(right, wrong))
    assert made[changed] == 0


def test_compiled_calls_neither_take_nor_leave_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers("islands", monkeypatch)
    monkeypatch.setitem(sys.modules, layers.module.__name__, layers.module)
    tiles = layers.tiles()
    torch._dynamo.reset()
    compiled = torch.compile(layers.forward, backend="aot_eager", fullgraph=True)
    assert layers.launched(lambda: compiled(tiles)) == 1
    assert not tiles.bits.lists
    layers.both_passes(tiles)
    kept = len(tiles.bits.lists)
    assert layers.launched(lambda: compiled(tiles).backward(torch.zeros_like(layers.q))) == 2
    assert len(tiles.bits.lists) == kept

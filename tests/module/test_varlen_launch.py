"""Repeated launches of packed sequences: they pass what an ordinary call would have passed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Float, Int, Tensor, causal, sliding_window, softcap
from support.fake_gpu import fake_gpu, is_address, module_on
from support.packed import int32, offsets

FORMS = ("dense", "varlen")
RATES = Tensor("rates", ("num_q_heads",), "int32")
NEAR = Tensor("near", ("q_len", "kv_len"))
SPECS = {
    # Numbers and a tensor among the arguments of kernels of both passes, and other lengths of keys.
    "gluon": AttentionSpec(
        32,
        mask=sliding_window(Int("left", 70), 0),
        align="bottom_right",
        score=lambda s, b, h, q, kv: s - RATES[h] * (q - kv),
        forms=FORMS,
    ),
    # The same of the portable kernel; the mask is for one and the same offsets.
    "portable": AttentionSpec(
        16, "float32", mask=causal(), score=softcap(Float("cap", 5.0, above=0)), forms=FORMS
    ),
    # A tensor whose size is that of the largest lengths.
    "padded": AttentionSpec(
        16, "float32", score=lambda s, b, h, q, kv: s + NEAR[q, kv], forms=FORMS
    ),
}
KERNELS = {
    "gluon": ("_list_and_fill", "_attention_hopper_varlen"),
    "portable": ("_list_sequence_tiles", "_varlen_forward"),
    "padded": ("_list_sequence_tiles", "_varlen_forward"),
}
BY_KEYS = ("_list_sequence_tiles", "_varlen_backward_of_keys")
BY_QUERIES = ("_list_sequence_tiles", "_varlen_backward_of_queries")
BACKWARD = {
    "gluon": (
        *("_list_both_tiles", "_padded_rows"),
        *("_backward_hopper_varlen", "_place_packed_sums"),
    ),
    "portable": ("_varlen_rows", *BY_KEYS, *BY_QUERIES),
    "padded": ("_varlen_rows", *BY_KEYS, *BY_QUERIES),
}


class Calls:
    """A module on a GPU that notes launches, and calls of it.

    Attributes:
        module: the module.
        gpu: where launches are noted.
    """

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec, self.patch = SPECS[name], monkeypatch
        self.gpu = fake_gpu(monkeypatch)
        self.module: ModuleType = module_on(self.gpu, self.spec, monkeypatch)

    def inputs(self, tokens: int = 100, heads: int = 2, kv_heads: int = 2) -> dict[str, Any]:
        """Arguments at addresses of their own, of two sequences."""
        dtype = getattr(torch, self.spec.dtype)
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
        head_dim = self.spec.qk_head_dim
        given: dict[str, Any] = {
            name: torch.zeros(tokens, n, head_dim, dtype=dtype) for name, n in sizes.items()
        }
        lengths = (40, tokens - 40)
        given["cu_seqlens_q"] = given["cu_seqlens_kv"] = offsets(lengths)
        given |= {"max_q_len": 60, "max_kv_len": 60}
        given |= {"left": 50, "rates": int32((1,) * heads)} if self.spec is SPECS["gluon"] else {}
        given |= {"near": torch.zeros(60, 60)} if self.spec is SPECS["padded"] else {}
        return given

    def made(self, given: dict[str, Any], **more: Any) -> tuple[Any, ...]:
        """What a call passed to each kernel, with names for the addresses in it.

        Memory that launchers allocate has the number of its allocation for a name.
        """
        return self._made(lambda: self.module.varlen_attention(**given, **more), given)

    def made_backward(
        self, given: dict[str, Any], grad_out: torch.Tensor | None = None, **more: Any
    ) -> tuple[Any, ...]:
        """The same of the backward pass of a call."""
        leaves = [given[name].requires_grad_() for name in "qkv"]
        out, lse = self.module.varlen_attention(**given, **more, return_lse=True)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        named = {**given, "out": out, "lse": lse, "grad_out": grad_out}
        return self._made(
            lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True), named
        )

    def _made(self, call: Callable[[], Any], named: dict[str, Any]) -> tuple[Any, ...]:
        made: list[torch.Tensor] = []  # which keeps them: no two have one address
        allocate = torch.Tensor.new_empty

        def new_empty(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            made.append(allocate(x, *args, **options))
            return made[-1]

        before = len(self.gpu.calls)
        with self.patch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", new_empty)
            call()
        memory: dict[str, torch.Tensor] = {}
        for name, x in [*named.items(), *((f"made {i}", x) for i, x in enumerate(made))]:
            if isinstance(x, torch.Tensor):
                memory.setdefault(name, x)
        return tuple(_named(launch, memory) for launch in self.gpu.calls[before:])

    def anew(self, made: Callable[..., Any], *args: Any, **given: Any) -> tuple[Any, ...]:
        """What a call makes if no launch is kept."""
        kept, self.module.__dict__["_LAUNCHES"] = self.module._LAUNCHES, {}
        try:
            launches: tuple[Any, ...] = made(*args, **given)
            return launches
        finally:
            self.module.__dict__["_LAUNCHES"] = kept

    def holds(self, given: dict[str, Any], **more: Any) -> tuple[Any, ...]:
        """The launches of a call, which are those of an ordinary one; the call comes twice."""
        ordinary = self.anew(self.made, given, **more)
        assert self.made(given, **more) == ordinary
        assert self.made(given, **more) == ordinary
        return ordinary


def _named(x: Any, memory: dict[str, torch.Tensor]) -> Any:
    """What a launch was given, with (a tensor's name, the byte in it) for an address."""
    if isinstance(x, tuple):
        return tuple(_named(y, memory) for y in x)
    if not is_address(x) or x == 2**30:
        return x
    for name, held in memory.items():
        storage = held.untyped_storage()  # an expanded tensor has fewer bytes than elements
        if held.data_ptr() <= x < storage.data_ptr() + storage.nbytes():
            return name, x - held.data_ptr()
    return "its own"


@pytest.mark.parametrize("name", SPECS)
def test_the_forward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(name, monkeypatch)
    given = calls.inputs()
    with torch.no_grad():
        first = calls.holds(given)
        assert [next(k for k in KERNELS[name] if k in repr(x)) for x in first] == [*KERNELS[name]]
        bound = calls.gpu.binds
        again = calls.inputs() | {x: y + 1 for x, y in given.items() if x in ("left", "cap")}
        again["cu_seqlens_q"] = again["cu_seqlens_kv"] = offsets((70, 30))
        again |= {} if name == "padded" else {"max_q_len": 71, "max_kv_len": 72}
        repeated = calls.made(again, scale=0.3)
        assert calls.gpu.binds == bound, "Triton prepared a launch anew"
        assert repeated == calls.anew(calls.made, again, scale=0.3) != first
        calls.holds(given, return_lse=True)


@pytest.mark.parametrize("name", SPECS)
def test_the_backward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(name, monkeypatch)
    first = calls.made_backward(calls.inputs(kv_heads=1))
    assert [next(k for k in BACKWARD[name] if k in repr(x)) for x in first] == [*BACKWARD[name]]
    bound = calls.gpu.binds
    again = calls.inputs(kv_heads=1)
    again |= {"gluon": {"left": 51}, "portable": {"cap": 6.0}, "padded": {}}[name]
    again |= {} if name == "padded" else {"max_q_len": 90, "max_kv_len": 91}
    repeated = calls.made_backward(again, scale=0.3)
    assert calls.gpu.binds == bound, "Triton prepared a launch anew"
    assert repeated == calls.anew(calls.made_backward, again, scale=0.3) != first
    # Gradients of other strides: those that TMA cannot read, or that are expanded, are copied.
    expanded = torch.zeros((), dtype=again["q"].dtype).expand(again["q"].shape)
    copied = calls.made_backward(again, expanded)
    assert "grad_out" not in repr(copied)
    assert calls.made_backward(again, expanded) == copied
    assert calls.anew(calls.made_backward, again, expanded) == copied
    assert calls.made_backward(again, scale=0.3) == repeated


def test_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask for other kernels, whatever was launched before."""
    calls = Calls("gluon", monkeypatch)
    module, given = calls.module, calls.inputs()
    q, k, v, offset = (given[name] for name in ("q", "k", "v", "cu_seqlens_q"))
    lse = torch.zeros(q.shape[:2])
    args = (q, k, v, offset, offset, 60, 60, None, given["rates"], q, lse, q, None)
    usual, _ = module._known_varlen_backward(*args)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    module._LAUNCHES[usual] = {"tiles": None}
    assert module._known_varlen_backward(*args)[1] is None
    assert not module._runs_hopper_varlen_backward(q, k, v)


CHANGES: dict[str, Callable[[Calls, dict[str, Any]], dict[str, Any]]] = {
    "tokens": lambda calls, given: calls.inputs(tokens=116),
    "heads": lambda calls, given: calls.inputs(heads=4, kv_heads=1),
    "strides": lambda calls, given: {"k": torch.zeros(2, 100, 32).bfloat16().transpose(0, 1)},
    "sequences": lambda calls, given: (
        {x: given["cu_seqlens_q"][[0, 1, 1, 2]] for x in ("cu_seqlens_q",)}
        | {"cu_seqlens_kv": given["cu_seqlens_q"][[0, 0, 1, 2]]}
    ),
    "offsets of keys": lambda calls, given: {"cu_seqlens_kv": offsets((30, 70))},
    "spread offsets": lambda calls, given: {"cu_seqlens_kv": int32((0, 9, 40, 9, 100, 9))[::2]},
    "lengths of keys": lambda calls, given: {"kv_lens": int32((20, 30))},
}


def test_other_tensors_have_launches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("gluon", monkeypatch)
    given = calls.inputs()
    with torch.no_grad():
        first = calls.holds(given)
        for number, change in enumerate(CHANGES):
            calls.holds(given | CHANGES[change](calls, given))
            assert len(calls.module._LAUNCHES) == 2 + number, change
            assert calls.made(given) == first


@pytest.mark.parametrize(
    "which", ["q", "k", "v", "rates", "cu_seqlens_q", "cu_seqlens_kv", "kv_lens"]
)
def test_memory_that_is_not_aligned(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles another kernel for it: such a call keeps no launch, and repeats none."""
    module = Calls("gluon", monkeypatch).module
    tensors = Calls("gluon", monkeypatch).inputs()
    tensors |= {"cu_seqlens_kv": offsets((30, 70)), "kv_lens": int32((20, 30))}
    order = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")
    memory = tensors[which].new_zeros(tensors[which].numel() + 1)
    odd = tensors | {which: memory[1:].view(tensors[which].shape)}
    for given in (tensors, odd):
        args = (*(given[x] for x in order), 60, 60, given["kv_lens"], given["rates"])
        assert (module._varlen_known(*args)[0] is None) == (given is odd)


def test_largest_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are numbers of a launch, which are checked each time."""
    calls = Calls("portable", monkeypatch)
    given = calls.inputs()
    with torch.no_grad():
        for largest in (60, 100, 1, 16):
            calls.holds(given | {"max_q_len": largest, "max_kv_len": largest})
        assert len(calls.module._LAUNCHES) == 1
        for wrong in (-1, 2**30 + 1, True, 60.0):
            with pytest.raises((TypeError, ValueError), match=r"^max_q_len: got "):
                calls.module.varlen_attention(**given | {"max_q_len": wrong})


def test_sizes_that_depend_on_the_largest_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("padded", monkeypatch)
    given = calls.inputs()
    with torch.no_grad():
        first = calls.holds(given)
        for name in ("max_q_len", "max_kv_len"):
            with pytest.raises(ValueError, match=r"^near: got shape \(60, 60\)"):
                calls.module.varlen_attention(**given | {name: 61})
        assert calls.made(given) == first


def test_calls_that_were_never_seen_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("portable", monkeypatch)
    given = calls.inputs()
    with torch.no_grad():
        calls.holds(given)
        for name, x, message in (
            ("cu_seqlens_kv", given["cu_seqlens_q"].clone(), "is another tensor"),
            ("kv_lens", int32((40, 60)), "got lengths of keys alone"),
            ("cu_seqlens_kv", None, "is another tensor"),
            ("cu_seqlens_q", given["cu_seqlens_q"].long(), "got torch.int64"),
            ("q", given["q"].half(), "got torch.float16"),
            ("v", given["v"][:99], "got 99 tokens"),
        ):
            with pytest.raises((TypeError, ValueError), match=f"^{name}: {message}"):
                calls.module.varlen_attention(**given | {name: x})


def test_a_configuration_that_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("portable", monkeypatch)
    given = calls.inputs()
    with torch.no_grad():
        first = calls.holds(given)
        calls.module.CONFIGS["sm_90"].update(BLOCK_M=16)
        assert calls.holds(given) != first


def test_nothing_that_is_kept_holds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("portable", monkeypatch)
    with torch.no_grad():
        calls.made(calls.inputs())
    (launches,) = calls.module._LAUNCHES.values()
    assert len(launches) == 2
    for launch in launches.values():
        assert not [x for x in launch.args if isinstance(x, torch.Tensor)]

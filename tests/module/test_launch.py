"""Repeated launches: what reaches Triton's C code is what an ordinary launch would have passed."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.knobs import HookChain

from flashgen import AttentionSpec, Constant, Int, Tensor, alibi, block_sparse, causal
from support.cases import LAYOUTS, Case
from support.contract import native_inputs
from support.fake_gpu import FakeGpu, fake_gpu, is_address, module_on
from support.variants import shipped_specs
from support.vocabulary import VOCABULARY

SPECS = {
    name: shipped_specs()[name]
    for name in (
        "causal_d128",  # takes turns by a counter
        "full_d64",
        "window_d128",  # an int
        "softcap_d128",  # a float
        "documents_d128",  # a row table
        "sinks_softmax_d64",  # a tensor that the kernel reads
        "causal_d192_v128",  # tiles of two widths
    )
}
SPECS["listed"] = AttentionSpec(
    64, mask=block_sparse(Tensor("layout", ("num_q_heads", None, None), "bool"), 16)
)
SPECS["constant"] = AttentionSpec(
    64, mask=causal(), score=alibi(Constant("slopes", [0.5, 0.25], dims=("num_q_heads",)))
)
SPECS["padded"] = VOCABULARY["padded"].spec("bfloat16", 64)  # a range table
SIZED = AttentionSpec(
    64, mask=block_sparse(Constant("layout", [[True, False], [True, True]]), Int("size", min=1))
)
CASE = Case(100, 100, batch=2, q_heads=2, kv_heads=2)

#: Which launch a kernel before that of attention: one that lists tiles of keys, or of queries, or
#: finds which keys are shown.
SEVERAL = {
    (name, form)
    for name in ("listed", "documents_d128", "padded")
    for form in ("hopper", "portable")
}


class Calls:
    """A module on a GPU that notes launches, and calls of it.

    Attributes:
        gpu: where they are noted.
        module: the module.
    """

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch, form: str = "hopper") -> None:
        self.name, self.spec = name, {**SPECS, "sized": SIZED}[name]
        self.gpu: FakeGpu = fake_gpu(monkeypatch)
        self.module: ModuleType = module_on(self.gpu, self.spec, monkeypatch)
        if form == "portable":
            monkeypatch.setattr(self.module, "_runs_hopper", lambda q, k, v: False)

    def inputs(self, case: Case = CASE) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Tensors at addresses of their own, and parameters."""
        tensors = tuple(x.clone() for x in native_inputs(case, self.spec))
        if self.name == "listed":
            return tensors, {"layout": torch.ones(case.q_heads, 7, 7).tril().bool()}
        return tensors, case.arguments(self.spec)

    def made(self, tensors: tuple[torch.Tensor, ...], **params: Any) -> tuple[Any, ...]:
        """What a call passed to each kernel, with names for the addresses in it."""
        before = len(self.gpu.calls)
        out, lse = self.module.attention(*tensors, return_lse=True, **params)
        named = dict(zip("qkv", tensors, strict=True)) | {"out": out, "lse": lse}
        named |= {name: x for name, x in params.items() if isinstance(x, torch.Tensor)}
        names: dict[int, str] = {}
        for name, x in named.items():
            names.setdefault(x.data_ptr(), name)
        return tuple(_named(call, names) for call in self.gpu.calls[before:])

    def made_ordinarily(self, tensors: tuple[torch.Tensor, ...], **params: Any) -> tuple[Any, ...]:
        """The same of a call that repeats none and is not kept."""
        kept, self.module.__dict__["_LAUNCHES"] = self.module._LAUNCHES, {}
        try:
            return self.made(tensors, **params)
        finally:
            self.module.__dict__["_LAUNCHES"] = kept


def _named(x: Any, names: dict[int, str]) -> Any:
    if isinstance(x, tuple):
        return tuple(_named(y, names) for y in x)
    if is_address(x):
        return names.get(x, "its own")  # what the launcher made has no name
    return x


def _others(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of other values, at other addresses."""
    return {name: x.clone() if isinstance(x, torch.Tensor) else x + 1 for name, x in params.items()}


@pytest.mark.parametrize("form", ["hopper", "portable"])
@pytest.mark.parametrize("name", SPECS)
def test_it_passes_what_an_ordinary_launch_passes(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(name, monkeypatch, form)
    tensors, params = calls.inputs()
    first = calls.made(tensors, **params)
    kernels = calls.gpu.binds
    assert len(first) == kernels == (2 if (name, form) in SEVERAL else 1)
    assert ("_attention_hopper" if form == "hopper" else "_attention_forward") in str(first)
    again, others = calls.inputs()[0], _others(params)
    repeated = calls.made(again, scale=0.3, **others)
    bound_again = 1 if name == "listed" else 0  # what lists tiles of keys is launched ordinarily
    assert calls.gpu.binds == kernels + bound_again, "Triton prepared a launch anew"
    assert repeated == calls.made_ordinarily(again, scale=0.3, **others)
    assert repeated != first  # the scale at least
    assert calls.made(tensors, **params) == first


def test_one_tensor_in_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch that is kept must not mistake one for another."""
    calls = Calls("causal_d128", monkeypatch)
    q, k, v = calls.inputs()[0]
    calls.made((q, q, q))
    repeated = calls.made((q, k, v))
    assert calls.gpu.binds == 1
    assert repeated == calls.made_ordinarily((q, k, v))
    assert {"q", "k", "v", "out"} <= {str(x[1]) for x in _maps(repeated)}


def _maps(x: Any) -> list[Any]:
    if isinstance(x, tuple):
        return [x] if x[:1] == ("map",) else [y for part in x for y in _maps(part)]
    return []


def test_a_tensor_map_is_made_once_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("full_d64", monkeypatch)
    tensors, _ = calls.inputs()
    kept = [calls.module.attention(*tensors)]  # outputs that live get other addresses
    for _ in range(2):
        kept.append(calls.module.attention(*tensors))
    made = calls.gpu.maps
    kept.append(calls.module.attention(*tensors))
    assert calls.gpu.maps == made + 1
    (launch,) = calls.module._LAUNCHES.values()
    maps = launch.places[0][1]
    for address in range(0, 16 * 1000, 16):
        assert maps[address] is maps[address]
        assert len(maps) <= 128


@pytest.mark.parametrize("form", ["hopper", "portable"])
@pytest.mark.parametrize("change", ["shape", "strides", "heads", "batch"])
def test_other_tensors_have_a_launch_of_their_own(
    change: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls("causal_d128", monkeypatch, form)
    tensors, _ = calls.inputs()
    other = {
        "shape": Case(164, 164, batch=2, q_heads=2, kv_heads=2),
        "strides": Case(100, 100, batch=2, q_heads=2, kv_heads=2, layout="transposed"),
        "heads": Case(100, 100, batch=2, q_heads=2, kv_heads=1),
        "batch": Case(100, 100, batch=1, q_heads=2, kv_heads=2),
    }[change]
    there = native_inputs(other, calls.spec)
    first = calls.made(tensors)
    for _ in range(2):
        assert calls.made(there) == calls.made_ordinarily(there)
        assert calls.made(tensors) == first
    assert len(calls.module._LAUNCHES) == 2


@pytest.mark.parametrize("which", range(3))
def test_what_calls_are_alike_by(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors on two GPUs too, which there are none of here."""
    module = Calls("causal_d128", monkeypatch).module

    def tensor(**other: Any) -> Any:
        values = {"dtype": torch.bfloat16, "device": torch.device("cuda:0"), "shape": (1, 2, 3, 4)}
        values |= {"stride": (24, 12, 4, 1), "data_ptr": 4096} | other
        methods = {name: lambda x=values[name]: x for name in ("stride", "data_ptr")}
        return SimpleNamespace(**values | methods)

    first, _ = module._known(tensor(), tensor(), tensor())
    for other in (
        {"dtype": torch.float16},
        {"device": torch.device("cuda:1")},
        {"shape": (1, 2, 4, 4)},
        {"stride": (24, 4, 8, 1)},
    ):
        three = [tensor(), tensor(), tensor()]
        three[which] = tensor(**other)
        assert first is not None and module._known(*three)[0] != first
    three[which] = tensor(data_ptr=4112)
    assert module._known(*three)[0] == first
    three[which] = tensor(data_ptr=4104)
    assert module._known(*three)[0] is None


def test_where_gradients_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are repeated as well."""
    calls = Calls("causal_d128", monkeypatch)
    tensors, _ = calls.inputs()
    leaves = [x.requires_grad_() for x in tensors]
    for _ in range(2):
        assert calls.module.attention(*leaves).requires_grad
    assert len(calls.gpu.calls) == 2 and calls.gpu.binds == 1


def test_parameters_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are plain tensors where no gradient is asked for: the operator is passed by."""
    calls = Calls("sinks_softmax_d64", monkeypatch)
    tensors, params = calls.inputs()
    params["sinks"] = torch.nn.Parameter(params["sinks"])
    assert calls.module.attention(*tensors, **params).requires_grad
    monkeypatch.setattr(calls.module, "op", None)
    with torch.no_grad():
        calls.module.attention(*tensors, **params)
    assert calls.gpu.binds == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that TMA cannot read, pointers reach the portable kernel."""
    calls = Calls("causal_d128", monkeypatch)
    case = Case(100, 100, batch=2, q_heads=2, kv_heads=2, layout=layout)
    first = calls.made(native_inputs(case, calls.spec))
    for _ in range(2):
        assert calls.made(native_inputs(case, calls.spec)) == first


@pytest.mark.parametrize("name", ["causal_d128", "causal_d192_v128"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_is_contiguous(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever strides q has: kernels write it by its sizes."""
    calls = Calls(name, monkeypatch)
    case = Case(100, 100, batch=2, q_heads=2, kv_heads=2, layout=layout)
    for _ in range(2):
        out = calls.module.attention(*native_inputs(case, calls.spec))
        assert out.shape == (2, 2, 100, 128) and out.dtype == torch.bfloat16
        assert out.is_contiguous()


@pytest.mark.parametrize("form", ["hopper", "portable"])
@pytest.mark.parametrize("lengths", [(5, 0), (0, 5), (0, 0)])
def test_calls_without_queries_or_keys(
    lengths: tuple[int, int], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is launched, and nothing kept."""
    calls = Calls("full_d64", monkeypatch, form)
    tensors = native_inputs(Case(*lengths), calls.spec)
    for _ in range(2):
        out, lse = calls.module.attention(*tensors, return_lse=True)
        assert out.shape == tensors[0].shape and lse.shape == out.shape[:3]
        assert lse.dtype == torch.float32 and bool((lse == -torch.inf).all())
        for x in (out, calls.module.attention(*tensors)):
            assert x.dtype == torch.bfloat16 and not x.any()
    assert not calls.gpu.calls and not calls.module._LAUNCHES


def test_memory_that_is_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA cannot read it, and Triton compiles another kernel for it."""
    calls = Calls("causal_d128", monkeypatch)
    tensors, _ = calls.inputs()
    calls.made(tensors)
    for which in range(3):
        views = list(tensors)
        memory = torch.zeros(views[which].numel() + 1, dtype=torch.bfloat16)
        views[which] = memory[1:].view(views[which].shape)
        for _ in range(2):
            assert "_attention_forward" in str(calls.made(tuple(views)))
    assert "_attention_hopper" in str(calls.made(tensors))
    assert len(calls.module._LAUNCHES) == 1


def test_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("causal_d128", monkeypatch)
    tensors, _ = calls.inputs()
    first = calls.made(tensors)
    calls.gpu.stream = 11
    second = calls.made(tensors)
    assert (first[0][3], second[0][3]) == (7, 11)
    assert calls.gpu.binds == 1


def test_profilers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("causal_d128", monkeypatch)
    tensors, _ = calls.inputs()
    first = calls.made(tensors)
    told: list[str] = []
    runtime = triton.knobs.runtime
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook: Any = HookChain()
        monkeypatch.setattr(runtime, name, hook)
        hook.add(lambda metadata, name=name: told.append(name))
        told.clear()
        assert calls.made(tensors) == first
        assert name in told


@pytest.mark.parametrize("knob", ["debug", "instrumentation_mode"])
def test_kernels_that_are_compiled_otherwise(knob: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("full_d64", monkeypatch)
    tensors, _ = calls.inputs()
    calls.made(tensors)
    knobs = triton.knobs.runtime if knob == "debug" else triton.knobs.compilation
    asked: list[Any] = []
    monkeypatch.setattr(
        calls.module._attention_hopper, "run", lambda *args, **kwargs: asked.append(kwargs)
    )
    monkeypatch.setattr(knobs, knob, True if knob == "debug" else "consan")
    calls.module.attention(*tensors)
    assert len(asked) == 1 and len(calls.module._LAUNCHES) == 1


def test_a_configuration_that_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("causal_d128", monkeypatch)
    tensors, _ = calls.inputs()
    calls.made(tensors)
    calls.module.HOPPER_CONFIG.update(BLOCK_N=128)
    changed = calls.made(tensors)
    assert calls.gpu.binds == 2
    assert changed == calls.made(tensors)
    assert calls.gpu.binds == 2


def test_numbers_are_checked_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("window_d128", monkeypatch)
    tensors, _ = calls.inputs()
    calls.module.attention(*tensors, left=5)
    for wrong, message in (
        ({"left": -1}, "left: got -1; pass an int from 0 to"),
        ({"left": 1.0}, "left: got float; pass an int"),
        ({"left": 5, "scale": 0.0}, "scale: got 0.0; pass a positive number of 32 bits"),
        ({"left": 5, "scale": True}, "scale: got bool; pass an int or a float"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            calls.module.attention(*tensors, **wrong)


def test_tensors_that_were_never_seen_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("documents_d128", monkeypatch)
    (q, k, v), params = calls.inputs()
    ids = params["document_ids"]
    calls.module.attention(q, k, v, **params)
    for tensors, given, message in (
        ((q.half(), k, v), ids, "q: got torch.float16"),
        ((q, k.half(), v), ids, "k: got torch.float16"),
        ((q, k, v[:1]), ids, "v: got batch 1"),
        ((q, k, v.to("meta")), ids, "v: is on meta, q on cpu"),
        ((q, k[:, :, :50], v[:, :, :50]), ids, "k: got kv_len 50"),
        ((q, k, v), ids.long(), "document_ids: got torch.int64"),
        ((q, k, v), ids[:, :50], "document_ids: got shape"),
        ((q, k, v), ids.tolist(), "document_ids: got list"),
        ((q, None, v), ids, "k: got NoneType"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            calls.module.attention(*tensors, document_ids=given)


def test_sizes_that_depend_on_a_number_are_checked_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of a table that is for 2 of them: how long a call may be follows from their size."""
    calls = Calls("sized", monkeypatch)
    tensors = native_inputs(CASE, SIZED)
    first = calls.made(tensors, size=64)
    with pytest.raises(ValueError, match=r"^q: got q_len 100; layout of .* is for at most 64"):
        calls.module.attention(*tensors, size=32)
    assert calls.made(tensors, size=64) == first


def test_a_launch_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may repeat it from the moment that it is kept, with the one before it."""

    class Kept(dict[Any, Any]):
        def __setitem__(self, key: Any, launch: Any) -> None:
            whole.append(hasattr(launch, "prior"))
            super().__setitem__(key, launch)

    whole: list[bool] = []
    calls = Calls("documents_d128", monkeypatch)
    monkeypatch.setattr(calls.module, "_LAUNCHES", Kept())
    tensors, params = calls.inputs()
    calls.made(tensors, **params)
    assert whole == [True]


def test_few_launches_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("full_d64", monkeypatch)
    launches = calls.module._LAUNCHES
    for length in range(1, 600, 2):
        calls.module.attention(*native_inputs(Case(length, length), calls.spec))
        assert 1 <= len(launches) <= 256
    assert len(launches) < 256


def test_nothing_that_is_kept_holds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("sinks_softmax_d64", monkeypatch)
    tensors, params = calls.inputs()
    calls.module.attention(*tensors, **params)
    calls.module.attention(*tensors, **params)
    (launch,) = calls.module._LAUNCHES.values()
    assert not [x for x in _held(launch) if isinstance(x, torch.Tensor)]


def _held(x: Any) -> list[Any]:
    """What an object's attributes, lists and functions lead to, of this module's own."""
    parts: list[Any] = []
    if isinstance(x, dict):
        parts += list(x.values())
    if isinstance(x, list | tuple):
        parts += list(x)
    if hasattr(x, "__dict__") and type(x).__module__.startswith(("rendered", "types")):
        parts += list(vars(x).values())
    if callable(x) and getattr(x, "__closure__", None):
        parts += [cell.cell_contents for cell in x.__closure__]
    return [x, *(y for part in parts for y in _held(part))]


@pytest.mark.parametrize("version", ["3.10.0", "3.99.0", "4.0.0"])
def test_a_triton_that_is_not_known_launches_ordinarily(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls("full_d64", monkeypatch)
    tensors, _ = calls.inputs()
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.warns(UserWarning, match="not known how Triton .* launches") as warned:
        first = calls.made(tensors)
        assert calls.made(tensors) == first
    assert len(warned) == 1
    assert calls.gpu.binds == 2 and not calls.module._LAUNCHES


def test_a_sanitized_launch_is_an_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.8's gsan gives each launch arguments that no other has."""
    module = Calls("full_d64", monkeypatch).module
    run = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0, gsan_enabled=True)
    assert module._triton_launch(SimpleNamespace(run=run), (1,)) is None

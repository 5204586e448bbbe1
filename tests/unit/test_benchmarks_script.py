"""What the commands of benchmarks share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import decoding, launch
from benchmarks.forms import in_both_orders
from benchmarks.script import make_parser, sees_gpu, tell
from flashgen.errors import OutputError

CELLS = {"benchmark": "mine", "cells": [{"cell": "a", "ms": {}}, {"cell": "b", "ms": {}}]}
PARTS = {"benchmark": "mine", "calls": {"a": {"b": 1.5}}}


def test_results_may_be_shown_alone_or_have_to_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_parser("mine", "What it does.").parse_args([]).json is None
    with pytest.raises(SystemExit):
        make_parser("mine", None, keeps=True).parse_args([])
    assert "required: --json" in capsys.readouterr().err


@pytest.mark.parametrize("document", [CELLS, PARTS], ids=["cells", "parts"])
def test_results_are_written_and_shown(
    document: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    tell(document, lambda shown: f"table of {shown['benchmark']}", path)
    assert json.loads(path.read_text()) == document
    assert path.read_text().endswith("}\n") and len(path.read_text().splitlines()) > 5
    tell(document, lambda shown: "no file", None)
    assert capsys.readouterr().out == "table of mine\nno file\n"
    with pytest.raises(OutputError, match="choose another place with --json"):
        tell(document, str, path / "below a file")


def test_launches_are_those_that_a_further_call_repeats() -> None:
    """Of documents' module a kernel that finds their tiles comes first."""
    ran: list[tuple[str, list[object]]] = []

    class Launch:
        def __init__(self, name: str, places: list[tuple[int, object]]) -> None:
            self.kernel, self.places = SimpleNamespace(name=name), places
            self.args, self.device, self.stream_of = ["", "a number"], 0, str
            self.launch = lambda stream, args: ran.append((name, args))

        def repeat_at(self, addresses: tuple[int, ...], numbers: object) -> None:
            ran.append((self.kernel.name, [numbers]))

    x = torch.zeros(1)
    tiles, kernel = Launch("_tiles", [(0, None)]), Launch("_kernel", [(0, {x.data_ptr(): "map"})])

    def attention() -> None:
        tiles.repeat_at((x.data_ptr(),), ())
        kernel.repeat_at((x.data_ptr(),), (1.5,))

    module = SimpleNamespace(_Launch=Launch)
    named = dict(launch.launches(module, attention))
    assert list(named) == [
        "repeat of _tiles",
        "Triton's launch of _tiles",
        "repeat",
        "Triton's launch",
    ]
    ran.clear()
    for call in named.values():
        call()
    assert ran == [
        ("_tiles", [()]),
        ("_tiles", [x.data_ptr(), "a number"]),
        ("_kernel", [(1.5,)]),
        ("_kernel", ["map", "a number"]),
    ]
    with pytest.raises(SystemExit, match="keeps no launch"):
        list(launch.launches(SimpleNamespace(__name__="m", _Launch=Launch), lambda: None))


@pytest.mark.parametrize("benchmark", [launch, decoding], ids=["launch", "decoding"])
def test_without_a_gpu_they_say_so(
    benchmark: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["benchmark"])
    assert benchmark.main() == 2
    name = benchmark.__name__
    assert capsys.readouterr().err == f"{name} measures a CUDA GPU; torch sees none\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sees_gpu("any")


def test_a_peer_that_says_nothing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise AssertionError

    case = launch.Case("full_d64", 64, None, {}, {})
    made = [("flashgen", nullcontext, lambda: 1.0), ("a peer", nullcontext, fails)]
    monkeypatch.setattr(launch, "sees_gpu", lambda benchmark: True)
    monkeypatch.setattr(launch, "environment", lambda device: {})
    monkeypatch.setattr(launch, "cases", lambda device: [case])
    monkeypatch.setattr(launch, "calls", lambda case, qkv: made)
    monkeypatch.setattr(launch, "training_calls", lambda case, qkv: made)
    monkeypatch.setattr(launch, "build_own", lambda *modules: None)
    monkeypatch.setattr(launch, "packed_calls", lambda device, trained: made)
    monkeypatch.setattr(launch, "parts", lambda case, qkv: [("a part", lambda: 0.5)])
    monkeypatch.setattr(launch, "_batch", lambda context, call: 1000 * call())
    monkeypatch.setattr(launch, "launch_table", str)
    monkeypatch.setattr(launch.torch, "device", lambda kind, device=torch.device: device("cpu"))
    monkeypatch.setattr("sys.argv", ["launch", "--json", str(tmp_path / "launch.json")])
    assert launch.main() == 0
    said = "".join(2 * f"{x}, a peer: AssertionError: \n" for x in ("full_d64", "varlen_d128"))
    assert capsys.readouterr().err == said
    found = json.loads((tmp_path / "launch.json").read_text())
    each = {"flashgen": 1.0}
    assert found["calls"] == found["training"] == {"full_d64": each, "varlen_d128": each}
    assert found["parts"] == {"full_d64": {"a part": 0.5}}


def test_a_training_call_is_a_forward_and_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are timed without gradients, but for theirs."""
    grads = []

    def twice(x: torch.Tensor) -> torch.Tensor:
        out = 2 * x
        out.register_hook(grads.append)
        return out

    def calls(case: launch.Case, qkv: tuple[torch.Tensor, ...]) -> Iterator[tuple[object, ...]]:
        for name in ("flashgen", "FlashAttention-4"):
            yield name, nullcontext, lambda: sum(map(twice, qkv))

    monkeypatch.setattr(launch, "calls", calls)
    monkeypatch.setattr(launch, "CALLS", 4)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    case = launch.Case("full_d64", 64, None, {}, {})
    (one,) = launch.training_calls(case, tuple(torch.ones(3, 2)))
    assert one[0] == "flashgen" and launch._batch(*one[1:]) > 0
    assert len(grads) == 3 * (1 + 4)


def test_files_without_training_calls_have_a_table() -> None:
    rows = {"full_d64": {"flashgen": 1.0}}
    of = dict.fromkeys(("torch", "triton", "cudnn", "gpu", "date"), "any")
    document = {"environment": of, "calls": rows, "parts": rows}
    without, with_them = (launch.launch_table(document | more) for more in ({}, {"training": rows}))
    assert "training" not in without and "forward and a backward pass" in with_them


@pytest.mark.parametrize("name", ["units", "beside"])
def test_kernels_are_launched_as_those_of_modules(name: str) -> None:
    """Triton 3.9 warns where a launch does not say whether products and sums fuse."""
    source = (Path(launch.__file__).parent / f"{name}.py").read_text()
    launches = re.findall(r"^ +_\w+\[programs,\]\((.*)\)$", source, re.MULTILINE)
    assert len(launches) == 1 and launches[0].endswith("**FUSED")


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slows the CPU for a while slows all of them."""
    entered, called = [], []

    @contextmanager
    def context() -> Iterator[None]:
        entered.append(len(called))
        yield

    monkeypatch.setattr(launch, "CALLS", 2)
    monkeypatch.setattr(launch, "BATCHES", 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    named = [
        ("a", nullcontext, lambda: called.append("a")),
        ("b", context, lambda: called.append("b")),
    ]
    taken = launch.microseconds(named)
    assert called == 3 * [*"aaabbb"] and entered == [3, 9, 15]
    assert taken.keys() == {"a", "b"} and all(us > 0 for us in taken.values())


def test_cases_are_measured_in_both_orders(capsys: pytest.CaptureFixture[str]) -> None:
    measured = []

    def measure(
        case: int, row: dict[str, Any], device: torch.device, *, with_fa4: bool, reverse: bool
    ) -> None:
        measured.append((case, device.type, with_fa4, reverse))
        row["ms"].setdefault("a", []).append(len(measured))

    rows = in_both_orders(
        (5, 7), lambda case: {"name": f"<{case}>", "ms": {}}, measure, title="name", with_fa4=True
    )
    assert rows == [{"name": "<5>", "ms": {"a": [1, 3]}}, {"name": "<7>", "ms": {"a": [2, 4]}}]
    orders = [(case, reverse) for reverse in (False, True) for case in (5, 7)]
    assert measured == [(case, "cuda", True, reverse) for case, reverse in orders]
    assert capsys.readouterr().out.splitlines()[-1] == "<7> {'a': 4}"


def test_calls_of_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences; a step is both passes."""
    noted = []

    def ways(packing: Any, device: torch.device, with_fa4: bool) -> Any:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
            noted.append((packing.q_lens, tuple(q.shape)))
            return (q * k * v,)

        return [("flashgen", call)]

    monkeypatch.setattr(launch, "ways", ways)
    for trained in (False, True):
        ((name, context, call),) = launch.packed_calls(torch.device("cpu"), trained=trained)
        with context():
            call()
        assert name == "flashgen" and noted.pop() == ((50, 78), (128, 16, 128)) and not noted

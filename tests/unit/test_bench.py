"""`flashgen bench` with its peers on the CPU; the gpu test runs it for good."""

import json
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import triton

from flashgen import Int, bench_linear, causal, full, sliding_window
from flashgen import bench as benching
from flashgen.bench import OWN, Timing, bench, torch_mask_mod
from flashgen.build import Options, Progress, build
from flashgen.cli import main
from flashgen.console import bench_table, make_console
from flashgen.errors import FlashgenError
from flashgen.plan import lower
from flashgen.reference import visibility
from flashgen.spec import AttentionSpec
from flashgen.tuning.device import Gpu

SPEC = """\
from flashgen import *

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
spec = AttentionSpec(head_dim=16, dtype="float32", mask={mask}, targets=("sm_90",))
"""
LENGTH = 96


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of specs, and a machine that takes itself for one with an H200."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()

    def cpu_inputs(plan, length):
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn((1, 2, length, 16), generator=generator) for _ in "qkv")

    def once(call, **effort):
        assert call().shape == (1, 2, LENGTH, 16)
        return 2.0

    monkeypatch.setattr(benching, "detect_gpu", lambda: Gpu("NVIDIA H200", "sm_90"))
    monkeypatch.setattr(benching, "random_inputs", cpu_inputs)
    monkeypatch.setattr(benching, "LENGTHS", (LENGTH,))
    monkeypatch.setattr(triton.testing, "do_bench", once)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return tmp_path


def make(project, mask):
    (project / "specs" / "tiny.py").write_text(SPEC.format(mask=mask))
    list(build([project / "specs"], Options(tune=False), Progress()))


def timings(project):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CPU tensors run the reference; eager FlexAttention warns
        return bench("tiny", project / "specs", project / "generated")


@pytest.mark.parametrize(
    "mask, visible",
    [
        ("full()", LENGTH**2),
        ("causal()", LENGTH * (LENGTH + 1) // 2),
        ("sliding_window(Int('left', default=3), 0)", 4 * LENGTH - 6),
        ("lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx >= h)", None),
        ("block_sparse([[1, 0], [1, 1]], 48)", 3 * 48**2),
    ],
)
def test_every_peer_that_can_is_timed(project, mask, visible):
    make(project, mask)
    own, *peers = timings(project)
    assert (own.kernel, own.length, own.ms, own.ratio) == (OWN, LENGTH, 2.0, 1.0)
    if visible is not None:
        assert own.tflops == pytest.approx(4 * 16 * 2 * visible / 2e-3 / 1e12)
    by_name = {timing.kernel: timing for timing in peers}
    assert list(by_name) == [
        "FlexAttention", "SDPA flash", "SDPA cudnn", "SDPA efficient", "SDPA math",
    ]  # fmt: skip
    assert by_name["SDPA cudnn"].problem.startswith("RuntimeError: ")
    for able in ("FlexAttention", "SDPA math"):
        assert by_name[able].problem == ""
        assert by_name[able].ratio == pytest.approx(1.0)


SPECS = {
    "states": "normaliser=linear(elu_plus_one())",
    "decays": "normaliser=linear(identity(), decay=DECAY, normalise=False)",
    "pairs": "normaliser=linear(favor(32), algorithm='quadratic')",
    "linformer": "linformer=24",
}


@pytest.fixture
def with_fla(monkeypatch):
    """A package that has fla's functions, which note what they are given."""
    given = []

    def function(name):
        def call(q, k, v, *gates, **options):
            given.append((name, q, gates, options))
            return v, None

        return call

    for module, name in (("linear_attn", "chunk_linear_attn"), ("simple_gla", "chunk_simple_gla")):
        path = f"fla.ops.{module}"
        monkeypatch.setitem(sys.modules, path, SimpleNamespace(**{name: function(name)}))
    for path in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, path, SimpleNamespace(__path__=[]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "fla")
    return given


@pytest.mark.parametrize("name", SPECS)
def test_linear_attention_is_beside_softmax_and_fla(project, monkeypatch, with_fla, name):
    """What forgets decays, matrices or maps of fla fails; other work gives other figures."""
    mask = "full()" if name == "linformer" else "causal()"
    make(project, f"{mask}, {SPECS[name]}")
    times, shapes = iter([4.0, 2.0, 1.0, 8.0] if name != "pairs" else [2.0, 8.0]), []

    def once(call, **effort):
        shapes.append(tuple(call().shape))
        return next(times, 8.0)

    monkeypatch.setattr(triton.testing, "do_bench", once)
    monkeypatch.setattr(bench_linear, "COPIED", 4096)
    monkeypatch.setattr(benching, "captured", lambda call: call)
    own, *peers = timings(project)
    by_name = {timing.kernel: timing for timing in peers}
    assert {x for x in by_name if x != "fla"} == {
        "FlexAttention, softmax", "SDPA flash, softmax", "SDPA cudnn, softmax",
        "SDPA efficient, softmax", "SDPA math, softmax",
    }  # fmt: skip
    last = by_name["SDPA math, softmax"]
    assert last.ms == 8.0 and last.ratio == 4.0 and last.problem == ""
    if name == "pairs":  # of 32 features and 16 columns of v
        pairs = LENGTH * (LENGTH + 1) // 2
        assert own.tflops == pytest.approx(2 * 48 * 2 * pairs / 2e-3 / 1e12)
        assert last.tflops == pytest.approx(2 * 32 * 2 * pairs / 8e-3 / 1e12)
        assert own.share is last.share is None
    else:  # a copy of 4096 elements of 2 bytes takes 4 ms, q, k, v and the output are float32
        assert own.share == pytest.approx(4 * 4 * 2 * LENGTH * 16 / 2.0 / (2 * 2 * 4096 / 4.0))
        assert last.share == pytest.approx(own.share / 4) and own.tflops is last.tflops is None
        assert shapes[:2] == [(4096,), (1, 2, LENGTH, 16)]
    if name not in ("states", "decays"):
        assert "fla" not in by_name
        return
    assert (by_name["fla"].ms, by_name["fla"].ratio) == (1.0, 0.5)
    [(function, q, gates, options)] = with_fla
    assert q.shape == (1, LENGTH, 2, 16) and q.is_contiguous() and options["scale"] == 0.25
    if name == "states":
        assert function == "chunk_linear_attn" and options["normalize"] and q.min() > 0.0
    else:
        assert function == "chunk_simple_gla" and gates[0].shape == (1, LENGTH, 2)
        assert -1.0 < gates[0].min() < gates[0].max() < 0.0 and q.min() < 0.0


def test_peers_of_a_variant_with_dropout(project):
    """SDPA drops as many weights, FlexAttention none."""
    make(project, "causal(), dropout=True")
    by_name = {timing.kernel: timing for timing in timings(project)}
    assert by_name["FlexAttention"].problem == "FlashgenError: it has no dropout"
    assert by_name["SDPA math"].problem == ""


FAR = causal(align="bottom_right") & ~sliding_window(Int("left"), 0, align="bottom_right")


@pytest.mark.parametrize("mask", [causal(), FAR], ids=str)
def test_the_mask_mod_shows_what_the_mask_shows(mask):
    plan = lower(AttentionSpec(head_dim=16, mask=mask), "tiny")
    params = {param.name: 5 for param in plan.params}
    mask_mod = torch_mask_mod(plan, {**params, "q_len": LENGTH, "kv_len": LENGTH})
    index = torch.arange(LENGTH)
    shown = mask_mod(0, 0, index[:, None], index[None, :])
    assert torch.equal(shown, visibility(mask, 1, 1, LENGTH, LENGTH, params=params))


def test_a_module_that_is_not_up_to_date_is_not_measured(project):
    make(project, "causal()")
    (project / "specs" / "tiny.py").write_text(SPEC.format(mask=full()))
    with pytest.raises(FlashgenError) as caught:
        timings(project)
    assert str(caught.value) == (
        f"{project}/generated/tiny.py: not up to date; build {project}/specs/tiny.py first"
    )


def test_a_gpu_of_another_target(project, monkeypatch):
    make(project, "causal()")
    monkeypatch.setattr(benching, "detect_gpu", lambda: Gpu("NVIDIA A100", "sm_80"))
    with pytest.raises(FlashgenError) as caught:
        timings(project)
    assert str(caught.value) == (
        "tiny: targets=('sm_90',): this machine's GPU, NVIDIA A100, is sm_80; run bench on a sm_90"
    )


TIMINGS = [
    Timing(2048, OWN, 0.5, 400.0, 1.0),
    Timing(2048, "FlexAttention", 1.0, 200.0, 2.0),
    Timing(2048, "SDPA cudnn", problem="RuntimeError: no kernel"),
]


def test_the_table(capsys):
    make_console().print(bench_table(TIMINGS))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["length", "kernel", "ms", "TFLOP/s", "flashgen", "is"]
    assert rows[2:] == [
        ["2048", "flashgen", "0.500", "400", "1.00", "x"],
        ["2048", "FlexAttention", "1.000", "200", "2.00", "x"],
        ["2048", "SDPA", "cudnn", "-", "-", "RuntimeError:", "no", "kernel"],
    ]


def test_the_table_of_linear_attention(capsys):
    shares = [Timing(2048, OWN, 0.5, None, 1.0, share=0.62), TIMINGS[2]]
    make_console().print(bench_table(shares))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["length", "kernel", "ms", "of", "a", "copy", "flashgen", "is"]
    assert rows[2:] == [
        ["2048", "flashgen", "0.500", "62%", "1.00", "x"],
        ["2048", "SDPA", "cudnn", "-", "-", "RuntimeError:", "no", "kernel"],
    ]


@pytest.mark.parametrize("place", ["bench.json", "-"])
def test_the_json(tmp_path, monkeypatch, capsys, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flashgen.bench.bench", lambda *_: TIMINGS)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "tiny", "--json", place])
    assert not stop.value.code
    shown = capsys.readouterr().out
    if place != "-":
        assert "TFLOP/s" in shown
        shown = (tmp_path / place).read_text()
    assert [path.name for path in tmp_path.iterdir()] == ([] if place == "-" else [place])
    first, _, last = json.loads(shown)
    assert first == {
        "length": 2048, "kernel": "flashgen", "ms": 0.5, "tflops": 400.0, "ratio": 1.0,
        "problem": "", "share": None,
    }  # fmt: skip
    assert last["ms"] is None and last["problem"] == "RuntimeError: no kernel"

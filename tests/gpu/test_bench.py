"""`flashgen bench` on the GPU that is here."""

import json

import pytest

from flashgen.cli import main


def timed(tmp_path, monkeypatch, capsys, spec):
    """What bench writes of a spec at one length, by the names of kernels."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flashgen.bench.LENGTHS", (2048,))
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "tiny.py").write_text(
        f"from flashgen import *\n\nspec = AttentionSpec(64, {spec})\n"
    )
    for arguments in (["build", "specs", "--no-tune"], ["bench", "tiny", "--json", "tiny.json"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert not stop.value.code, capsys.readouterr().err
    written = json.loads((tmp_path / "tiny.json").read_text())
    return {timing["kernel"]: timing for timing in written}


@pytest.mark.gpu
def test_bench_times_the_module_and_its_peers(tmp_path, monkeypatch, capsys):
    timings = timed(tmp_path, monkeypatch, capsys, "mask=causal()")
    assert timings["flashgen"]["tflops"] > 10
    assert timings["FlexAttention"]["problem"] == ""
    assert timings["SDPA flash"]["problem"] == ""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spec", ["mask=causal(), normaliser=linear(elu_plus_one())", "linformer=256"]
)
def test_bench_of_linear_time(tmp_path, monkeypatch, capsys, spec):
    timings = timed(tmp_path, monkeypatch, capsys, spec)
    assert 0.05 < timings["flashgen"]["share"] < 1.1
    assert timings["SDPA flash, softmax"]["problem"] == ""

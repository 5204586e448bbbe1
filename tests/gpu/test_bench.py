"""`flashgen bench` on the GPU that is here."""

import json

import pytest

from flashgen.cli import main


@pytest.mark.gpu
def test_bench_times_the_module_and_its_peers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flashgen.bench.LENGTHS", (2048,))
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "tiny.py").write_text(
        "from flashgen import AttentionSpec, causal\n\nspec = AttentionSpec(64, mask=causal())\n"
    )
    for arguments in (["build", "specs", "--no-tune"], ["bench", "tiny", "--json", "tiny.json"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert not stop.value.code, capsys.readouterr().err
    timings = {
        timing["kernel"]: timing for timing in json.loads((tmp_path / "tiny.json").read_text())
    }
    assert timings["flashgen"]["tflops"] > 10
    assert timings["FlexAttention"]["problem"] == ""
    assert timings["SDPA flash"]["problem"] == ""

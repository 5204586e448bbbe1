"""A project with one small spec, and the command line run inside it."""

import pytest

from flashgen.cli import main

SPEC = """\
from flashgen import AttentionSpec, causal

spec = AttentionSpec(head_dim=64, mask=causal(), targets=("sm_90",))
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder, with a spec in it, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    for place in ("flashgen.build", "flashgen.stamp"):
        monkeypatch.setattr(f"{place}.detect_gpu", lambda: None)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "tiny.py").write_text(SPEC)
    return tmp_path


@pytest.fixture
def flashgen(project, capsys):
    """Runs a command in the project; returns its exit status and the lines it printed."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        answer = capsys.readouterr()
        return stop.value.code or 0, (answer.out + answer.err).splitlines()

    return run

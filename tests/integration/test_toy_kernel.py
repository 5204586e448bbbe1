"""A kernel that is defined here goes through all of flashgen, of which no line knows it."""

import os
import subprocess
import sys

import pytest

from flashgen.kernels import registry
from flashgen.place import Place
from flashgen.publish import read_seal
from flashgen.tuning.device import Gpu
from flashgen.tuning.store import Measurement, load_results
from support.toy import Toy

SPEC = """\
from flashgen import AttentionSpec, full

spec = AttentionSpec(head_dim=64, dtype="float16", mask=full(), targets=("sm_90",))
"""

# A call of one query, and what would notice that another kernel runs it.
CALL = """\
import torch
from generated import plain

def other(*given, **more):
    raise AssertionError("another kernel ran")

plain._launch = other
torch.manual_seed(0)
q, (k, v) = torch.randn(2, 4, 1, 64).half(), torch.randn(2, 2, 2, 70, 64).half()
out, lse = plain.attention(q, k, v, return_lse=True)
exact = plain.reference(q.double(), k.double(), v.double(), return_lse=True)
assert (out.double() - exact[0]).abs().max() < 1e-3, "output"
assert (lse.double() - exact[1]).abs().max() < 1e-3, "LSE"
"""


class StandIn:
    """Answers as a GPU would that takes 2 ms for any kernel, and less for smaller tiles of keys.

    Of the toy kernel it takes `toy` ms.
    """

    toy = 1.0

    def __init__(self, plan, target, *given):
        self.ms = self.toy if any(isinstance(x, Toy) for x in given) else 2.0

    def compile(self, configs):
        pass

    def check(self, config):
        pass

    def time(self, config, effort):
        ms = self.ms - 1e-3 / config.BLOCK_N
        return Measurement(config, (ms, ms), (100 / ms, 100 / ms))


@pytest.fixture
def toy(project, monkeypatch):
    """The project with one more kernel in the list, and a spec that it serves."""
    monkeypatch.setattr(registry, "KERNELS", (Toy(), *registry.KERNELS))
    (project / "specs" / "plain.py").write_text(SPEC)
    return project


def rows(lines, name="plain"):
    """The rows of the table, by kernel."""
    cells = [line.split() for line in lines if line.startswith(f"{name} ") and "sm_90" in line]
    return {row[2]: row[3:] for row in cells}


def test_a_build_chooses_and_publishes_it(flashgen, toy):
    status, lines = flashgen("build", "specs", "-v")
    assert status == 0
    # The budget turned one configuration down, and the model chose among the others.
    assert "plain: sm_90: toy: 2 candidates fit, 1 rejected" in lines
    [why] = [line for line in lines if line.startswith("  BLOCK_M=1 BLOCK_N=4096")]
    assert "needs 524,288 B of shared memory" in why
    assert rows(lines)["toy"][:3] == ["1", "x", "32"]
    assert list(rows(lines))[:3] == ["toy", "hopper", "portable"]
    # Of another spec it says why not.
    assert "tiny: sm_90: no toy kernel: it computes nothing but plain attention" in lines
    assert "toy" not in rows(lines, "tiny")

    module = toy / "generated" / "plain.py"
    text = module.read_text()
    assert "def _toy(" in text and "# Configurations of the toy kernel." in text
    assert len(read_seal(module).kernels["toy"]) == 64
    assert "toy" not in (toy / "generated" / "tiny.py").read_text()
    assert flashgen("check") == (0, ["every module in generated is what its spec renders to"])
    assert flashgen("build", "specs")[1] == ["up to date, nothing to do: plain, tiny"]


def test_it_runs_the_calls_that_it_says(flashgen, toy):
    flashgen("build", "specs")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(toy)}
    subprocess.run([sys.executable, "-c", CALL], env=env, check=True, cwd=toy)


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU."""
    monkeypatch.setattr("flashgen.build.detect_gpu", lambda: Gpu("NVIDIA H200", "sm_90"))
    for bench in ("ForwardBench", "BackwardBench"):
        monkeypatch.setattr(f"flashgen.tuning.measure.{bench}", StandIn)


def test_a_gpu_measures_it(flashgen, toy, machine):
    assert flashgen("build", "specs/plain.py")[0] == 0
    place = Place(toy / "generated", "plain")
    [result] = [result for result in load_results(place.tuning) if result.form == "toy"]
    assert [m.config.BLOCK_N for m in result.measured] == [16, 32]
    assert [config.BLOCK_N for config, _ in result.rejected] == [4096]
    lines = flashgen("build", "specs/plain.py", "--force", "--no-tune", "-v")[1]
    assert rows(lines)["toy"][2] == "16"
    assert "measured on NVIDIA H200: 100 TFLOP/s" in " ".join(rows(lines)["toy"])
    assert "runs where there are several queries" in " ".join(rows(lines)["portable"])
    assert flashgen("build", "specs/plain.py")[1] == ["up to date, nothing to do: plain"]
    assert "toy kernel" in "".join(flashgen("explain", "specs/plain.py", "--q-len=64")[1])


def test_it_is_left_out_where_what_it_replaces_is_faster(flashgen, toy, machine, monkeypatch):
    monkeypatch.setattr(StandIn, "toy", 3.0)
    lines = flashgen("build", "specs/plain.py", "-v")[1]
    assert "toy" not in rows(lines)
    told = "no toy kernel: on NVIDIA H200 it took 3 ms, the portable kernel 2"
    assert told in " ".join(rows(lines)["portable"])
    assert "_toy" not in (toy / "generated" / "plain.py").read_text()


def test_explain_accounts_for_it(flashgen, toy):
    status, lines = flashgen("explain", "specs/plain.py", "--q-len=64")
    assert status == 0
    text = "\n".join(lines)
    assert "Shared memory, toy kernel: BLOCK_M=1 BLOCK_N=32 num_warps=4 num_stages=1" in text
    assert "this toy kernel" in text and "waiting for DRAM" in text
    status, lines = flashgen("explain", "specs/tiny.py", "--q-len=64")
    assert status == 0 and "this toy kernel" not in "\n".join(lines)

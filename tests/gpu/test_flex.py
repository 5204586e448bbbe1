"""FlexAttention's call with one import changed, on the GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from flashgen.flex import prepare
from support import flex_oracle
from support.flex_cases import CASES, HEADS, KINDS, draw
from support.flex_compare import compare, qkv

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_the_gpu(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """What is made without a device is on the GPU, and float32 is multiplied exactly."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "flashgen"))
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("name", KINDS)
def test_by_kernels(name: str) -> None:
    case = CASES[name]()
    compare(case, *qkv(case.q_len, case.kv_len))


def test_prepared_in_a_graph_reads_what_tensors_hold_now() -> None:
    slopes = draw(HEADS)
    inputs = tuple(x.detach() for x in qkv())
    attend = prepare(*inputs, lambda score, b, h, q, kv: score + slopes[h] * (q - kv))
    attend(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*inputs)
    slopes.mul_(-2)
    graph.replay()
    right, _ = flex_oracle.attention(
        *inputs, lambda score, b, h, q, kv: score + slopes[h] * (q - kv)
    )
    torch.testing.assert_close(out, right.float(), rtol=1e-4, atol=1e-4)


COLD = """
import time, torch
torch.zeros(1, device="cuda")
start = time.perf_counter()
import flashgen
module = flashgen.compile(flashgen.AttentionSpec(head_dim=64, mask=flashgen.masks.causal()))
compiled = time.perf_counter() - start
q = torch.randn(1, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
module.attention(q, q, q)
torch.cuda.synchronize()
print(compiled, time.perf_counter() - start)
"""


def test_a_first_output_takes_seconds_and_a_module_of_the_cache_less_than_one(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in an installation: Python keeps what it compiled. The first run reads files for all.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", f"{tmp_path}/bytecode")
    times = []
    for caches in ("read", "own", "own"):
        monkeypatch.setenv("FLASHGEN_CACHE_DIR", f"{tmp_path}/{caches}/flashgen")
        monkeypatch.setenv("TRITON_CACHE_DIR", f"{tmp_path}/{caches}/triton")
        command = [sys.executable, "-c", COLD]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        times.append([float(word) for word in shown.split()])
    _, (_, cold), (warm, _) = times
    assert (warm < 1, cold < 10) == (True, True), times

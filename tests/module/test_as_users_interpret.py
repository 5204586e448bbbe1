"""Kernels in Triton's interpreter as it is, not as the sweep makes it quicker."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flashgen import AttentionSpec, Tensor, causal, elu_plus_one, identity, linear
from support.variants import rendered_module

SHAPE = ("batch", "num_kv_heads", "kv_len")
TOKENS = Tensor("decay", SHAPE)
FEATURES = Tensor("decay", (*SHAPE, 16))

SPECS = {
    "decays of features": linear(identity(), decay=FEATURES, normalise=False),
    "decays of features and sums": linear(elu_plus_one(), decay=FEATURES),
    "decays of keys": linear(elu_plus_one(), decay=TOKENS),
}

#: A call whose first sequence decays slowly, and the other one steeply.
CALL = """
import sys, torch
from support.variants import import_file

module = import_file(__import__("pathlib").Path(sys.argv[1]))
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(2, 1, 21, 16, generator=generator).requires_grad_() for _ in "qkv")
shape = (2, 1, 21) + (16,) * (sys.argv[2] == "features")
decay = -torch.rand(shape, generator=generator)
decay[1] *= 90.0
decay.requires_grad_()
ours, right = (
    torch.autograd.grad(call(q, k, v, decay=decay).square().sum(), (q, k, v, decay))
    for call in (module.attention, module.reference)
)
for name, x, y in zip(("q", "k", "v", "decay"), ours, right, strict=True):
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4, msg=lambda m: f"{name}: {m}")
"""


@pytest.mark.parametrize("name", SPECS)
def test_gradients_of_decays(name: str) -> None:
    """Triton's own comparison of two floats is a float for what follows, the quicker one is not."""
    module = rendered_module(AttentionSpec(16, "float32", mask=causal(), normaliser=SPECS[name]))
    kind = "features" if "features" in name else "keys"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CALL, str(module.__file__), kind],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]

"""Imports the module of examples/specs/capped_window.py and checks it against its reference.

    flashgen build examples/specs/capped_window.py --out examples/built
    python examples/quickstart.py

With a GPU the kernel runs there. Without one, Triton's interpreter runs it on the CPU.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before the module is

from built import capped_window

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q = torch.randn(1, 4, 200, 64, dtype=torch.bfloat16, device=device)
k = torch.randn(1, 2, 200, 64, dtype=torch.bfloat16, device=device)  # a KV head for 2 query heads
v = torch.randn(1, 2, 200, 64, dtype=torch.bfloat16, device=device)
parameters = {"sinks": torch.randn(4, device=device), "window": 100, "cap": 20.0}

out = capped_window.attention(q, k, v, **parameters)

# The yardstick is what rounding to bfloat16 costs the eager reference, both against float64.
exact = capped_window.reference(q.double(), k.double(), v.double(), **parameters)
eager = capped_window.reference(q, k, v, **parameters)
error = (out - exact).abs().max().item()
eager_error = (eager - exact).abs().max().item()
print(f"largest error against float64: {error:.5f} (eager torch: {eager_error:.5f})")
if not error <= 2 * eager_error:
    sys.exit("the kernel is further off than bfloat16 accounts for")
print(f"capped_window is right on this {'GPU' if device == 'cuda' else 'CPU, interpreted'}")

"""Imports a generated module and checks its kernel against its reference.

    flashgen build specs/causal_d128.py && python examples/quickstart.py

With a GPU the kernel runs there. Without one, Triton's interpreter runs it on the CPU.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before the module is

from generated import causal_d128

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q = torch.randn(1, 4, 200, 128, dtype=torch.bfloat16, device=device)
k = torch.randn(1, 2, 200, 128, dtype=torch.bfloat16, device=device)  # 2 query heads for each
v = torch.randn(1, 2, 200, 128, dtype=torch.bfloat16, device=device)

out = causal_d128.attention(q, k, v)

# The yardstick is what rounding to bfloat16 costs torch's own attention, both against float64.
exact = causal_d128.reference(q.double(), k.double(), v.double())
torch_out = torch.nn.functional.scaled_dot_product_attention(
    q, k, v, is_causal=True, enable_gqa=True
)
error = (out - exact).abs().max().item()
torch_error = (torch_out - exact).abs().max().item()
print(f"largest error against float64: {error:.5f} (torch's own attention: {torch_error:.5f})")
if not error <= 2 * torch_error:
    sys.exit("the kernel is further off than bfloat16 accounts for")
print(f"causal_d128 is right on this {'GPU' if device == 'cuda' else 'CPU, interpreted'}")

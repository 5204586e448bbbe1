"""Backward TFLOP/s of flashgen's modules beside FlexAttention and torch's SDPA, on one GPU.

    python -m benchmarks.backward --json benchmarks/results/backward-h200.json

The cells of the forward benchmark's grid, and variants at head dimension 128: a window, packed
documents, capped scores, and ALiBi with slopes that learn. The forward pass runs once, outside of
the time; what is timed is torch.autograd.grad of the output by q, k, v, and slopes, again and
again. TFLOP/s are of 2.5 times the forward pass's FLOPs. Every peer's gradients are compared with
those in float64, of two heads of the tensors that are timed. Everything else is as in
benchmarks.forward.
"""

from __future__ import annotations

import sys

from benchmarks.cells import BACKWARD
from benchmarks.command import run
from benchmarks.passes import BACKWARD_PASS
from benchmarks.table import backward_table

if __name__ == "__main__":
    sys.exit(run("backward", BACKWARD, __doc__, backward_table, BACKWARD_PASS, repeat=1))

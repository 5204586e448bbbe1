"""Masks and score functions of the vocabulary beside FlexAttention, on one GPU.

    python -m benchmarks.variants --json benchmarks/results/variants-h200.json

Head dimension 128, 16 heads, one sequence of 16384 tokens, bfloat16; TFLOP/s count the visible
elements. The time includes everything that a call of flashgen's module does. It
excludes making FlexAttention's BlockMask, whose time and peak memory are reported
beside it, and so is the device memory that a call of the module takes beyond its output and its
log-sum-exp. Everything else is as in benchmarks.forward.
"""

from __future__ import annotations

import sys

from benchmarks.cells import VARIANTS
from benchmarks.command import run
from benchmarks.table import variants_table

if __name__ == "__main__":
    sys.exit(run("variants", VARIANTS, __doc__, variants_table))

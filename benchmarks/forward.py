"""Forward TFLOP/s of flashgen's modules beside FlexAttention and torch's SDPA, on one GPU.

    python -m benchmarks.forward --json benchmarks/results/forward-h200.json

Every peer runs on the same tensors, one after another within a cell. The whole table is measured
`--repeat` times, every second time in the reverse order. There are two timings: the median of
triton.testing.do_bench, which clears the L2 cache before each call, and the mean of calls back to
back after a load of the same. Clocks are left alone. Every peer's output is compared with attention
in float64 on two heads.
"""

from __future__ import annotations

import sys

from benchmarks.cells import AS_CAPTURED, FORWARD
from benchmarks.command import run
from benchmarks.table import full_table

if __name__ == "__main__":
    sys.exit(run("forward", (*FORWARD, AS_CAPTURED), __doc__, full_table))

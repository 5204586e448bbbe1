"""What flashgen's kernels are measured with, and what was measured."""

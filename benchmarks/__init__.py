"""Benchmarks of flashgen's kernels, and their results."""

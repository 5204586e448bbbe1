"""Adapters: what other libraries call attention by, on flashgen's kernels."""

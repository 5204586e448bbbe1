"""The portable backward kernels, in Triton: one over tiles of keys, one over tiles of queries."""

"""The portable forward kernel, in Triton."""

"""The kernel for a cache of keys and values, in Triton."""

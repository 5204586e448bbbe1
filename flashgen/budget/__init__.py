"""The cost of a kernel: shared memory, traffic and time, from sympy expressions, without a GPU."""

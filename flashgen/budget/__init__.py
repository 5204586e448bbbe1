"""What a kernel costs: shared memory, traffic and time, from sympy expressions, without a GPU."""

"""What Triton's compiler and ptxas say of kernels, without a GPU: budgets are held to it."""

"""The backward pass for Hopper as two kernels, in Gluon: wide heads, or sums in a fixed order."""

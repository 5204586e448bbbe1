"""The backward pass for Hopper divided in two, in Gluon: wide heads, or sums in a fixed order."""

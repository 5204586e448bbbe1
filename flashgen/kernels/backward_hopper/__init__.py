"""The backward kernel for Hopper, in Gluon: all three gradients in one pass."""

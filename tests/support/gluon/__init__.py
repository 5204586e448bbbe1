"""Gluon on the CPU: kernels for Hopper run as they stand, with numbers, roles as coroutines.

Values are torch tensors, layouts mean nothing. What the hardware does by itself (copies by TMA,
products) happens at once or as late as a kernel may rely on, whichever a seed says; memory that is
being written to holds no numbers, nor does what nobody has written. So a kernel that reads too
early, or gives a buffer away too early, computes NaN, and one that waits for what never comes says
so at once.
"""

from support.gluon.modules import interpreted, start_over

__all__ = ["interpreted", "start_over"]

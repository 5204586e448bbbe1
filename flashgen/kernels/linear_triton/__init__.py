"""The kernels of linear attention, for every target."""

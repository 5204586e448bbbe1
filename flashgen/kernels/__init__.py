"""The attention kernels, a folder each: what a kernel needs, costs and can be configured as."""

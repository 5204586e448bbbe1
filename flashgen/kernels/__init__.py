"""The attention kernels, one folder each: a kernel's needs, costs and configurations."""

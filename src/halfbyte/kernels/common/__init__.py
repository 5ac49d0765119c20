"""What kernels of several operations share: layouts, unpacking, numerics, what differs between versions of Triton."""

"""A machine that runs what Triton compiled for a GPU, on the CPU and in NumPy: the tuned kernels without a GPU.

    program.py     PTX, as text, becomes a list of instructions
    arithmetic.py  what a thread does by itself
    warps.py       what the 32 threads of a warp do together: shuffles, matrices, products of the tensor cores
    memory.py      memory of the GPU and of a block; copies between them that are there as late as is allowed
    block.py       the threads of a block: which go on, and which wait
    launch.py      a launch of a kernel as Triton would make it, with tensors on the CPU
    inline.py      device functions called as Python, whose inline PTX a block runs

It knows what these kernels use of PTX ISA 8.7, and raises for all else. Rounding is that of the GPU but for approximate functions,
and for sums of the tensor cores, which are exact here until they become fp32.
"""

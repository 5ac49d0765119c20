"""The tuned decode kernels: queries rotated as cached keys are (reference/hadamard.py), in registers, once a work item.

A block of 2^n dims takes n steps (the fast Walsh-Hadamard transform). Step k replaces the numbers a and b of dims that differ in
bit k alone by a + b and a - b, in fp32. Where those two lie follows from the layout that queries are loaded in: in two operands
or two registers of a thread, or in two of its lanes, which exchange them by a shuffle. No step waits for another warp.
"""

# ruff: noqa: RUF005, SIM108
# Triton compiles a part of Python: tuples are joined with `+`, and a branch on a constant is an `if` with an `else`.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.layouts import step_of_bit


@gluon.constexpr_function
def _shuffle(lanes):
    return f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"


@gluon.constexpr_function
def _bits(n):
    return n.bit_length() - 1


@gluon.jit
def _across_lanes(x, STEP: gl.constexpr, LANES: gl.constexpr):
    """A step over numbers at a distance of STEP along axis 1 of x [a, n, b], fp32, whose lanes differ by LANES."""
    other = gl.inline_asm_elementwise(_shuffle(LANES), "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)
    i = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))[None, :, None]
    return other + x * gl.where(i & STEP == 0, 1.0, -1.0)  # one fused instruction, and exact


@gluon.jit
def _within_thread(x, STEP: gl.constexpr):
    """The same over numbers that each thread has both of."""
    pairs = gl.reshape(x, [x.shape[0], x.shape[1] // (2 * STEP), 2, STEP, x.shape[2]])
    a, b = gl.split(gl.permute(pairs, [0, 1, 3, 4, 2]))
    made = gl.reshape(gl.permute(gl.join(a + b, a - b), [0, 1, 4, 2, 3]), x.shape)
    return gl.convert_layout(made, x.type.layout, assert_trivial=True)


@gluon.jit
def _operand_step(x, bit: gl.constexpr, S: gl.constexpr):
    """A step over dims of operands x that differ in a bit. Lanes divide the rows of an operand by bits 1 and 2 of their numbers."""
    step: gl.constexpr = step_of_bit(S, bit)
    made = ()
    for n in gl.static_range(gl.constexpr(S.sections * S.operands)):
        if step[0] > 0:
            if n & step[0] == 0:
                made = made + (x[n] + x[n + step[0]],)
            else:
                made = made + (x[n - step[0]] - x[n],)
        elif step[1] == 2 or step[1] == 4:
            made = made + (_across_lanes(x[n], step[1], step[1] // 2),)
        else:
            made = made + (_within_thread(x[n], step[1]),)
    return made


@gluon.jit
def rotate_operands(loaded, S: gl.constexpr, C: gl.constexpr):
    """Queries as `load_query` gives them, rotated, in fp32."""
    x = ()
    for n in gl.static_range(gl.constexpr(S.sections * S.operands)):
        x = x + (loaded[n].to(gl.float32) * C.rotate**-0.5,)
    for bit in gl.static_range(_bits(C.rotate)):
        x = _operand_step(x, bit, S)
    return x


@gluon.jit
def rotate_rows(x, S: gl.constexpr, C: gl.constexpr):
    """Rows x [rows, dims] in `query_layout`, rotated, in fp32. A thread has the dims of 8 words, its neighbours the next ones."""
    OF_THREAD: gl.constexpr = 8 * S.codes_per_word
    y = gl.reshape(x.to(gl.float32) * C.rotate**-0.5, [C.padded_rows, x.shape[1], 1])
    for bit in gl.static_range(_bits(C.rotate)):
        if 1 << bit < OF_THREAD:
            y = _within_thread(y, 1 << bit)
        else:
            y = _across_lanes(y, 1 << bit, (1 << bit) // OF_THREAD)
    return gl.convert_layout(gl.reshape(y, x.shape), x.type.layout, assert_trivial=True)

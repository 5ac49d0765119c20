"""The linear kernel for small M: K slices of warps, and how they wait for copies and for each other.

Only the warps of a K slice meet, once a step. Scales (and zero points) of all K slices lie next to each other in a row
of the weight, with groups of 128 less than a piece of 16 bytes for each: all warps of the block copy whole pieces of them, and of
each slot of the scales' ring two barriers (mbarrier) count

    filled: threads whose copies into it are there. Waited for ahead of the products; the copies count by themselves
    free:   K slices that have read what is in it. Waited for ahead of the next copies into it

A step's barriers are those of its slot. They change parity each round, so a step's number says which parity to wait for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.compat import barrier, view
from halfbyte.kernels.linear.operands import plain


@gluon.constexpr_function
def thread_layout(C):
    """[k_slices, warps_m, 32]: one element a thread."""
    return gl.BlockedLayout([1, 1, 1], [1, 1, 32], [C.k_slices, C.warps_m, 1], [2, 1, 0])


@gluon.jit
def k_slice_of(C: gl.constexpr):
    """The K slice of a thread."""
    layout: gl.constexpr = thread_layout(C)
    w = gl.arange(0, C.k_slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    return w + gl.full([C.k_slices, C.warps_m, 32], 0, gl.int32, layout)


@gluon.jit
def thread_of(C: gl.constexpr):
    """The number of a thread among those of its K slice."""
    layout: gl.constexpr = thread_layout(C)
    a = gl.arange(0, C.warps_m, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return a * 32 + lane + gl.full([C.k_slices, C.warps_m, 32], 0, gl.int32, layout)


@gluon.constexpr_function
def _check_asm(at):
    """Trap unless the 32 bits at $1 bytes from `at` are $2."""
    return (
        "{ .reg .b32 a; .reg .pred q; mov.u32 a, global_smem; add.u32 a, a, $1; "
        f"ld.shared.b32 $0, [a+{at}]; setp.ne.u32 q, $0, $2; @q trap; }}"
    )


@gluon.jit
def check_addresses(pool, S: gl.constexpr, C: gl.constexpr):
    """The copies suppose that the rings are the first thing in shared memory. Tried in the last slot, which is free at first."""
    shape: gl.constexpr = [C.k_slices, C.warps_m, 32]
    thread = k_slice_of(C) * (32 * C.warps_m) + thread_of(C)
    view(pool, gl.constexpr((C.stages - 1) * S.slot_bytes(C) // (128 * C.warps)), gl.int32, shape, plain(3)).store(thread)
    gl.inline_asm_elementwise(
        _check_asm((C.stages - 1) * S.slot_bytes(C)),
        "=&r,r,r,~{memory}",
        [thread * 4, thread],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    barrier()


@gluon.jit
def prefetch(pointers):
    """Bring what lies there into L2, without waiting for it."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l,~{memory}", [pointers.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def commit():
    """Copies issued since the last call form one group."""
    gl.inline_asm_elementwise("cp.async.commit_group; // $0", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _bits(C):
    """Of the number of a slot of scales, where they are a power of two; else 0."""
    return C.scale_slots.bit_length() - 1 if C.scale_slots & (C.scale_slots - 1) == 0 else 0


@gluon.jit
def after(turn, C: gl.constexpr):
    """A step's number modulo twice the slots of scales (or not modulo: with powers of two), that of the next step."""
    return turn + 1 if _bits(C) > 0 else gl.where(turn == 2 * C.scale_slots - 1, 0, turn + 1)


@gluon.jit
def slot_of(turn, C: gl.constexpr):
    """The slot of a step's scales."""
    return turn & (C.scale_slots - 1) if _bits(C) > 0 else gl.where(turn >= C.scale_slots, turn - C.scale_slots, turn)


@gluon.jit
def _parity_of(turn, C: gl.constexpr):
    """Of the round in which that slot is used."""
    return turn >> _bits(C) & 1 if _bits(C) > 0 else (turn >= C.scale_slots).to(gl.int32)


@gluon.constexpr_function
def _meet_asm(groups, C):
    if C.warps_m == 1:
        meet = "bar.warp.sync 0xffffffff;"
    else:
        threads = 32 * C.warps_m
        meet = f"mov.u32 b, %tid.x; shr.u32 b, b, {threads.bit_length() - 1}; add.u32 b, b, 1; bar.sync b, {threads};"
    free = ""
    if C.has_empty_barrier:
        free = "mov.u32 b, global_smem; add.u32 b, b, $2; setp.eq.u32 q, $1, 0; "
        free += f"@q mbarrier.arrive.shared.b64 t, [b+{C.barriers_at + 8 * C.scale_slots}];"
    return f"{{ .reg .b32 b; .reg .b64 t; .reg .pred q; cp.async.wait_group {groups}; {meet} {free} }} // $0 $1 $2"


@gluon.jit
def meet(turn, groups: gl.constexpr, C: gl.constexpr):
    """Wait until at most `groups` groups of this thread's copies are under way, and for all threads of the K slice to come here.

    If need be it signals the other K slices that this one has read the scales of all earlier steps.
    """
    gl.inline_asm_elementwise(
        _meet_asm(groups, C),
        "=r,r,r,~{memory}",
        [thread_of(C), slot_of(turn, C) * 8],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _init_asm(C):
    """One thread makes them all, at addresses that are known: of lanes with an address each the assembler makes a slow loop."""
    lines = ["{ .reg .b32 b; .reg .pred q; mov.u32 b, global_smem; setp.eq.u32 q, $1, 0;"]
    for slot in range(C.scale_slots * (2 if C.has_empty_barrier else 1)):
        count = 32 * C.warps if slot < C.scale_slots else C.k_slices
        lines.append(f"@q mbarrier.init.shared.b64 [b+{C.barriers_at + 8 * slot}], {count};")
    return " ".join(lines) + " } // $0"


@gluon.jit
def make_barriers(C: gl.constexpr):
    """A slot of scales is filled when all threads' copies are there, and free when all K slices have read what was in it.

    The block has to meet behind it, ahead of the first use.
    """
    thread = k_slice_of(C) * (32 * C.warps_m) + thread_of(C)
    gl.inline_asm_elementwise(_init_asm(C), "=r,r,~{memory}", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _await_asm(at):
    start = "{ .reg .b32 b; .reg .pred q; mov.u32 b, global_smem; add.u32 b, b, $1;"
    return f"{start} again: mbarrier.test_wait.parity.shared.b64 q, [b+{at}], $2; @!q bra again; }} // $0"


@gluon.jit
def _await(slot, parity, at: gl.constexpr):
    gl.inline_asm_elementwise(_await_asm(at), "=r,r,r,~{memory}", [slot * 8, parity], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_scales(turn, C: gl.constexpr):
    """Wait for the scales of a step, of which all warps copied a part."""
    _await(slot_of(turn, C), _parity_of(turn, C), C.barriers_at)


@gluon.jit
def await_free(turn, C: gl.constexpr):
    """Wait until all K slices have read what is in the slot of a step's scales: those of `scale_slots` steps before.

    That they say when they meet in the step behind that one. Of a barrier in its first round the round before counts as ended.
    """
    turn = after(turn, C)
    _await(slot_of(turn, C), _parity_of(turn, C) ^ 1, C.barriers_at + 8 * C.scale_slots)


@gluon.constexpr_function
def _filled_asm(at):
    return f"{{ .reg .b32 b; mov.u32 b, global_smem; add.u32 b, b, $1; cp.async.mbarrier.arrive.noinc.shared.b64 [b+{at}]; }} // $0"


@gluon.jit
def filled(slot, C: gl.constexpr):
    """This thread's part of a slot of scales counts when all copies that it has issued have arrived."""
    gl.inline_asm_elementwise(_filled_asm(C.barriers_at), "=r,r,~{memory}", [slot * 8], dtype=gl.int32, is_pure=False, pack=1)

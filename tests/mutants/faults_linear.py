"""Faults of the tuned linear kernel's device functions, which run on the CPU (tests/machine/inline.py)."""

from __future__ import annotations

from edits import InText, Rewrite
from mutant import Mutant, tests_of

PLAN, SPEC = "plans/gemm_mma.py", "plans/gemm_spec.py"
PARTIALS, SYNC = "kernels/linear/partials.py", "kernels/linear/sync.py"
COPIES = "kernels/linear/async_copy.py"
UNPACK = "kernels/linear/unpack.py"
LARGE = "kernels/linear/wgmma_large.py"

streams = tests_of("test_linear_streams.py")
copies = tests_of("test_linear_copies.py")
codes = tests_of("test_linear_codes.py")
emulated = tests_of("emulated/test_tuned_linear.py")

LINEAR = [
    # -- streams of warps that wait for each other's copies
    Mutant(
        "one slot of scales too few to need no word of what is read",
        SPEC,
        "MmaSpec.has_empty_barrier",
        Rewrite("_s < 2 * _n", "_s < 2 * _n - 1"),
        streams("test_scales_are_there_and_nobody_waits_for_ever[3-5-1000]"),
    ),
    Mutant(
        "a slot of scales called free a step too early",
        SYNC,
        "await_free",
        Rewrite("after(_t, _c)", "_t"),
        streams("test_scales_are_there_and_nobody_waits_for_ever[2-2-1000]"),
    ),
    Mutant(
        "fewer slots of scales than stages",
        PLAN,
        "_scale_slots",
        Rewrite("range(_m, _s - 1, -1)", "range(_m, _s - 2, -1)"),
        streams("test_plans_keep_scales_of_so_many_steps"),
    ),
    # -- parts of a tile that its owner waits for
    Mutant(
        "an owner leaves behind what it has read",
        PARTIALS,
        "_add_published",
        Rewrite("gl.store(at, 0, mask=there)", "gl.store(at, 1, mask=there)"),
        emulated("test_owners_of_split_tiles_leave_zeros_behind"),
    ),
    Mutant(
        "an owner does without the last part of its tile",
        PARTIALS,
        "_add_published",
        Rewrite("range(first, last + 1)", "range(first, last)"),
        emulated("test_owners_of_split_tiles_leave_zeros_behind"),
    ),
    # -- copies into shared memory, and the barriers of the loop
    Mutant(
        "codes come unswizzled",
        COPIES,
        "copy_codes",
        Rewrite("_c ^ _r", "_c"),
        copies("test_a_step_comes_to_where_it_is_read[int4_sym_g128-1-28672]"),
    ),
    Mutant(
        "codes advanced by half a step",
        COPIES,
        "fetch_codes",
        Rewrite("_c += _w * 2", "_c += _w"),
        copies("test_a_step_comes_to_where_it_is_read[int8_col-3-28672]"),
    ),
    Mutant(
        "codes beyond K",
        COPIES,
        "copy_codes",
        Rewrite("gl.where(_k < _l, _r, 0)", "gl.where(_k < _l, _r, _r)"),
        copies("test_a_step_comes_to_where_it_is_read[nf4-16-4096]"),
    ),
    Mutant(
        "a row too many",
        COPIES,
        "_copy_asm",
        InText("setp.gt.s32 q, $4", "setp.ge.s32 q, $4"),
        copies("test_a_step_comes_to_where_it_is_read[int4_g128-3-28672]"),
    ),
    Mutant(
        "x of another k",
        COPIES,
        "_x_piece",
        Rewrite("_w + _p * 32 + _t % 4 * 8", "_w + _p * 16 + _t % 4 * 8"),
        copies("test_a_step_comes_to_where_it_is_read[int4_g32-1-28672]"),
    ),
    Mutant(
        "x beyond K",
        COPIES,
        "fetch_x",
        Rewrite("(_l - _k) * 2", "(_l - _k) * 4"),
        copies("test_a_step_comes_to_where_it_is_read[nf4-8-28672]"),
    ),
    Mutant(
        "scales beyond K",
        COPIES,
        "_fetch_scales",
        Rewrite("left - _t % _p * _g", "left"),
        copies("test_a_step_comes_to_where_it_is_read[int4_g32-8-28672]"),
    ),
    Mutant(
        "zero points do not advance",
        COPIES,
        "fetch_scales",
        Rewrite("_z += _c.columns(_s)", "pass"),
        copies("test_a_step_comes_to_where_it_is_read[int4_g128-16-28672]"),
    ),
    Mutant(
        "codes addressed in 32 bits",
        COPIES,
        "codes_at",
        Rewrite("_n.to(gl.int64) * _w", "_n * _w"),
        copies("test_weights_may_be_larger_than_32_bits_count[int4_sym_g128]"),
    ),
    Mutant(
        "streams meet at the block's barrier",
        SYNC,
        "_meet_asm",
        InText("bar.sync b", "bar.sync 0"),
        streams("test_a_stream_meets_behind_its_copies_and_apart_from_others[16]"),
    ),
    Mutant(
        "scales of one warp are enough",
        SYNC,
        "_init_asm",
        Rewrite("32 * _w if _s < _n else _c", "32 if _s < _n else _c"),
        streams("test_barriers_count_who_arrives[2-2-1]"),
    ),
    Mutant(
        "all threads call a slot free",
        SYNC,
        "_meet_asm",
        InText("setp.eq.u32 q, $1, 0", "setp.ge.s32 q, $1, 0"),
        streams("test_barriers_count_who_arrives[2-2-16]"),
    ),
    # -- large M: x of one warp, codes of the others
    Mutant(
        "x is called read while MMAs read it",
        LARGE,
        "_multiply",
        Rewrite("warpgroup_mma_wait(1, deps=_d)", "warpgroup_mma_wait(2, deps=_d)"),
        emulated("test_products_keep_their_promise[nvfp4-200x66x1056]"),
    ),
    Mutant(
        "x is read before it is there",
        LARGE,
        "_multiply",
        Rewrite("[_x * 8, _p]", "[_x * 8, _p ^ 1]"),
        emulated("test_products_keep_their_promise[nvfp4-192x128x256]"),
    ),
    Mutant(
        "the last part of a tile is left out",
        LARGE,
        "_exchange",
        Rewrite("range(first + 1, first + parts)", "range(first + 1, first + parts - 1)"),
        emulated("test_products_keep_their_promise[int4_sym_g128-192x128x4096]"),
    ),
    Mutant(
        "a lane takes the byte of another",
        "kernels/linear/wgmma_large_operands.py",
        "left_operand",
        Rewrite("_l * 0x1111", "_l * 0x1110"),
        emulated("test_products_keep_their_promise[int4_g128-300x200x640]"),
    ),
    # -- codes from stored words
    Mutant(
        "the bias added in bf16",
        UNPACK,
        "_exact_asm",
        Rewrite("0xC300 + _b", "0xC300 - _b"),
        codes("test_codes_less_their_bias[None-bf16]"),
    ),
    Mutant(
        "the bias added in fp16",
        UNPACK,
        "_exact_asm",
        Rewrite("0x8000 + _b", "0x0000 + _b"),
        codes("test_codes_less_their_bias[None-fp16]"),
    ),
]

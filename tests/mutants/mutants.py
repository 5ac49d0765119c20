"""Seeded faults, one each: (name, file below src/halfbyte, the text to replace, what with, the tests that must notice)."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault. `old` must occur in the file exactly once, so that a stale mutant is seen."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


ATTENTION, APPEND, QUANTIZE = "reference/attention.py", "reference/append.py", "reference/quantize.py"
COPIES, STREAMS, CODES = "kernels/linear/async_copy.py", "kernels/linear/sync.py", "kernels/linear/unpack.py"
OPS, RELAUNCH, FACTS = "ops/decode_attention.py", "ops/_relaunch.py", "ops/_facts.py"
RELAUNCH_LINEAR, PREFILL = "ops/_relaunch_linear.py", "ops/prefill_attention.py"


def attention(*names: str) -> tuple[str, ...]:
    return tuple(f"test_attention_reference.py::{name}" for name in names)


def caches(*names: str) -> tuple[str, ...]:
    return tuple(f"test_cache.py::{name}" for name in names)


def codecs(*names: str) -> tuple[str, ...]:
    return tuple(f"test_quantize.py::{name}" for name in names)


def tables(*names: str) -> tuple[str, ...]:
    return tuple(f"test_formats.py::{name}" for name in names)


def pages(*names: str) -> tuple[str, ...]:
    return tuple(f"test_paging.py::{name}" for name in names)


def files(*names: str) -> tuple[str, ...]:
    return tuple(f"test_checkpoints.py::{name}" for name in names)


def relaunched(*names: str) -> tuple[str, ...]:
    return tuple(f"test_relaunch.py::{name}" for name in names)


def products(*names: str) -> tuple[str, ...]:
    return tuple(f"test_relaunch_linear.py::{name}" for name in names)


def streams(*names: str) -> tuple[str, ...]:
    return tuple(f"test_linear_streams.py::{name}" for name in names)


def copies(*names: str) -> tuple[str, ...]:
    return tuple(f"test_linear_copies.py::{name}" for name in names)


def ops(*names: str) -> tuple[str, ...]:
    return tuple(f"test_ops.py::{name}" for name in names)


MUTANTS = [
    # -- attention
    Mutant(
        "no causal mask",
        ATTENTION,
        "(tokens <= queries) &",
        "(tokens <= queries + 10**6) &",
        attention("test_every_ratio_of_heads"),
    ),
    Mutant(
        "one key too many",
        ATTENTION,
        "(tokens <= queries) & (tokens < options",
        "(tokens <= queries) & (tokens <= options",
        ("test_bad_input.py::test_positions_outside_the_cache",),
    ),
    Mutant(
        "no guard for what sees nothing",
        ATTENTION,
        "total.masked_fill(total == -torch.inf, 0)",
        "total",
        attention("test_an_empty_sequence_gives_zero_and_minus_infinity"),
    ),
    Mutant(
        "ALiBi off by one",
        ATTENTION,
        "* (tokens - queries)",
        "* (tokens - queries + 1)",
        attention("test_alibi_of_any_number_of_heads"),
    ),
    Mutant(
        "ALiBi is zero", ATTENTION, "* (tokens - queries)", "* (tokens - tokens)", attention("test_alibi_of_any_number_of_heads")
    ),
    Mutant(
        "window off by one",
        ATTENTION,
        "tokens > queries - options.window",
        "tokens >= queries - options.window",
        attention("test_a_window_holds_the_query_and_those_before_it"),
    ),
    Mutant(
        "softcap without its factor",
        ATTENTION,
        "s = options.softcap * torch.tanh",
        "s = torch.tanh",
        attention("test_softcap_comes_before_alibi_and_after_the_scale"),
    ),
    Mutant(
        "query heads on the wrong KV head",
        ATTENTION,
        "k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)",
        "k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)",
        attention("test_every_ratio_of_heads"),
    ),
    Mutant(
        "padding is read",
        ATTENTION,
        "return torch.where(stored_tokens(column, lengths if limit is None else limit, oldest), values, 0.0)",
        "return values",
        attention("test_nothing_behind_a_length_is_seen"),
    ),
    Mutant(
        "the tail is not read",
        ATTENTION,
        "if buffer.tail is not None:",
        "if False:",
        caches("test_the_tail_is_the_input_in_sixteen_bits"),
    ),
    Mutant(
        "sinks twice",
        PREFILL,
        "replace(options, sinks=None, ends=past), impl",
        "replace(options, ends=past), impl",
        attention("test_prefill_is_decode_when_the_cache_is_exact[cpu-5-sinks]"),
    ),
    Mutant(
        "starts not shifted",
        PREFILL,
        "(options.starts - past).clamp_min(0)",
        "options.starts",
        attention("test_prefill_is_decode_when_the_cache_is_exact[cpu-5-starts]"),
    ),
    Mutant(
        "every block of queries at the first position",
        OPS,
        "query_start + i * QUERY_BLOCK",
        "query_start",
        attention("test_queries_by_blocks_are_queries_at_once"),
    ),
    Mutant(
        "parts merged without weights",
        "reference/merge.py",
        "torch.exp(part_lse.float() - finite)",
        "torch.exp(part_lse.float() * 0)",
        attention("test_prefill_is_decode_when_the_cache_is_exact[cpu-5-starts]"),
    ),
    Mutant(
        "sinks as a part of lse",
        "reference/merge.py",
        "return out.to(outs[0].dtype), lse",
        "return out.to(outs[0].dtype), lse if sinks is None else torch.logaddexp(lse, sinks.view(1, -1, 1).expand_as(lse))",
        attention("test_a_sink_is_applied_once_and_is_not_part_of_lse"),
    ),
    Mutant(
        "rotation not normalised",
        "reference/hadamard.py",
        "size**-0.5",
        "1.0",
        attention("test_rotation_is_its_own_inverse_and_keeps_products"),
    ),
    # -- formats and quantisers
    Mutant(
        "wrong group index",
        QUANTIZE,
        "scales.repeat_interleave(fmt.group_size(shape[-1]), dim=-1)",
        "scales.repeat((1,) * (scales.ndim - 1) + (fmt.group_size(shape[-1]),))",
        codecs("test_kv_formats_are_exact"),
    ),
    Mutant(
        "nibbles swapped",
        "packing.py",
        "torch.stack([packed & 15, packed >> 4], dim=-1)",
        "torch.stack([packed >> 4, packed & 15], dim=-1)",
        ("test_packing.py",),
    ),
    Mutant(
        "nibbles swapped both ways",
        "packing.py",
        "return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)",
        "return (codes[..., 1::2] & 15) | (codes[..., 0::2] << 4)",
        ("test_packing.py",),
    ),
    Mutant(
        "ties to the lower code", QUANTIZE, 'if code.ties == "even":', "if False:", tables("test_e2m1_ties_go_to_the_even_code")
    ),
    Mutant(
        "half up",
        QUANTIZE,
        "unit.round().clamp(code.lo",
        "(unit + 0.5).floor().clamp(code.lo",
        tables("test_integer_ties_go_to_even"),
    ),
    Mutant("truncated", QUANTIZE, "unit.round().clamp(code.lo", "unit.trunc().clamp(code.lo", codecs("test_kv_formats_are_exact")),
    Mutant(
        "zero point off by one",
        QUANTIZE,
        "zeros = (-low / scales.float()).round()",
        "zeros = (-low / scales.float()).round().add(1)",
        codecs("test_integer_weights_are_exact"),
    ),
    Mutant(
        "no floor of scales",
        QUANTIZE,
        "keepdim=keep) / reach).clamp_min(floor).to(stored)",
        "keepdim=keep) / reach).to(stored)",
        codecs("test_kv_formats_are_exact"),
    ),
    Mutant(
        "E8M0 subnormal flushed",
        QUANTIZE,
        "return value.masked_fill(stored == 255, torch.nan)",
        "return value.masked_fill(stored == 255, torch.nan).masked_fill(stored == 0, 0)",
        tables("test_every_e8m0_scale"),
    ),
    Mutant(
        "E8M0 NaN is finite",
        QUANTIZE,
        "return value.masked_fill(stored == 255, torch.nan)",
        "return value.nan_to_num(0, 0, 0)",
        tables("test_every_e8m0_scale", "test_every_mxfp4_scale_through_a_tensor"),
    ),
    Mutant(
        "MX exponent off by one",
        QUANTIZE,
        "(exponent - 2).clamp(0, 254)",
        "(exponent - 1).clamp(0, 254)",
        codecs("test_mxfp4_is_exact"),
    ),
    Mutant("NVFP4 blocks vanish", QUANTIZE, "wanted.clamp_min(2.0**-9)", "wanted", codecs("test_nvfp4_special_blocks")),
    Mutant(
        "double quantisation loses the mean", QUANTIZE, "flat * spread + mean", "flat * spread", codecs("test_double_quantisation")
    ),
    Mutant("NaN is quantised", QUANTIZE, '    check_finite(x, "x")\n', "", codecs("test_nan_and_infinity_raise")),
    Mutant(
        "a range beyond fp16 is stored",
        QUANTIZE,
        "    check_range(scales, offsets, fmt)\n    codes",
        "    codes",
        codecs("test_a_scale_or_offset_beyond_fp16_raises"),
    ),
    # -- caches
    Mutant(
        "counts ignored",
        "ops/append.py",
        "k.shape[2] if counts is None else counts)",
        "k.shape[2])",
        caches("test_select_and_repeat_copy"),
    ),
    Mutant(
        "counts not looked at",
        APPEND,
        " if counts is None else counts.to(lengths.dtype)",
        "",
        caches("test_counts_outside_the_tokens_given_change_nothing"),
    ),
    Mutant(
        "the past's length taken for the cache's",
        PREFILL,
        "q, cache, cache.lengths, past, replace(options, sinks=None, ends=past), impl",
        "q, cache, past, past, replace(options, sinks=None), impl",
        attention("test_prefill_after_any_past"),
    ),
    Mutant(
        "no capacity check",
        APPEND,
        "    check_capacity(lengths, new, capacity(keys, page_table))\n",
        "",
        caches("test_an_append_past_the_capacity_changes_nothing"),
    ),
    Mutant(
        "one token too many fits",
        APPEND,
        "int(total.max()) > limit",
        "int(total.max()) >= limit",
        caches("test_an_append_past_the_capacity_changes_nothing"),
    ),
    Mutant(
        "keys written before values are checked",
        APPEND,
        "        writes += prepare(buffer, x, fresh, lengths, page_table, name)\n",
        "        for write in prepare(buffer, x, fresh, lengths, page_table, name):\n            write()\n",
        caches("test_nan_and_infinity_change_nothing"),
    ),
    Mutant(
        "what lies beyond counts is looked at",
        APPEND,
        "x = x.masked_fill(~fresh[:, None, :, None], 0)",
        "x = x * 1",
        caches("test_counts_store_what_each_sequence_alone_would"),
    ),
    Mutant(
        "the scale of a tensor follows the data",
        APPEND,
        "torch.where(buffer.scales == 0, measured * (x.abs().amax() > 0), buffer.scales)",
        "measured",
        caches("test_the_per_tensor_scale_is_measured_once"),
    ),
    Mutant(
        "blocks quantised from unrounded keys",
        APPEND,
        "    x = x.to(buffer.tail.dtype)\n",
        "    x = x.float()\n",
        caches("test_any_cut_stores_the_same_bits"),
    ),
    Mutant(
        "the block is not brought back by crop",
        "cache.py",
        "        reopen_block(self.keys, self.lengths, left, self.page_table)\n",
        "",
        caches("test_crop_into_a_finished_block_brings_it_back"),
    ),
    Mutant(
        "writes to lengths by others are not noticed",
        "cache.py",
        "lengths is self.lengths and writes == lengths._version",
        "lengths is self.lengths",
        caches("test_what_the_host_is_sure_of"),
    ),
    Mutant(
        "copies of a cache believe what the first one knows",
        "cache.py",
        'if name != "_written"',
        "if name",
        caches("test_what_the_host_is_sure_of"),
    ),
    Mutant(
        "blocks of as many new tokens as there are rows",
        "plans/decode_attention.py",
        "min(p.queries, rows // p.group)",
        "min(p.queries, rows)",
        ("test_plans.py::test_prompts_are_cut_into_blocks_that_a_tuned_kernel_holds",),
    ),
    Mutant(
        "shared pages are written",
        "paging.py",
        "if count and used % self.page_size and self._holders[held[-1]] > 1:",
        "if False:",
        pages("test_shared_pages_are_copied_before_they_are_written"),
    ),
    Mutant(
        "a new page for a shared one, but empty",
        "paging.py",
        "            self._copy_page(shared, held[-1])\n",
        "",
        pages("test_shared_pages_are_copied_before_they_are_written"),
    ),
    Mutant(
        "pages taken by a refused append are lost",
        "paging.py",
        "            self._recount()\n            raise\n",
        "            raise\n",
        pages("test_a_pool_that_is_too_small_changes_nothing"),
    ),
    # -- ops
    Mutant(
        "an undeclared mutation", "ops/append.py", "Tensor(a!) k_codes", "Tensor k_codes", ops("test_opcheck_append[int8-int4_g32]")
    ),
    Mutant(
        "a fake of the wrong shape",
        OPS,
        "device=k_codes.device)\n    return q.new_empty(*q.shape[:3], value_buffer.dim)",
        "device=k_codes.device)\n    return q.new_empty(*q.shape[:3], v_codes.shape[-1])",
        ops("test_opcheck_decode_attention[cpu-int8-int4_g32]"),
    ),
    Mutant(
        "the bias of another shard",
        "ops/linear.py",
        "counts, list(biases), ",
        "counts, [*biases[:-1], None], ",
        ops("test_qkv_projection_is_three_products"),
    ),
    Mutant(
        "the parts of the first weight for all",
        "ops/linear.py",
        "parts[end - count : end]",
        "parts[:count]",
        ops("test_qkv_projection_is_three_products"),
    ),
    # -- streams of warps that wait for each other's copies
    Mutant(
        "one slot of scales too few to need no word of what is read",
        "plans/linear_spec.py",
        "self.scale_slots < 2 * self.stages",
        "self.scale_slots < 2 * self.stages - 1",
        streams("test_scales_are_there_and_nobody_waits_for_ever[3-5-1000]"),
    ),
    Mutant(
        "a slot of scales called free a step too early",
        STREAMS,
        "    turn = after(turn, C)\n",
        "",
        streams("test_scales_are_there_and_nobody_waits_for_ever[2-2-1000]"),
    ),
    Mutant(
        "fewer slots of scales than stages",
        "plans/linear.py",
        "range(most, stages - 1, -1)",
        "range(most, stages - 2, -1)",
        streams("test_plans_keep_scales_of_so_many_steps"),
    ),
    # -- the few-rows kernel's copies into shared memory, and the barriers of its loop
    Mutant(
        "codes come unswizzled",
        COPIES,
        "    column = (t % pieces) ^ (row // gl.constexpr(max(1, 8 // pieces)) % gl.constexpr(min(8, pieces)))\n",
        "    column = t % pieces\n",
        copies("test_a_step_comes_to_where_it_is_read[int4_sym_g128-1-28672]"),
    ),
    Mutant(
        "codes advanced by half a step",
        COPIES,
        "codes += C.k_slices * S.words(C) * 2",
        "codes += C.k_slices * S.words(C)",
        copies("test_a_step_comes_to_where_it_is_read[int8_col-3-28672]"),
    ),
    Mutant(
        "codes beyond K",
        COPIES,
        "S.codes_per_word < left, rows - row, 0)",
        "S.codes_per_word < left, rows - row, rows - row)",
        copies("test_a_step_comes_to_where_it_is_read[nf4-16-4096]"),
    ),
    Mutant(
        "a row too many",
        COPIES,
        "setp.gt.s32 q, $4, {row};",
        "setp.ge.s32 q, $4, {row};",
        copies("test_a_step_comes_to_where_it_is_read[int4_g128-3-28672]"),
    ),
    Mutant(
        "x of another k",
        COPIES,
        "k = w * C.chunk + part * 32 + t % 4 * 8",
        "k = w * C.chunk + part * 16 + t % 4 * 8",
        copies("test_a_step_comes_to_where_it_is_read[int4_g32-1-28672]"),
    ),
    Mutant(
        "x beyond K", COPIES, "(left - k) * 2]", "(left - k) * 4]", copies("test_a_step_comes_to_where_it_is_read[nf4-8-28672]")
    ),
    Mutant(
        "scales beyond K",
        COPIES,
        "left - t % pieces * (piece * S.group)",
        "left",
        copies("test_a_step_comes_to_where_it_is_read[int4_g32-8-28672]"),
    ),
    Mutant(
        "zero points do not advance",
        COPIES,
        "        zeros += C.columns(S)\n",
        "",
        copies("test_a_step_comes_to_where_it_is_read[int4_g128-16-28672]"),
    ),
    Mutant(
        "codes addressed in 32 bits",
        COPIES,
        "at = n0.to(gl.int64) * width",
        "at = n0 * width",
        copies("test_weights_may_be_larger_than_32_bits_count[int4_sym_g128]"),
    ),
    Mutant(
        "streams meet at the block's barrier",
        STREAMS,
        "bar.sync b, {threads};",
        "bar.sync 0, {threads};",
        streams("test_a_stream_meets_behind_its_copies_and_apart_from_others[16]"),
    ),
    Mutant(
        "scales of one warp are enough",
        STREAMS,
        "count = 32 * C.warps if slot",
        "count = 32 if slot",
        streams("test_barriers_count_who_arrives[2-2-1]"),
    ),
    Mutant(
        "all threads call a slot free",
        STREAMS,
        'setp.eq.u32 q, $1, 0; "\n',
        'setp.ge.s32 q, $1, 0; "\n',
        streams("test_barriers_count_who_arrives[2-2-16]"),
    ),
    Mutant(
        "the bias added in bf16",
        CODES,
        "0xC300 + S.bias",
        "0xC300 - S.bias",
        ("test_linear_codes.py::test_codes_less_their_bias[None-bf16]",),
    ),
    Mutant(
        "the bias added in fp16",
        CODES,
        "0x8000 + S.bias",
        "0x0000 + S.bias",
        ("test_linear_codes.py::test_codes_less_their_bias[None-fp16]",),
    ),
    # -- checkpoints of other libraries
    Mutant(
        "v1 zero points taken as they are",
        "checkpoints/gptq.py",
        ".add_(1).bitwise_and_",
        ".bitwise_and_",
        files("test_gptq_by_hand"),
    ),
    Mutant("words of AWQ in order", "checkpoints/awq.py", "[..., list(FIELDS)]", "", files("test_awq_by_hand")),
    Mutant(
        "nested scales without their mean",
        "checkpoints/bitsandbytes.py",
        "table[absmax.int()] * spread + offset",
        "table[absmax.int()] * spread",
        files("test_values_of_the_independent_decoders[shape0-bnb fp4 nested]"),
    ),
    Mutant(
        "a divisor taken as a factor",
        "checkpoints/fp4.py",
        "layer.check_scales(tensor_scale, 1 / factor)",
        "factor",
        files("test_fp4_by_hand"),
    ),
    Mutant(
        "act-order: columns sorted, and not said",
        "checkpoints/integers.py",
        "        perm=perm,\n",
        "",
        files("test_act_order_keeps_groups_together"),
    ),
    Mutant(
        "scales rounded to fp16",
        "checkpoints/integers.py",
        "        stored = scales.float()\n",
        "        pass\n",
        files("test_tiny_bf16_scales_are_not_rounded"),
    ),
    Mutant(
        "x not gathered for an act-order",
        "cpu/linear.py",
        "rows = rows.index_select(1, weight.perm)",
        "pass",
        ("test_cpu_linear.py::test_act_order[int4_g32]",),
    ),
    # -- calls launched like an earlier one
    Mutant("strides are no fact", FACTS, "t.shape, t.stride(),", "t.shape,", relaunched("test_every_fact_makes_another_call")),
    Mutant("alignment is no fact", FACTS, ", address % 16)", ")", relaunched("test_every_fact_makes_another_call")),
    Mutant(
        "devices are no fact",
        FACTS,
        "t.get_device(), address",
        "address",
        relaunched("test_a_tensor_of_another_device_makes_another_call"),
    ),
    Mutant(
        "formats by name",
        RELAUNCH,
        "id(formats[0]), id(formats[1])",
        "formats[0].name, formats[1].name",
        relaunched("test_every_fact_makes_another_call"),
    ),
    Mutant(
        "converted tensors remembered",
        RELAUNCH,
        "all(a is b for a, b in zip(r.tensors, used, strict=True))",
        "True",
        relaunched("test_what_was_converted_on_the_way_is_not_remembered"),
    ),
    Mutant(
        "the environment is no fact",
        RELAUNCH,
        "[impl, *as_set(), ",
        "[impl, ",
        relaunched("test_the_environment_makes_another_call"),
    ),
    Mutant(
        "the tail of an earlier call",
        RELAUNCH,
        "keys.offsets, keys.tail, values.codes",
        "keys.offsets, None, values.codes",
        relaunched("test_a_tail_is_that_of_each_call"),
    ),
    Mutant(
        "formats of products by name",
        RELAUNCH_LINEAR,
        "*map(id, formats)",
        "*(f.name for f in formats)",
        products("test_every_fact_makes_another_call"),
    ),
    Mutant(
        "a product remembered that was converted",
        RELAUNCH_LINEAR,
        "x.data_ptr() == r.addresses[0]",
        "True",
        products("test_what_was_converted_on_the_way_is_not_remembered"),
    ),
    Mutant(
        "act-order remembered",
        RELAUNCH_LINEAR,
        "or w.perm is not None",
        "",
        products("test_what_is_never_like_another"),
    ),
    Mutant(
        "rotated keys are no fact of an append",
        "ops/_relaunch_append.py",
        '"append", (rotate_keys,)',
        '"append", ()',
        ("test_relaunch_append.py::test_every_fact_makes_another_append",),
    ),
    Mutant(
        "an append of converted tensors remembered",
        "ops/_relaunch_append.py",
        "if not s.covers(",
        "if not any(",
        ("test_relaunch_append.py::test_what_needs_more_than_one_launch_is_not_remembered",),
    ),
]

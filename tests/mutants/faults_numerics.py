"""Faults of the references: attention, formats, quantizers, and checkpoints of other libraries."""

from __future__ import annotations

from edits import Rewrite, drop
from mutant import Mutant, tests_of

ATTENTION = "reference/attention.py"
PREFILL = "ops/prefill_attention.py"
DECODE_OP = "ops/decode_attention.py"
MERGE = "reference/merge.py"
HADAMARD = "reference/hadamard.py"
QUANTIZE = "reference/quantize.py"
DEQUANTIZE = "reference/dequantize.py"
PACKING = "packing.py"
GPTQ = "checkpoints/gptq.py"
AWQ = "checkpoints/awq.py"
BITSANDBYTES = "checkpoints/bitsandbytes.py"
FP4 = "checkpoints/fp4.py"
INTEGERS = "checkpoints/integers.py"
CPU_LINEAR = "cpu/linear.py"
TAIL = "kernels/decode/tail.py"
WORK_SPLIT = "kernels/decode/work_split.py"
CHECKS = "halfbyte_lab/measure/checks.py"

attention = tests_of("test_attention_reference.py")
bad_input = tests_of("test_bad_input.py")
caches = tests_of("test_cache.py")
codecs = tests_of("test_quantize.py")
packing = tests_of("test_packing.py")
tables = tests_of("test_formats.py")
files = tests_of("test_checkpoints.py")
cpu_linear = tests_of("test_cpu_linear.py")
emulated = tests_of("emulated/test_tuned_attention.py")
gate = tests_of("lab/test_accuracy_gate.py")

NUMERICS = [
    # -- the accuracy gate of measurements
    Mutant(
        "heads not judged before a time",
        CHECKS,
        "timed_attention_accuracy",
        Rewrite("_p if _h.ok or not _p.ok else _h", "_p"),
        gate("test_what_is_wrong_is_refused[int4-gqa-too_large]"),
    ),
    Mutant(
        "heads may be 4 % off",
        CHECKS,
        "HEAD_ERROR",
        Rewrite("0.02", "0.04"),
        gate("test_what_is_wrong_is_refused[int8-splitk-too_large]"),
    ),
    Mutant(
        "the error of all heads together",
        CHECKS,
        "timed_attention_accuracy",
        Rewrite("_w.max()", "_w.mean()"),
        gate("test_all_sequences_are_judged_head_by_head[6]"),
    ),
    Mutant(
        "times of a CPU judged by targets",
        "halfbyte_lab/measure/session.py",
        "Session.keep",
        Rewrite('_a.kind != "cuda"', "False"),
        gate("test_times_of_a_cpu_are_not_judged_by_the_targets_of_a_gpu"),
    ),
    # -- attention
    Mutant("no causal mask", ATTENTION, "visible", Rewrite("_a <= _b", "_a <= _b + 10**6"), attention("test_every_ratio_of_heads")),
    Mutant("one key too many", ATTENTION, "visible", Rewrite("_a < _b", "_a <= _b"), bad_input("test_positions_outside_the_cache")),
    Mutant(
        "no guard for what sees nothing",
        ATTENTION,
        "attend",
        Rewrite("_a.masked_fill(_a == -torch.inf, 0)", "_a"),
        attention("test_an_empty_sequence_gives_zero_and_minus_infinity"),
    ),
    Mutant(
        "ALiBi off by one",
        ATTENTION,
        "attend",
        Rewrite("_a * (_t - _q)", "_a * (_t - _q + 1)"),
        attention("test_alibi_of_any_number_of_heads"),
    ),
    Mutant(
        "ALiBi is zero",
        ATTENTION,
        "attend",
        Rewrite("_a * (_t - _q)", "_a * (_t - _t)"),
        attention("test_alibi_of_any_number_of_heads"),
    ),
    Mutant(
        "window off by one",
        ATTENTION,
        "visible",
        Rewrite("_a > _b", "_a >= _b"),
        attention("test_a_window_holds_the_query_and_those_before_it"),
    ),
    Mutant(
        "softcap without its factor",
        ATTENTION,
        "attend",
        Rewrite("_c * torch.tanh(_x)", "torch.tanh(_x)"),
        attention("test_softcap_comes_before_alibi_and_after_the_scale"),
    ),
    Mutant(
        "query heads on the wrong KV head",
        ATTENTION,
        "attend",
        Rewrite("_q.reshape(_b, _h, _n, _d)", "_q.reshape(_b, -1, _h, _q.shape[2], _d).transpose(1, 2).reshape(_b, _h, _n, _d)"),
        attention("test_every_ratio_of_heads"),
    ),
    Mutant(
        "padding is read",
        ATTENTION,
        "read",
        Rewrite("torch.where(stored_tokens(*_a), _v, 0.0)", "_v"),
        attention("test_nothing_behind_a_length_is_seen"),
    ),
    Mutant(
        "the tail is not read",
        ATTENTION,
        "read",
        Rewrite("_b.tail is not None", "False"),
        caches("test_the_tail_is_the_input_in_sixteen_bits"),
    ),
    Mutant(
        "recent tokens taken in the order of their rows",
        TAIL,
        "_token_of",
        Rewrite("_r + _t % _n", "_r + row - C.sink_tokens"),
        emulated("test_attention_keeps_its_promise[sinks and recent tokens]"),
    ),
    Mutant(
        "a scale for keys of a tail and none for its values",
        TAIL,
        "_accumulate",
        Rewrite("_p * scale", "_p"),
        emulated("test_attention_keeps_its_promise[sinks and recent tokens]"),
    ),
    Mutant(
        "codes of sink tokens are read",
        WORK_SPLIT,
        "coded_keys",
        Rewrite("gl.maximum(_l, _s)", "_l"),
        emulated("test_attention_keeps_its_promise[sinks and recent tokens]"),
    ),
    Mutant(
        "sinks twice",
        PREFILL,
        "prefill_attention",
        Rewrite("_o._replace(sinks=None, ends=_e)", "_o._replace(ends=_e)"),
        attention("test_prefill_is_decode_when_the_cache_is_exact[cpu-5-sinks]"),
    ),
    Mutant(
        "starts not shifted",
        PREFILL,
        "prefill_attention",
        Rewrite("(_s - _p).clamp_min(0)", "_s"),
        attention("test_prefill_is_decode_when_the_cache_is_exact[cpu-5-starts]"),
    ),
    Mutant(
        "every block of queries at the first position",
        DECODE_OP,
        "_in_torch",
        Rewrite("_s + _i * QUERY_BLOCK", "_s"),
        attention("test_queries_by_blocks_are_queries_at_once"),
    ),
    Mutant(
        "parts merged without weights",
        MERGE,
        "merge_states",
        Rewrite("torch.exp(_l.float() - _f)", "torch.exp(_l.float() * 0)"),
        attention("test_prefill_is_decode_when_the_cache_is_exact[cpu-5-starts]"),
    ),
    Mutant(
        "sinks as a part of lse",
        MERGE,
        "merge_states",
        Rewrite(
            "return _o.to(_d), _l",
            "return _o.to(_d), _l if sinks is None else torch.logaddexp(_l, sinks.view(1, -1, 1).expand_as(_l))",
        ),
        attention("test_a_sink_is_applied_once_and_is_not_part_of_lse"),
    ),
    Mutant(
        "rotation not normalised",
        HADAMARD,
        "rotate",
        Rewrite("_n**-0.5", "1.0"),
        attention("test_rotation_is_its_own_inverse_and_keeps_products"),
    ),
    # -- formats and quantizers
    Mutant(
        "wrong group index",
        DEQUANTIZE,
        "over_elements",
        Rewrite("_s.repeat_interleave(_g, dim=-1)", "_s.repeat((1,) * (_s.ndim - 1) + (_g,))"),
        codecs("test_kv_formats_are_exact"),
    ),
    Mutant(
        "codes of a byte in the wrong order",
        PACKING,
        "unpack_codes",
        Rewrite("range(8 // bits)", "reversed(range(8 // bits))"),
        packing(),
    ),
    Mutant("codes of a byte shifted wrongly", PACKING, "pack_codes", Rewrite("_c << bits * j", "_c << bits * (n - j)"), packing()),
    Mutant(
        "ties to the lower code",
        QUANTIZE,
        "_sorted_table",
        Rewrite("_c.ties == 'even'", "False"),
        tables("test_e2m1_ties_go_to_the_even_code"),
    ),
    Mutant("half up", QUANTIZE, "encode_unit", Rewrite("_u.round()", "(_u + 0.5).floor()"), tables("test_integer_ties_go_to_even")),
    Mutant("truncated", QUANTIZE, "encode_unit", Rewrite("_u.round()", "_u.trunc()"), codecs("test_kv_formats_are_exact")),
    Mutant(
        "zero point off by one",
        QUANTIZE,
        "_scales_of",
        Rewrite("(-_l / _s).round()", "(-_l / _s).round().add(1)"),
        codecs("test_integer_weights_are_exact"),
    ),
    Mutant(
        "no floor of scales",
        QUANTIZE,
        "_scales_of",
        Rewrite("(_a / _r).clamp_min(_f).to(_s), None", "(_a / _r).to(_s), None"),
        codecs("test_kv_formats_are_exact"),
    ),
    Mutant(
        "E8M0 subnormal flushed",
        DEQUANTIZE,
        "e8m0_to_float",
        Rewrite("_v.masked_fill(_s == 255, torch.nan)", "_v.masked_fill(_s == 255, torch.nan).masked_fill(_s == 0, 0)"),
        tables("test_every_e8m0_scale"),
    ),
    Mutant(
        "E8M0 NaN is finite",
        DEQUANTIZE,
        "e8m0_to_float",
        Rewrite("_v.masked_fill(_s == 255, torch.nan)", "_v.nan_to_num(0, 0, 0)"),
        tables("test_every_e8m0_scale", "test_every_mxfp4_scale_through_a_tensor"),
    ),
    Mutant("MX exponent off by one", QUANTIZE, "_mx_scales", Rewrite("_e - 2", "_e - 1"), codecs("test_mxfp4_is_exact")),
    Mutant(
        "NVFP4 blocks vanish",
        QUANTIZE,
        "_nvfp4_scales",
        Rewrite("_w.clamp_min(2.0**-9)", "_w"),
        codecs("test_nvfp4_special_blocks"),
    ),
    Mutant(
        "the clip with the most error",
        QUANTIZE,
        "_search",
        Rewrite("_a < _b", "_a > _b"),
        codecs("test_the_searched_clip_is_no_worse_in_any_group_and_the_best_of_its_grid"),
    ),
    Mutant(
        "double quantization loses the mean",
        DEQUANTIZE,
        "_unnested",
        Rewrite("_f * _s + _m", "_f * _s"),
        codecs("test_double_quantization"),
    ),
    Mutant("NaN is quantized", QUANTIZE, "quantize", drop("check_finite(_x, 'x')"), codecs("test_nan_and_infinity_raise")),
    Mutant(
        "a range beyond fp16 is stored",
        QUANTIZE,
        "quantize",
        drop("check_range(*_a)"),
        codecs("test_a_scale_or_offset_beyond_fp16_raises"),
    ),
    # -- checkpoints of other libraries
    Mutant("v1 zero points taken as they are", GPTQ, "Gptq._zeros", Rewrite("_w.add_(1)", "_w"), files("test_gptq_by_hand")),
    Mutant("words of AWQ in order", AWQ, "_unpack", Rewrite("_w[..., list(FIELDS)]", "_w"), files("test_awq_by_hand")),
    Mutant(
        "nested scales without their mean",
        BITSANDBYTES,
        "_nested",
        Rewrite("_a * _s + _o", "_a * _s"),
        files("test_values_of_the_independent_decoders[shape0-bnb fp4 nested]"),
    ),
    Mutant(
        "a divisor taken as a factor",
        FP4,
        "nvfp4_weight",
        Rewrite("_l.check_scales(_n, 1 / _f, 1)", "_f"),
        files("test_fp4_by_hand"),
    ),
    Mutant(
        "act-order: columns sorted, and not said",
        INTEGERS,
        "integer_weight",
        Rewrite("QuantTensor(*_a, perm=_p)", "QuantTensor(*_a)"),
        files("test_act_order_keeps_groups_together"),
    ),
    Mutant(
        "scales rounded to fp16",
        INTEGERS,
        "integer_weight",
        Rewrite("_s = _o.float()", "pass"),
        files("test_tiny_bf16_scales_are_not_rounded"),
    ),
    Mutant(
        "x not gathered for an act-order",
        CPU_LINEAR,
        "linear",
        Rewrite("_r.index_select(1, _w.perm)", "_r"),
        cpu_linear("test_act_order[torch-int4_g32]"),
    ),
]

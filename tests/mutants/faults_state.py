"""Faults of what lasts from call to call: caches, pages, ops and the launch caches."""

from __future__ import annotations

from edits import InText, Rewrite, drop
from mutant import Mutant, tests_of

APPEND_OP = "ops/append.py"
APPEND = "reference/append.py"
PREFILL = "ops/prefill_attention.py"
CACHE = "cache.py"
DECODE_PLAN = "plans/decode_attention.py"
PAGING = "paging.py"
DECODE_OP = "ops/decode_attention.py"
LINEAR_ON_GPU, DECLARE, LAUNCH_CACHE = "ops/_linear_on_gpu.py", "ops/declare.py", "ops/launch_cache.py"
DECODE_ON_GPU = "ops/_decode_on_gpu.py"
KV_BUFFER = "kv_buffer.py"

caches = tests_of("test_cache.py")
self_check = tests_of("test_self_check.py")
stores = tests_of("test_cpu_append.py")
attention = tests_of("test_attention_reference.py")
plans = tests_of("test_plans.py")
pages = tests_of("test_paging.py")
ops = tests_of("test_ops.py")
drafts = tests_of("hf/test_hf_drafts.py")
launches = tests_of("test_launch_cache.py")
varlen = tests_of("test_attention_varlen.py")
slabs = tests_of("interpreted/test_triton_dequantize.py")

STATE = [
    # -- caches
    Mutant(
        "counts ignored",
        APPEND_OP,
        "store",
        Rewrite("_l.add_(_n if _c is None else _c)", "_l.add_(_n)"),
        caches("test_select_and_repeat_copy"),
    ),
    Mutant(
        "counts not looked at",
        APPEND,
        "append_",
        Rewrite("_n if _c is None else _c.to(_d)", "_n"),
        caches("test_counts_outside_the_tokens_given_change_nothing"),
    ),
    Mutant(
        "the past's length taken for the cache's",
        PREFILL,
        "prefill_attention",
        Rewrite(
            "_c._replace(query_start=_p, options=_o._replace(sinks=None, ends=_p))",
            "_c._replace(query_start=_p, lengths=_p, options=_o._replace(sinks=None))",
        ),
        attention("test_prefill_after_any_past"),
    ),
    Mutant(
        "blocks of tokens begin where the window does",
        "cpu/decode_attention.py",
        "chunk_attention",
        Rewrite("_f // CHUNK_TOKENS * CHUNK_TOKENS", "_f"),
        varlen("test_bits_depend_neither_on_chunks_nor_on_pages_nor_on_the_batch[fp8-int8-window-cpu-dtype1-torch]"),
    ),
    Mutant(
        "an exact prompt attends to its stored tokens, too",
        "ops/attention_varlen.py",
        "_exact",
        Rewrite("_o._replace(sinks=None, ends=_e)", "_o._replace(sinks=None)"),
        varlen("test_exact_prompts_attend_to_their_own_tokens[plain-cpu]"),
    ),
    Mutant(
        "no capacity check",
        APPEND,
        "append_",
        drop("check_capacity(*_a)"),
        caches("test_an_append_past_the_capacity_changes_nothing"),
    ),
    Mutant(
        "one token too many fits",
        APPEND,
        "check_capacity",
        Rewrite("_a > _b", "_a >= _b"),
        stores("test_bits_are_those_of_the_reference"),
    ),
    Mutant(
        "keys written before values are checked",
        APPEND,
        "append_",
        Rewrite("_w += prepare(*_a)", "for write in prepare(*_a):\n    write()"),
        caches("test_nan_and_infinity_change_nothing"),
    ),
    Mutant(
        "what lies beyond counts is looked at",
        APPEND,
        "append_",
        Rewrite("_x.masked_fill(~_m, 0)", "_x * 1"),
        stores("test_bits_are_those_of_the_reference"),
    ),
    Mutant(
        "the scale of a tensor follows the data",
        APPEND,
        "_fixed_scale",
        Rewrite("torch.where(_s == 0, _m * _p, _s)", "_m"),
        stores("test_bits_are_those_of_the_reference"),
    ),
    Mutant(
        "blocks quantized from unrounded keys",
        APPEND,
        "_whole_blocks",
        Rewrite("_x.to(_b.tail.dtype)", "_x.float()"),
        stores("test_bits_are_those_of_the_reference"),
    ),
    Mutant(
        "the block is not brought back by crop",
        CACHE,
        "KVCache.crop",
        drop("reopen(*_a)"),
        caches("test_crop_into_a_finished_block_brings_it_back"),
    ),
    Mutant(
        "writes to lengths by others are not noticed",
        CACHE,
        "KVCache._counted",
        Rewrite("_l is _o and _w == _l._version", "_l is _o"),
        caches("test_what_the_host_is_sure_of"),
    ),
    Mutant(
        "copies of a cache believe what the first one knows",
        "cache_pickle.py",
        "_reduced",
        Rewrite("_n not in ('_version', '_lock', 'keys', 'values')", "_n not in ('_lock', 'keys', 'values')"),
        caches("test_what_the_host_is_sure_of"),
    ),
    Mutant(
        "blocks of as many new tokens as there are rows",
        DECODE_PLAN,
        "queries_of_a_block",
        Rewrite("min(_q, _r // _g)", "min(_q, _r)"),
        plans("test_prompts_are_cut_into_blocks_that_a_tuned_kernel_holds"),
    ),
    Mutant(
        "shared pages are written",
        PAGING,
        "PagedKVCache._make_room",
        Rewrite("_c and _u % _p and _h > 1", "False"),
        pages("test_shared_pages_are_copied_before_they_are_written"),
    ),
    Mutant(
        "a new page for a shared one, but empty",
        PAGING,
        "PagedKVCache._make_room",
        drop("_s._copy_page(*_a)"),
        pages("test_shared_pages_are_copied_before_they_are_written"),
    ),
    Mutant(
        "pages taken by a refused append are lost",
        PAGING,
        "PagedKVCache._append_with_pages",
        drop("_s._recount()"),
        pages("test_a_pool_that_is_too_small_changes_nothing"),
    ),
    # -- ops
    Mutant(
        "an undeclared mutation",
        DECLARE,
        "Argument.schema",
        Rewrite("{Mark.WRITTEN, Mark.RESULT}", "{Mark.RESULT}"),
        ops("test_opcheck_append[int8-int4_g32]"),
    ),
    Mutant(
        "a fake of the wrong shape",
        "kv_buffer.py",
        "DecodeCall.new_results",
        Rewrite("(_b, _h, _l, self.values.dim)", "(_b, _h, _l, self.values.codes.shape[-1])"),
        ops("test_opcheck_decode_attention[cpu-int8-int4_g32]"),
    ),
    Mutant(
        "the bias of another shard",
        DECLARE,
        "Op._field",
        InText("[*{path}]", "[*{path}[:-1], None]"),
        ops("test_qkv_projection_is_three_products"),
    ),
    Mutant(
        "the parts of the first weight for all",
        DECLARE,
        "_weights",
        Rewrite("parts[first : first + count]", "parts[:count]"),
        ops("test_qkv_projection_is_three_products"),
    ),
    # -- calls launched like an earlier one
    Mutant(
        "strides are no fact",
        DECLARE,
        "Op.signature",
        Rewrite("(*_b, *map(_x.stride, _t), *_a)", "(*_b, *_a)"),
        launches("test_no_fact_is_taken_for_another"),
    ),
    Mutant(
        "alignment is no fact",
        DECLARE,
        "Op.signature",
        Rewrite("(*_b, *map(_x, addresses))", "(*_b,)"),
        launches("test_no_fact_is_taken_for_another"),
    ),
    Mutant(
        "devices are no fact",
        DECLARE,
        "Op.signature",
        Rewrite("(*_b, *map(_x.get_device, _t))", "(*_b,)"),
        launches("test_a_tensor_of_another_device_makes_another_call"),
    ),
    Mutant(
        "formats by name",
        DECLARE,
        "Op.signature",
        Rewrite("(*_b, *map(id, _f), *_a)", "(*_b, *(f.name for f in _f), *_a)"),
        launches("test_no_fact_is_taken_for_another"),
    ),
    Mutant(
        "converted tensors remembered",
        LAUNCH_CACHE,
        "launch",
        Rewrite("signature.covers(_t)", "True"),
        launches(
            *(
                f"test_what_was_converted_or_needs_other_launches_is_not_stored[{case}]"
                for case in ("attention: starts of 64 bits", "linear: x not contiguous", "append: counts of 64 bits")
            )
        ),
    ),
    Mutant(
        "the environment is no fact",
        DECLARE,
        "Op.signature",
        Rewrite("(*_b, *as_set(), *_a)", "(*_b, *_a)"),
        launches("test_the_environment_makes_another_call"),
    ),
    Mutant(
        "an address where another belongs",
        LAUNCH_CACHE,
        "_Places.add",
        Rewrite("enumerate(tensors)", "enumerate(tensors[::-1])"),
        launches("test_the_same_arguments_at_other_addresses[attention: a tail]"),
    ),
    Mutant(
        "what kernels are compiled for is no fact",
        DECLARE,
        "_options_of",
        Rewrite("(bool, int, float, str)", "(int, float, str)"),
        launches("test_no_fact_is_taken_for_another"),
    ),
    Mutant(
        "per-channel keys rotated by default",
        "formats.py",
        "Format.gains_by_rotation",
        Rewrite("_b and _g", "_b"),
        caches("test_which_keys_are_rotated_by_default[int4_channel-False]"),
    ),
    Mutant(
        "queries of calibrated keys as they are",
        "hf/attention.py",
        "attention",
        Rewrite("_t.of_queries(_q) if _k.rotated is None else _q", "_q"),
        tests_of("hf/test_hf_calibrated_keys.py")("test_attention_is_the_same_in_float64[llama]"),
    ),
    Mutant(
        "calibrated keys of any model",
        "calibrated_keys.py",
        "CalibratedKeys.check_model",
        Rewrite("not _d and _g and _s.digest != _g", "False"),
        tests_of("hf/test_hf_calibrated_keys.py")("test_keys_of_another_model_are_refused"),
    ),
    Mutant(
        "every layer rotated as the first",
        "hf/quantize_model.py",
        "Quantization._cache_settings",
        Rewrite("_e[0] if _n else _e", "_e[0]"),
        tests_of("hf/test_hf_by_layer.py")("test_what_is_saved_says_whether_keys_are_rotated"),
    ),
    Mutant(
        "values rotated by the cache not rotated back",
        "hf/attention.py",
        "_by_token",
        Rewrite("transform_heads(_o) if _l.rotate_values else _o", "_o"),
        tests_of("hf/test_hf_value_rotation.py")("test_attention_rotates_its_output_back"),
    ),
    Mutant(
        "sink and recent tokens of a plan left out",
        "cache_plan.py",
        "CachePlan.exact_tokens",
        Rewrite("_o if any(_o) else _g", "_g"),
        tests_of("hf/test_hf_by_layer.py")("test_sink_and_recent_tokens_of_a_plan"),
    ),
    Mutant(
        "values that are rotated already rotated back",
        "hf/attention_weights.py",
        "layers_to_rotate",
        Rewrite("getattr(_m.config, SAVED, False)", "False"),
        tests_of("hf/test_hf_value_rotation.py")("test_it_is_saved_and_done_once"),
    ),
    Mutant(
        "tokens beyond the end of all sequences kept",
        "hf/graph_generate.py",
        "_Loop._result",
        Rewrite("int(self.tokens.lengths.max())", "self.length"),
        tests_of("hf/test_hf_graph_generate.py")("test_all_sequences_end_early"),
    ),
    Mutant(
        "a recorded step replayed with weights that lie elsewhere",
        "hf/survey.py",
        "survey",
        Rewrite("local_shard(t).data_ptr()", "0"),
        tests_of("hf/test_hf_graph_generate.py")("test_the_next_call_keeps_step_and_cache"),
    ),
    Mutant(
        "the padding of a recorded prompt stored",
        "hf/recorded_prompt.py",
        "PromptForward._run",
        Rewrite('self.inputs["logits_to_keep"] + 1', 'torch.full_like(self.chunk.counts, self.inputs["input_ids"].shape[1])'),
        tests_of("hf/test_hf_prompts.py")("test_prompts_of_one_bucket_are_one_forward"),
    ),
    Mutant(
        "a recorded choice replayed at lengths where an end is allowed again",
        "hf/choice.py",
        "_processor_key",
        Rewrite("length < least", "True"),
        tests_of("hf/test_hf_graph_generate.py")("test_choices_of_logits_alone_are_recorded"),
    ),
    Mutant(
        "tokens behind an end kept because a draft proposed them",
        "hf/recorded_step.py",
        "LookupForward.take",
        Rewrite("_a & _b & ~_e[:, :-1]", "_a & _b"),
        tests_of("hf/test_hf_lookup.py")("test_ends_inside_of_accepted_drafts"),
    ),
    Mutant(
        "a rejected draft finishes a block of per-channel keys",
        "hf/recorded_step.py",
        "LookupForward._draft",
        Rewrite("self.block is not None", "False"),
        tests_of("hf/test_hf_lookup.py")("test_greedy_of_every_kind_of_cache"),
    ),
    Mutant(
        "rejected drafts stay in the cache that is returned",
        "hf/graph_generate.py",
        "_Loop.run",
        Rewrite("self.step.cache.set_lengths(_l)", "None"),
        tests_of("hf/test_hf_lookup.py")("test_the_cache_that_is_returned_holds_no_rejected_draft"),
    ),
    Mutant(
        "rejected drafts leave the tail as they found it",
        "hf/cache_layers.py",
        "Drafts.take_back",
        Rewrite("_t.copy_(_h)", "None"),
        drafts("test_rejected_drafts_leave_no_trace"),
    ),
    Mutant(
        "drafts read the block that a later one finishes",
        "hf/cache_layers.py",
        "Drafts._starts",
        Rewrite("(held + i + 1) % block == 0", "False"),
        drafts("test_drafts_change_no_token"),
    ),
    # -- parts of several weights in one buffer
    Mutant(
        "every slab begins with the first weight",
        LINEAR_ON_GPU,
        "_by_slabs",
        Rewrite("slab_shares(_f, _a, _n)", "slab_shares(_f, 0, _n)"),
        slabs("test_gemms_over_slabs_of_weights_below_each_other[24]"),
    ),
    Mutant(
        "a slab's part of a weight lands in its first columns",
        LINEAR_ON_GPU,
        "_by_slabs",
        Rewrite("_o.view(_m, _n)[:, _s:_s + _r]", "_o.view(_m, _n)[:, :_r]"),
        slabs("test_gemms_over_slabs_of_weights_below_each_other[24]"),
    ),
    # -- kernels that check themselves
    Mutant(
        "a wrong kernel runs",
        "ops/self_check.py",
        "refusal",
        Rewrite("results[key] <= 1", "True"),
        self_check("test_a_wrong_kernel_is_left_alone[linear]", "test_a_wrong_kernel_is_left_alone[decode_attention]"),
    ),
    Mutant(
        "a wrong append is kept",
        APPEND_OP,
        "_refused",
        Rewrite("not untested(_d)", "True or untested(_d)"),
        self_check("test_a_wrong_append_is_left_to_the_reference"),
    ),
    Mutant(
        "the small case of a split GEMM splits nothing",
        "plans/small_gemm.py",
        "small_gemm",
        Rewrite("next(_n for _n in range(2, _t) if _t % _n)", "tiles"),
        self_check("test_a_small_gemm_has_the_spec_of_the_whole[NVIDIA H200-int4_g128]"),
    ),
    Mutant(
        "an error of a tenth is allowed",
        "ops/self_check.py",
        "excess",
        Rewrite("_t.square().mean().sqrt()", "2 * _t.square().mean().sqrt()"),
        self_check("test_excess_tells_wrong_from_rounded"),
    ),
    Mutant(
        "a cache measures the scales that its checkpoint has",
        "hf/cache_layers.py",
        "PackedLayer.__init__",
        Rewrite("None if is_rotated else scale", "None"),
        tests_of("hf/test_hf_external.py")("test_a_default_cache_uses_them"),
    ),
    Mutant(
        "a stored cache is not looked at",
        "cache_pickle.py",
        "_buffer",
        Rewrite("check(good, _m)", "check(True, _m)"),
        caches("test_files_of_damaged_caches_are_refused"),
    ),
    # -- which is faster
    Mutant(
        "the slowest first token subtracted",
        "halfbyte_lab/model_step.py",
        "timed_in_turn",
        Rewrite("min(_x for _x, _y in _m)", "max(_x for _x, _y in _m)"),
        tests_of("hf/test_hf_model_step.py")("test_a_step_is_what_a_long_call_takes_beyond_a_short_one"),
    ),
]

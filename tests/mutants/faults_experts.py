"""Faults of mixtures of experts."""

from __future__ import annotations

from edits import Rewrite, drop
from mutant import Mutant, tests_of

REFERENCE, DEQUANTIZE, CPU = "reference/experts.py", "reference/dequantize.py", "cpu/experts.py"
KERNEL, OP = "kernels/linear/experts.py", "ops/experts_linear.py"
SORT = "kernels/linear/experts_sort.py"
PROMPT, ROWS, BLOCKS = "kernels/linear/experts_prompt.py", "kernels/dequantize.py", "ops/_experts_prompt.py"
CALLED, FP8, EXTERNAL = "hf/mixtures.py", "checkpoints/fp8.py", "hf/external.py"
TUNED, RESULTS = "kernels/linear/mma.py", "kernels/linear/results.py"
TABLE, SUM, GROUPED = (f"kernels/linear/experts_{part}.py" for part in ("table", "sum", "wgmma"))

experts = tests_of("test_experts.py")
kernel = tests_of("interpreted/test_triton_experts.py")
mixtures, fp8 = tests_of("hf/test_hf_mixtures.py"), tests_of("hf/test_hf_fp8.py")
tuned = tests_of("emulated/test_tuned_experts.py")

EXPERTS = [
    Mutant(
        "the up projection is not limited from below",
        REFERENCE,
        "Activation.__call__",
        Rewrite("_u.clamp(-_a, _b)", "_u.clamp(max=_b)"),
        experts("test_every_epilogue"),
    ),
    Mutant(
        "the gate of an id that is no expert counts",
        REFERENCE,
        "combined",
        Rewrite("_g.masked_fill(_m, 0)", "_g"),
        experts("test_a_number_that_is_no_expert"),
    ),
    Mutant(
        "every expert has the tensor scale of the first",
        DEQUANTIZE,
        "expert_scales",
        Rewrite("_q.tensor_scale[_e]", "_q.tensor_scale[0]"),
        experts("test_every_format"),
    ),
    Mutant(
        "every expert has the nested scales of the first",
        DEQUANTIZE,
        "expert_scales",
        Rewrite("_e * _s.numel()", "0"),
        experts("test_every_format"),
    ),
    Mutant(
        "every expert has the order of columns of the first",
        CPU,
        "experts_linear",
        Rewrite("_w.perm[_e]", "_w.perm[0]"),
        experts("test_act_order"),
    ),
    Mutant(
        "ids are not checked on a CPU",
        OP,
        "check_call",
        Rewrite("_l < 0 or _h >= _e", "_l < 0"),
        experts("test_a_number_that_is_no_expert"),
    ),
    Mutant(
        "pairs beyond the first block of ids are numbered from 0",
        KERNEL,
        "_nth_pairs",
        drop("_s += tl.sum(_m)"),
        kernel("test_the_plan_keeps_the_promise[64-4-3]"),
    ),
    Mutant(
        "an expert hit twice is two slots",
        KERNEL,
        "_expert_of",
        Rewrite("_a & (_count_before(_i, _e, _s) == 0)", "_a"),
        kernel("test_an_expert_that_is_hit_is_one_slot"),
    ),
    Mutant(
        "every split of K adds the bias",
        KERNEL,
        "_experts",
        Rewrite("tl.where(_s == 0, _b, 0.0)", "_b"),
        kernel("test_every_way_to_cut_the_work"),
    ),
    Mutant(
        "an id that is no expert has a gate",
        KERNEL,
        "_weigh",
        Rewrite("(_e >= 0) & (_e < _n)", "_e < _n"),
        kernel("test_every_way_to_cut_the_work"),
    ),
    Mutant(
        "experts without tokens are dequantized",
        ROWS,
        "dequantize_experts",
        Rewrite("tl.load(starts + expert + 1) > tl.load(starts + expert)", "tl.load(starts + expert + 1) >= 0"),
        kernel("test_experts_without_tokens_are_not_dequantized"),
    ),
    Mutant(
        "every dequantized expert has the order of columns of the first",
        ROWS,
        "dequantize_experts",
        Rewrite("w.perm + wide * width", "w.perm"),
        kernel("test_dequantized_experts_in_every_format[int4_g32]"),
    ),
    Mutant(
        "the rows of a dequantized expert have the tensor scale of the first",
        ROWS,
        "_scales",
        Rewrite("w.tensor_scale + row", "w.tensor_scale + row * 0"),
        kernel("test_dequantized_experts_in_every_format[nvfp4]"),
    ),
    Mutant(
        "an id that is no expert counts in a prompt",
        PROMPT,
        "_combine",
        Rewrite("_r & (_e >= 0) & (_e < _n)", "_r & (_e < _n)"),
        kernel("test_every_epilogue_of_dequantized_experts"),
    ),
    Mutant(
        "every block of rows has the biases of the first",
        PROMPT,
        "_combine",
        Rewrite("_b + _e[:, None] * _n + first", "_b + _e[:, None] * _n"),
        kernel("test_every_epilogue_of_dequantized_experts"),
    ),
    Mutant(
        "groups of tokens are those of the next expert",
        BLOCKS,
        "_products",
        Rewrite("pairs.starts[1:]", "pairs.starts[:-1]"),
        kernel("test_every_epilogue_of_dequantized_experts"),
    ),
    Mutant(
        "rows that stay sorted have the biases of unsorted ones",
        BLOCKS,
        "run_both",
        Rewrite("up._replace(ids=_k)", "up"),
        kernel("test_rows_that_stay_sorted_between_projections_change_no_bits[mxfp4]"),
    ),
    Mutant(
        "pairs in many blocks before do not count",
        SORT,
        "_add",
        Rewrite("before[None, :] + _c - here", "_c - here"),
        kernel("test_pairs_are_sorted_as_torch_sorts_them[66000-5]"),
    ),
    Mutant(
        "a pair counts itself among those before",
        SORT,
        "_place",
        Rewrite("_o[None, :] < _p", "_o[None, :] <= _p"),
        kernel("test_pairs_are_sorted_as_torch_sorts_them[257-30]"),
    ),
    Mutant(
        "an expert's block of pairs that is not full is not listed",
        SORT,
        "_place",
        Rewrite("tl.cdiv(_t, OF)", "_t // OF"),
        kernel("test_blocks_of_sorted_pairs"),
    ),
    Mutant(
        "the pairs of an expert end one early in the list of blocks",
        SORT,
        "_place",
        Rewrite("tl.store(at + 3, _s + _t, mask=_m)", "tl.store(at + 3, _s + _t - 1, mask=_m)"),
        kernel("test_blocks_of_sorted_pairs"),
    ),
    Mutant(
        "every block of the grouped kernel has its expert's first pairs",
        GROUPED,
        "_place",
        Rewrite("_s + (_o - _c * _b) * C.block_m", "_s"),
        tuned("test_one_expert_takes_all[130]"),
    ),
    Mutant(
        "every expert has the weights of the first in the grouped kernel",
        GROUPED,
        "_first_step",
        Rewrite("expert * _n + n0", "n0"),
        tuned("test_any_ids[True-1-4]"),
    ),
    Mutant(
        "scales of the grouped kernel's next tile are of this one's expert",
        GROUPED,
        "experts",
        Rewrite("gl.where(over, behind[0], expert)", "expert"),
        tuned("test_any_ids[True-1-4]"),
    ),
    Mutant(
        "the grouped kernel writes rows of other experts",
        GROUPED,
        "_write",
        Rewrite("(_m < end) & (_n < _w)", "_n < _w"),
        tuned("test_any_ids[True-1-4]"),
    ),
    Mutant(
        "all pairs of an expert are one block of the tuned kernel",
        TABLE,
        "_blocks",
        Rewrite("(_p - _s) % C.x_rows == 0", "_p == _s"),
        tuned("test_any_ids[True-8-1]"),
    ),
    Mutant(
        "the tuned kernel takes a negative id for an expert",
        TABLE,
        "sort_pairs",
        Rewrite("(_e >= 0) & (_e < _n)", "_e < _n"),
        tuned("test_any_ids[True-8-1]"),
    ),
    Mutant(
        "one token's pairs count those before that have no expert",
        TABLE,
        "_as_they_come",
        Rewrite("_count(_f & ((1 << _p) - 1))", "_p"),
        tuned("test_any_ids_of_one_token"),
    ),
    Mutant(
        "ids are read ahead of the kernel that writes them",
        TUNED,
        "linear",
        Rewrite("not C.table.ids_early", "False"),
        tuned("test_any_ids_of_one_token"),
    ),
    Mutant(
        "every expert has the bias of the first in the tuned kernel",
        RESULTS,
        "routed_results",
        Rewrite("weights.biases[0] + row", "weights.biases[0] + n"),
        tuned("test_any_ids[True-8-1]"),
    ),
    Mutant(
        "the tuned kernel's sum takes a negative id for an expert",
        SUM,
        "weighted_sums",
        Rewrite("(_e >= 0) & (_e < _n)", "_e < _n"),
        tuned("test_no_id_is_an_expert[1-int8_g128-True]"),
    ),
    Mutant(
        "tiles that are left over are not shared out in the tuned kernel",
        TUNED,
        "_routed_shares",
        Rewrite("gl.where(_a, _s, 1)", "1"),
        tuned("test_mixtures_keep_their_promise[int8_col-64-3-40-528-gates-fp16]"),
    ),
    Mutant(
        "experts are found in the rows of zeros",
        CALLED,
        "RowsOfAll.forward",
        Rewrite("_r != 0", "_r == 0"),
        mixtures("test_only_the_experts_that_are_hit_are_read"),
    ),
    Mutant(
        "the expert that stands in for an identity counts",
        CALLED,
        "WithIdentities.forward",
        Rewrite("_w * real", "_w"),
        mixtures("test_logits_of_the_dequantized_model[longcat_flash-nf4]"),
    ),
    Mutant(
        "only a router itself stays in 16 bits, and not its layers",
        "hf/weights.py",
        "_stays",
        Rewrite("{*name.split(_d)}", "{name.split(_d)[-1]}"),
        mixtures("test_routers_stay_with_all_of_their_layers"),
    ),
    Mutant(
        "FP8 blocks are as wide as they are high",
        FP8,
        "Fp8.values",
        Rewrite("_s.repeat_interleave(columns)", "_s.repeat_interleave(rows)"),
        fp8("test_as_transformers_multiplies_out[qwen3-int8_col]"),
    ),
    Mutant(
        "an FP8 weight of NaN is taken",
        FP8,
        "Fp8.values",
        Rewrite("not bool(torch.isfinite(_c).all())", "False"),
        fp8("test_what_is_wrong_is_named"),
    ),
    Mutant(
        "gate projections come before up projections",
        "hf/external.py",
        "StoredNames._canonical",
        Rewrite("alternate(_r)", "_r"),
        fp8("test_as_transformers_multiplies_out[qwen3_moe-int4_g32]"),
    ),
    Mutant(
        "blocks that the model has are left out",
        "hf/external.py",
        "StoredNames.is_dropped",
        Rewrite("not self.has(_n)", "True"),
        fp8("test_a_block_of_that_number_is_read"),
    ),
]

"""Faults of decoder blocks in few launches."""

from __future__ import annotations

from edits import Rewrite
from mutant import Mutant, tests_of

NORM, GATE, BLOCKS, PARTS = "kernels/block/norm.py", "kernels/block/gate.py", "hf/fused_blocks.py", "hf/fused_parts.py"
SUMS = "kernels/block/all_reduce.py"

RESULTS, COPIES = "kernels/linear/results.py", "kernels/linear/async_copy.py"

kernel = tests_of("interpreted/test_triton_block.py")
tuned = tests_of("emulated/test_tuned_blocks.py")
blocks = tests_of("hf/test_hf_fused_blocks.py")

BLOCK = [
    Mutant(
        "eps left out of a norm",
        NORM,
        "_normalized",
        Rewrite("tl.sum(x * x, 1) * share + eps", "tl.sum(x * x, 1) * share"),
        kernel("test_a_row_of_zeros_and_one_that_is_not_finite"),
    ),
    Mutant(
        "what is normalized is not rounded before its weight",
        NORM,
        "_normalized",
        Rewrite("KIND == 'rounded'", "KIND == 'never'"),
        kernel("test_norms_of_queries_and_keys_in_one_launch[rounded]"),
    ),
    Mutant(
        "the offset of a norm's weight forgotten",
        NORM,
        "_factors",
        Rewrite("KIND == 'offset'", "KIND == 'never'"),
        kernel("test_norms_of_queries_and_keys_in_one_launch[offset]"),
    ),
    Mutant(
        "the branch scaled after it was added",
        NORM,
        "add_norm",
        Rewrite("whole + row", "whole + row * multiplier"),
        kernel("test_sum_and_norm"),
    ),
    *(
        Mutant(name, SUMS, "summed", Rewrite(*edit), kernel(f"test_sums_over_ranks[{case}-0-dtype0]"))
        for name, case, *edit in (
            ("a sum of the first four ranks only", "2-5", "range(0, RANKS, AT_ONCE)", "range(0, AT_ONCE, AT_ONCE)"),
            ("a count that is not kept", "0-2", "tl.store(exchange.counts + m, count)", "count"),
        )
    ),
    Mutant(
        "the cubic term of GELU doubled",
        GATE,
        "gated",
        Rewrite("0.044715", "0.08943"),
        kernel("test_gated_activations"),
    ),
    Mutant(
        "projections do not scale the rows of a norm",
        RESULTS,
        "finish",
        Rewrite("v * gl.expand_dims(_row_factors(squares, K, C), 0)", "v"),
        tuned("test_projections_of_rows_without_their_factor[int4_g128-1x96x1536]"),
    ),
    Mutant(
        "a sum without the offset of its norm's weight",
        RESULTS,
        "_write_sum",
        Rewrite("C.epilogue.norm == 'offset'", "C.ending.norm == 'never'"),
        tuned("test_the_residual_sum_and_what_a_norm_needs[int4_g128-8x72x1536]"),
    ),
    Mutant(
        "gate multiplied by itself",
        COPIES,
        "_alternating_at",
        Rewrite("weights.codes[1]", "weights.codes[0]"),
        tuned("test_gated_products[int4_g128-1x96x1536]"),
    ),
    Mutant(
        "a block without its sliding window",
        PARTS,
        "Heads.__init__",
        Rewrite("attended.options", "{**attended.options, 'sliding_window': None}"),
        blocks("test_every_block_of_these_families_is_fused[mistral]"),
    ),
    Mutant(
        "the norm behind attention left out",
        BLOCKS,
        "FusedBlock.__init__",
        Rewrite("branch.after", "None"),
        blocks("test_the_same_tokens[gemma2-1]"),
    ),
    Mutant(
        "the residual multiplier left out",
        BLOCKS,
        "FusedBlock._sum",
        Rewrite("self.structure.multiplier", "1.0"),
        blocks("test_the_same_tokens[granite-1]"),
    ),
    Mutant(
        "a forward that somebody replaced is passed over",
        BLOCKS,
        "_is_watched",
        Rewrite("'forward' in vars(module)", "False"),
        blocks("test_whoever_watches_or_changes_a_forward_keeps_the_plain_blocks"),
    ),
    Mutant(
        "a head rotated with a half that was not normalized",
        "kernels/append/rows.py",
        "rotate_by_position",
        Rewrite("normalized(_x, _s, _d, _r, _t, _h)", "_x"),
        tests_of("interpreted/test_triton_append.py")("test_heads_are_normalized_before_they_are_rotated"),
    ),
    Mutant(
        "blocks compared near the start of a text only",
        PARTS,
        "_attends_alike",
        Rewrite("zip(_f(form, far, 1.0), far.attended[number][0][1:4:2], strict=False)", "()"),
        blocks("test_attention_that_scales_queries_of_late_positions_stays_its_own"),
    ),
    Mutant(
        "an MLP compared at one size of its input only",
        PARTS,
        "_maps_alike",
        Rewrite("SCALES[:1] if again else SCALES", "SCALES[:1]"),
        blocks("test_an_mlp_that_clamps_large_numbers_stays_its_own"),
    ),
    Mutant(
        "numbers that agreed for other weights still trusted",
        BLOCKS,
        "weight_versions",
        Rewrite("sum(_x for t in _y)", "0"),
        blocks("test_numbers_that_agree_for_some_weights_only_are_read_anew"),
    ),
    Mutant(
        "a sum that is not checked at the end of a block",
        "hf/block_structure.py",
        "structure_of",
        Rewrite("_sums_up(hidden, block.y)", "True"),
        blocks("test_a_block_is_fused_if_it_gives_the_numbers_whoever_wrote_it"),
    ),
    Mutant(
        "elements behind those that are rotated by position are lost",
        "kernels/append/rows.py",
        "rotate_by_position",
        Rewrite("tl.where((_d < _r)[None, :], rotated, _x)", "rotated"),
        tests_of("interpreted/test_triton_append.py")("test_rope"),
    ),
    Mutant(
        "neighbors are rotated the wrong way",
        "kernels/append/rows.py",
        "rotate_neighbors",
        Rewrite("second * c + first * s", "second * c - first * s"),
        tests_of("interpreted/test_triton_append.py")("test_rope"),
    ),
    Mutant(
        "a step recorded with plain blocks replayed for fused ones",
        "hf/graph_generate.py",
        "_Loop._steps",
        Rewrite("(view, self.view.training, self.lookup)", "(None, self.view.training, self.lookup)"),
        blocks("test_the_same_tokens[llama-1]"),
    ),
]

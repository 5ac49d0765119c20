"""Published figures of INT4 decoding attention on tensor cores; none of them was measured here.

"INT4 Decoding GQA CUDA Optimizations for LLM Inference", PyTorch blog, 2024; the kernels are in FBGEMM. One query token, 8 query
heads on one KV head of 128, 8,192 tokens, BF16 queries; 2 to 128 splits, of which the best counts. FD: Flash-Decoding, in Triton.
FA: FlashAttention 2.3.3. CU: their CUDA kernel after ten optimisations; of four groups, before the last four of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from halfbyte.measure.decode import DecodeShape

#: What the figures are of, at each of these batches.
QUERY_HEADS, KV_HEADS, DIM, CONTEXT = 8, 1, 128, 8192
BATCHES = (32, 64, 128, 256, 512)


def _by_batch(*us: int) -> dict[int, int]:
    return dict(zip(BATCHES, us, strict=True))


#: Microseconds by GPU, kernel and batch.
Times = Mapping[str, Mapping[str, Mapping[int, int]]]
TIMES: Times = {
    "A100": {
        "FD BF16": _by_batch(139, 245, 433, 826, 1607),
        "FA BF16": _by_batch(133, 229, 555, 977, 1670),
        "CU BF16": _by_batch(163, 276, 517, 999, 1879),
        "FD INT4": _by_batch(137, 234, 432, 815, 1581),
        "CU INT4": _by_batch(94, 151, 266, 489, 930),
        "FD INT4, 4 groups": _by_batch(129, 219, 392, 719, 1375),
        "CU INT4, 4 groups": _by_batch(99, 161, 282, 509, 965),
    },
    "H100": {
        "FD BF16": _by_batch(91, 148, 271, 515, 1000),
        "FA BF16": _by_batch(90, 146, 298, 499, 1011),
        "CU BF16": _by_batch(100, 183, 308, 556, 1066),
        "FD INT4": _by_batch(70, 113, 205, 389, 756),
        "CU INT4": _by_batch(64, 101, 170, 306, 575),
    },
}
#: The same before the optimisations.
BEFORE: Times = {
    "A100": {
        "CU BF16": _by_batch(183, 335, 596, 1127, 2194),
        "CU INT4": _by_batch(143, 257, 455, 866, 1659),
        "CU INT4, 4 groups": _by_batch(116, 195, 347, 638, 1225),
    },
    "H100": {
        "CU BF16": _by_batch(114, 200, 361, 658, 1260),
        "CU INT4": _by_batch(96, 162, 294, 558, 1066),
    },
}
#: What they hold their INT4 against.
BASELINE = "FD BF16"

#: The ten optimisations of CU INT4 on an A100 at batch 512, one scale a row: microseconds after each; the first line is before.
LADDER: Mapping[str, int] = {
    "before": 1659,
    "loop over K unrolled": 1550,
    "P cast in place, in vectors": 1435,
    "no local memory for the maximum": 1338,
    "none for the sum of a row": 1328,
    "V fetched ahead": 1244,
    "groups, with vector loads": 1244,
    "maximum from the tensor core's fragment": 1206,
    "P written to the fragment": 1143,
    "P swizzled": 1060,
    "padded shared memory for K and V": 930,
}
LADDER_OF = "published, A100, batch 512"


def published(gpu: str, kernel: str, shape: DecodeShape, times: Times = TIMES) -> int | None:
    """Microseconds on this GPU, after the optimisations or `BEFORE`; None where nothing was published."""
    theirs = DecodeShape(shape.batch, QUERY_HEADS, KV_HEADS, DIM, CONTEXT)
    return times[gpu].get(kernel, {}).get(shape.batch) if shape == theirs else None

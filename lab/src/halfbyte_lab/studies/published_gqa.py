"""Published figures of INT4 decoding attention on tensor cores; none of them was measured here.

"INT4 Decoding GQA CUDA Optimizations for LLM Inference", PyTorch blog, 2024; the kernels are in FBGEMM. One query token, 8 query
heads on one KV head of 128, 8,192 tokens, BF16 queries; 2 to 128 splits, of which the best counts. FD: Flash-Decoding, in Triton.
FA: FlashAttention 2.3.3. CU: their CUDA kernel after ten optimisations; of four groups, before the last four of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from halfbyte_lab.measure.caches import DecodeCase
from halfbyte_lab.measure.decode import DecodeShape

#: What the figures are of, at each of these batches.
QUERY_HEADS, KV_HEADS, DIM, CONTEXT = 8, 1, 128, 8192
BATCHES = (32, 64, 128, 256, 512)


def case_of(study: str, batch: int, context: int) -> DecodeCase:
    """What a study measures at one batch, and its name."""
    shape = DecodeShape(batch, QUERY_HEADS, KV_HEADS, DIM, context)
    return DecodeCase(f"{study}, batch {batch} x {context:,}", shape, baselines=True)


def _by_batch(*us: int) -> dict[int, int]:
    return dict(zip(BATCHES, us, strict=True))


#: The optimisations, in order; the first line is before them. Four groups came with the sixth.
STEPS = (
    "before",
    "loop over K unrolled",
    "P cast in place, in vectors",
    "no local memory for the maximum",
    "none for the sum of a row",
    "V fetched ahead",
    "groups, with vector loads",
    "maximum from the tensor core's fragment",
    "P written to the fragment",
    "P swizzled",
    "padded shared memory for K and V",
)
#: Microseconds on an A100 after each step, by kernel and batch.
LADDERS: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "CU INT4": {
        32: (143, 134, 126, 119, 118, 109, 111, 107, 101, 98, 94),
        64: (257, 237, 221, 206, 204, 194, 192, 183, 174, 167, 151),
        128: (455, 422, 395, 368, 364, 345, 346, 333, 317, 299, 266),
        256: (866, 806, 749, 696, 688, 649, 642, 620, 590, 549, 489),
        512: (1659, 1550, 1435, 1338, 1328, 1244, 1244, 1206, 1143, 1060, 930),
    },
    "CU INT4, 4 groups": {
        32: (116, 111, 106, 105, 99),
        64: (195, 187, 180, 174, 161),
        128: (347, 333, 319, 302, 282),
        256: (638, 615, 596, 560, 509),
        512: (1225, 1184, 1138, 1065, 965),
    },
}


def _rung(kernel: str, number: int) -> Mapping[int, int]:
    return {batch: times[number] for batch, times in LADDERS[kernel].items()}


#: Microseconds by GPU, kernel and batch.
Times = Mapping[str, Mapping[str, Mapping[int, int]]]
TIMES: Times = {
    "A100": {
        "FD BF16": _by_batch(139, 245, 433, 826, 1607),
        "FA BF16": _by_batch(133, 229, 555, 977, 1670),
        "CU BF16": _by_batch(163, 276, 517, 999, 1879),
        "FD INT4": _by_batch(137, 234, 432, 815, 1581),
        "CU INT4": _rung("CU INT4", -1),
        "FD INT4, 4 groups": _by_batch(129, 219, 392, 719, 1375),
        "CU INT4, 4 groups": _rung("CU INT4, 4 groups", -1),
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
        "CU INT4": _rung("CU INT4", 0),
        "CU INT4, 4 groups": _rung("CU INT4, 4 groups", 0),
    },
    "H100": {
        "CU BF16": _by_batch(114, 200, 361, 658, 1260),
        "CU INT4": _by_batch(96, 162, 294, 558, 1066),
    },
}
#: "Effective bandwidth" in GB/s of the times above, as it was printed (Table 19), and of those before.
RATES: Times = {
    "A100": {
        "FD BF16": _by_batch(965, 1097, 1240, 1301, 1338),
        "FA BF16": _by_batch(1012, 1175, 968, 1100, 1287),
        "CU BF16": _by_batch(824, 972, 1039, 1075, 1144),
        "FD INT4": _by_batch(262, 305, 331, 351, 362),
        "CU INT4": _by_batch(380, 475, 538, 586, 616),
    },
    "H100": {
        "FD BF16": _by_batch(1481, 1815, 1982, 2087, 2150),
        "FA BF16": _by_batch(1496, 1840, 1802, 2156, 2127),
        "CU BF16": _by_batch(1341, 1470, 1743, 1934, 2015),
        "FD INT4": _by_batch(511, 631, 699, 736, 757),
        "CU INT4": _by_batch(560, 710, 844, 935, 996),
    },
}
RATES_BEFORE: Times = {
    "A100": {"CU BF16": _by_batch(736, 802, 901, 954, 980), "CU INT4": _by_batch(250, 278, 314, 331, 345)},
    "H100": {"CU BF16": _by_batch(1178, 1345, 1487, 1634, 1706), "CU INT4": _by_batch(371, 443, 487, 513, 537)},
}
#: What they hold their INT4 against.
BASELINE = "FD BF16"


def ladder(kernel: str, batch: int) -> list[tuple[str, float]]:
    """Each step's name and seconds, from the sixth step on for four groups."""
    times = LADDERS[kernel][batch]
    return [(name, 1e-6 * us) for name, us in zip(STEPS[-len(times) :], times, strict=True)]


def published(gpu: str, kernel: str, shape: DecodeShape, times: Times = TIMES) -> int | None:
    """Microseconds on this GPU after the optimisations, or another of the tables above; None where nothing was published."""
    theirs = DecodeShape(shape.batch, QUERY_HEADS, KV_HEADS, DIM, CONTEXT)
    return times[gpu].get(kernel, {}).get(shape.batch) if shape == theirs else None

"""From which size on packed data is faster than 16 bits: the rule on a table made by hand, the table that ships, its generator."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfbyte.device import H200
from halfbyte.evals.environment import Environment
from halfbyte.formats import key_format, value_format, weight_format
from halfbyte.plans.crossovers import (
    ATTENTION,
    LINEAR,
    Crossovers,
    Size,
    attention_fact,
    crossing,
    linear_fact,
    numbers,
    shipped,
    sizes_of,
)
from halfbyte.plans.explain import explanation, linear_explanation
from halfbyte_lab.measure.records import Record

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from docgen import crossovers

TABLE: Crossovers = {
    "first": {
        ATTENTION: {
            "int8": {
                "32/1 x 128": {"128 x 128": 0.5, "128 x 512": 1.2, "128 x 2048": 0.99, "128 x 8192": 1.0, "128 x 32768": 1.4},
                "8/1 x 128": {"16 x 1024": 1.5},
                "128/1 x 128": {"128 x 8192": 0.7},
            },
            "int4_channel+int8": {"8/1 x 128": {"1 x 8192": 2.0}},
        },
        LINEAR: {
            "int4_g128": {
                "4096 x 4096": {"1": 3.5, "16": 2.0, "32": 1.25, "64": 0.9, "128": 0.8},
                "8192 x 8192": {"1": 3.0, "64": 1.5},
            },
            "nf4": {"4096 x 4096": {"8": 0.75}},
        },
    },
    "second": {LINEAR: {"int4_g64": {"4096 x 4096": {"1": 4.0}}}},
}


@pytest.mark.parametrize(
    ("times", "first"), [([], 0), ([1.0], 0), ([0.99], 1), ([0.5, 1.0, 2.0], 1), ([2.0, 0.9, 1.1, 1.2], 2), ([2.0, 0.9], 2)]
)
def test_faster_from_the_smallest_size_beyond_which_nothing_is_slower(times: list[float], first: int) -> None:
    sizes = [Size(i, "", t) for i, t in enumerate(times)]
    assert crossing(sizes) == (sizes[first - 1] if first else None, sizes[first] if first < len(sizes) else None)


def attended(
    heads: tuple[int, int],
    batch: int,
    tokens: int,
    formats: tuple[str, str] = ("int8", "int8"),
    dim: int = 128,
    queries: int = 1,
    without: str = "",
) -> str:
    pair = (key_format(formats[0]), value_format(formats[1]))
    return attention_fact((batch, *heads, dim, tokens), queries, pair, without, "first", TABLE)


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [
        (64, "not measured at this size"),
        (128, "packed is slower"),
        (300, "not measured at this size"),
        (512, "packed is faster"),
        (600, "not measured at this size"),
        (2048, "packed is slower"),
        (4096, "not measured at this size"),
        (8192, "packed is faster"),
        (10**6, "packed is faster"),
    ],
)
def test_the_verdict_on_attention_follows_the_sizes_around(tokens: int, verdict: str) -> None:
    assert attended((32, 1), 128, tokens).startswith(f"{verdict}; measured on first with int8, 32/1 heads of 128: faster than")


def test_attention_says_what_was_measured() -> None:
    assert attended((32, 1), 128, 40000) == (
        "packed is faster; measured on first with int8, 32/1 heads of 128: faster than the fastest 16-bit kernel at 128 x 8,192 "
        "tokens and larger (1.00x), slower at 128 x 2,048 tokens (0.99x), 1.40x at 128 x 32,768 tokens, nearby"
    )
    # 128 x 8,192 tokens on one KV head are as much work as 8 sequences of 65,536 tokens on two.
    assert "at 128 x 8,192 tokens and larger (1.00x, as much work as 8 x 65,536 tokens here)" in attended((64, 2), 8, 65536)
    slower = "measured on first with int8, 128/1 heads of 128: slower than the fastest 16-bit kernel at 128 x 8,192 tokens (0.70x)"
    assert attended((128, 1), 128, 8192) == f"packed is slower; {slower}, nothing larger measured"
    assert attended((128, 1), 128, 9000) == f"not measured at this size; {slower}, nothing larger measured"
    assert attended((8, 1), 16, 1024, without="pages") == (
        "packed is faster; measured on first with int8, 8/1 heads of 128, without pages: faster than the fastest 16-bit kernel at "
        "16 x 1,024 tokens and larger (1.50x), nothing smaller measured"
    )


def test_the_least_gain_within_a_factor_of_two_is_told() -> None:
    sizes = {"1 x 1024": 1.1, "1 x 4096": 1.2, "8 x 1024": 1.6, "1 x 16384": 1.7, "8 x 2048": 1.9}
    table = {"first": {ATTENTION: {"int8": {"8/1 x 128": sizes}}}}
    pair = (key_format("int8"), value_format("int8"))

    def told(batch: int, tokens: int, kv_heads: int = 1) -> str:
        return attention_fact((batch, 8 * kv_heads, kv_heads, 128, tokens), 1, pair, "", "first", table)

    assert told(1, 1024, kv_heads=8).endswith(", 1.20x at 1 x 4,096 tokens, nearby")  # eight times the work of 1 x 1,024 there
    assert told(1, 8192).endswith(", 1.20x at 1 x 4,096 tokens, nearby")
    assert told(8, 1024).endswith(", 1.60x at 8 x 1,024 tokens")


def test_attention_takes_the_nearest_case() -> None:
    assert "int8, 8/1 heads" in attended((32, 8), 8, 8192)  # 4 query rows a KV head: 8 are twice as many
    assert "int8, 32/1 heads" in attended((16, 1), 8, 8192)  # 8 and 32 are as far from 16: the less favorable one
    assert "int8, 32/1 heads" in attended((32, 8), 8, 8192, queries=8)
    assert "int8, 8/1 heads" in attended((8, 1), 8, 8192, formats=("int8_g32", "int8_g32"))  # the same codes, 4 % more bytes
    assert "int4_channel+int8, 8/1" in attended((8, 1), 8, 8192, formats=("int4_channel", "int8"))


@pytest.mark.parametrize(
    "other",
    [
        {"heads": (32, 32)},
        {"dim": 64},
        {"formats": ("int4", "int4")},
        {"formats": ("fp8", "fp8")},
        {"queries": 64},
    ],
)
def test_what_is_too_far_was_not_measured(other: dict[str, Any]) -> None:
    assert attended(**{"heads": (8, 1), "batch": 1, "tokens": 8192, **other}).startswith("not measured with ")


def multiplied(n: int, k: int, rows: int, formats: str = "int4_g128", gpu: str = "first") -> str:
    return linear_fact([n], k, [weight_format(formats)], rows, gpu, TABLE)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (1, "packed is faster"),
        (32, "packed is faster"),
        (33, "not measured at this size"),
        (64, "packed is slower"),
        (100, "packed is slower"),
        (129, "not measured at this size"),
    ],
)
def test_the_verdict_on_a_gemm_follows_the_sizes_around(rows: int, verdict: str) -> None:
    assert multiplied(4096, 4096, rows).startswith(f"{verdict}; measured on first with int4_g128 [4096, 4096]: faster than")


def test_a_gemm_says_what_was_measured() -> None:
    assert multiplied(4096, 4096, 2) == (
        "packed is faster; measured on first with int4_g128 [4096, 4096]: faster than the fastest 16-bit kernel at M = 32 and "
        "smaller (1.25x), slower at M = 64 (0.90x), 3.50x at M = 1, nearby"
    )
    assert "at M = 64 and smaller (1.50x), nothing larger measured" in multiplied(16384, 8192, 64)
    assert "[4096, 4096]" in multiplied(4096, 5120, 1)
    slower = (
        "measured on first with nf4 [4096, 4096]: slower than the fastest 16-bit kernel at M = 8 (0.75x), nothing smaller measured"
    )
    assert multiplied(4096, 4096, 8, "nf4") == f"packed is slower; {slower}"
    assert multiplied(4096, 4096, 1, "nf4") == f"not measured at this size; {slower}"
    assert "int4_g64 [4096, 4096]" in multiplied(4096, 4096, 1, gpu="second")
    assert multiplied(4096, 4096, 1, gpu="third").startswith(
        "not measured on this GPU; measured on first with int4_g128 [4096, 4096]: "
    )
    assert "int4_g128" in multiplied(4096, 4096, 1, "int4_g64")  # the same codes, 3 % more bytes
    for far in (multiplied(1024, 4096, 1), multiplied(4096, 32768, 1), multiplied(4096, 4096, 1, "mxfp4")):
        assert far.startswith("not measured with ")
    both = [weight_format("int4_g128"), weight_format("nf4")]
    assert linear_fact([2048, 2048], 4096, both, 1, "first", TABLE).startswith("not measured with int4_g128, nf4 or ")
    assert "[4096, 4096]" in linear_fact([2048, 2048], 4096, both[:1] * 2, 1, "first", TABLE)


# --------------------------------------------------------------------------------------------------------------- what ships


def test_explain_agrees_with_every_measured_size() -> None:
    """At a measured size the verdict is that of the table, in both directions; nothing in it is unknown to the library."""
    checked = 0
    for gpu, ops in shipped().items():
        for op, formats in ops.items():
            for name, shapes in formats.items():
                for shape, measured in shapes.items():
                    sizes = sizes_of(op, shape, measured)
                    keys, _, values = name.partition("+")
                    for size in measured:
                        if op == ATTENTION:
                            (q, kv, dim), (batch, tokens) = numbers(shape), numbers(size)
                            pair = (keys, values or keys)
                            facts = explanation(batch, q, kv, dim, tokens, 1, *pair, 0, "bf16", False, H200._replace(name=gpu))
                            label = f"{batch} x {tokens:,} tokens"
                        else:
                            n, k = numbers(shape)
                            facts = linear_explanation([n], k, [name], int(size), "bf16", H200._replace(name=gpu))
                            label = f"M = {size}"
                        at = next(s.at for s in sizes if s.label == label)
                        faster = {s.times >= 1 for s in sizes if s.at == at}
                        verdict = (
                            "not measured at this size"
                            if len(faster) > 1
                            else f"packed is {'faster' if True in faster else 'slower'}"
                        )
                        assert facts["16 bits"].startswith(verdict), facts
                        assert f"measured on {gpu} with {name}" in facts["16 bits"]
                        checked += 1
    assert checked > 300
    assert crossovers.FILE.stat().st_size < 12_000


def test_explain_says_what_of_a_problem_was_not_measured() -> None:
    shape = (128, 8, 1, 128, 8192)
    facts = explanation(*shape, 2, "int8", "int8", 64, "bf16", True, H200, window=(64, 64))
    assert "heads of 128, without pages, sink and recent tokens, batch invariance, further new tokens: " in facts["16 bits"]
    assert "16 bits" not in explanation(*shape, 1, "bf16", "bf16", 0, "bf16", False, H200)
    assert explanation(*shape, 1, "int8", "int8", 0, "bf16", False, H200._replace(name=""))["16 bits"].startswith(
        "not measured on this"
    )
    facts = explanation(128, 33, 1, 128, 8192, 1, "int8", "int8", 0, "bf16", False, H200, window=(64, 64))
    assert facts["16 bits"] == "not measured with the portable kernel"
    facts = linear_explanation([4096, 4096], 4096, ["nf4", "int4_g128"], 1, "bf16", H200)
    assert facts["16 bits"] == "not measured with the portable kernel"


# ------------------------------------------------------------------------------------------------------------- the generator


def record(formats: str, seconds: float | None, date: str, **other: Any) -> Record:
    """One of a linear layer on a GPU of some name."""
    where = Environment("a GPU", "580.1", 1, {}, "", "", date)
    made = Record(
        LINEAR, {"M": 4, "N": 64, "K": 128}, formats, other.pop("implementation", "halfbyte auto"), 1, where, case="a case"
    )
    return replace(made, seconds=seconds, **other)


def test_the_newest_run_with_a_16_bit_time_counts_and_runs_are_not_mixed() -> None:
    cublas, humming = {"implementation": "cuBLAS"}, {"implementation": "humming"}
    runs = [
        record("bf16", 4.0, "2", **cublas),
        record("bf16", 3.0, "2", **cublas | {"implementation": "another"}),
        record("nf4", 2.0, "2"),
        record("nf4", 0.1, "2", **humming),
        record("bf16", 9.0, "1", **cublas),
        record("nf4", 1.0, "1"),
        record("nf4", 0.5, "3"),  # nothing in 16 bits ran with it
        record("bf16", None, "4", refused="why", **cublas),
        record("nf4", 0.5, "4"),
    ]
    assert crossovers.of_machine(runs) == {LINEAR: {"nf4": {"64 x 128": {"4": 1.5}}}}
    newer = [record("bf16", 0.996, "5", **cublas), record("nf4", 1.0, "5")]
    assert crossovers.of_machine([*newer, *runs]) == {LINEAR: {"nf4": {"64 x 128": {"4": 0.99}}}}  # not rounded to as fast
    assert crossovers.of_machine([record("nf4", 1.0, "5")]) == {}


def test_attention_of_studies_counts_without_alibi_or_outliers() -> None:
    shape = {"B": 128, "Hq": 32, "H": 8, "D": 128, "T": 2048}
    for op in crossovers.ATTENTION_OPS:
        run = [record(f, s, "1", op=op, shape=shape) for f, s in (("fp16", 3.0), ("int8", 2.0))]
        assert crossovers.of_machine(run) == {ATTENTION: {"int8": {"32/8 x 128": {"128 x 2048": 1.5}}}}
    assert crossovers.of_machine([replace(r, shape={**shape, "ALiBi": 1}) for r in run]) == {}
    assert crossovers.of_machine([replace(r, op="append") for r in run]) == {}

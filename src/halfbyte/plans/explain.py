"""Plans of decode attention and of GEMMs with quantized weights in words, for `halfbyte explain`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from halfbyte.cache_options import token_bytes
from halfbyte.device import GPU, H200
from halfbyte.errors import check
from halfbyte.formats import check_window, key_format, value_format, weight_format
from halfbyte.plans.decode_attention import MOST_SEQUENCES, gluon_plan, queries_of_a_block
from halfbyte.plans.decode_portable import portable_plan
from halfbyte.plans.decode_problem import dense_problem
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_portable import portable_tiles
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.gemm_slabs import describe_slabs, expanded
from halfbyte.plans.tuning_cache import NO_TABLE, Table, plan_by_table
from halfbyte.reference.hadamard import block_size
from halfbyte.settings import check_half

#: More facts about a plan of a tuned kernel: what `resources` of the laboratory finds by compiling it.
Resources = Callable[[Any, Any, tuple[int, int]], Mapping[str, str]]


def no_resources(problem: object, plan: object, capability: tuple[int, int]) -> dict[str, str]:
    """Nothing is compiled."""
    return {}


def explanation(
    batch: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    capacity: int,
    queries: int,
    keys: str,
    values: str,
    page: int,
    dtype: str,
    deterministic_batch: bool,
    gpu: GPU,
    window: tuple[int, int] = (0, 0),
    resources: Resources = no_resources,
) -> dict[str, str]:
    """Facts by name, in reading order. Raises `InvalidArgument` naming the size at fault.

    `window`: sink and recent tokens.
    """
    check(0 < min(q_heads, kv_heads) <= q_heads < 2**31, f"heads={q_heads}/{kv_heads}; both must be above 0 and below 2^31")
    for name, size in {"batch": batch, "dim": dim, "capacity": capacity, "queries": queries}.items():
        check(0 < size < 2**31, f"{name}={size}; it must be above 0 and below 2^31")
    check(q_heads % kv_heads == 0, f"heads={q_heads}/{kv_heads}; query heads must be a multiple of KV heads")
    check_half(dtype)
    check(page >= 0, f"page={page}; tokens of a page, or 0 for contiguous memory")
    k, v = key_format(keys), value_format(values)
    for name, fmt in (("keys", k), ("values", v)):
        fmt.check_shape((1, 1, page or fmt.token_block or 1, dim), f"{name}={fmt.name!r}: a {'page' if page else 'head'}")
    check_window(*window, k, v, capacity)
    p = dense_problem(
        dtype, batch, kv_heads, q_heads // kv_heads, queries, dim, capacity, k.name, v.name, page, deterministic_batch
    )
    p = replace(p, sink_tokens=window[0], recent_tokens=window[1])
    facts = _described(gpu)
    facts["work"] = f"{batch * kv_heads} work items (a KV head of a sequence), {p.rows} query rows each"
    per_token = token_bytes(k, 1, dim) + token_bytes(v, 1, dim)
    facts["bytes"] = f"{per_token:g} a token and KV head, {per_token * batch * kv_heads * capacity / 1e6:,.1f} MB when full"
    if sum(window):
        exact = 4 * dim * sum(window) * batch * kv_heads
        facts["window"] = f"{window[0]} sink tokens and {window[1]} recent ones in 16 bits, {exact / 1e6:,.1f} MB"
    if p.rotate_keys:
        facts["rotation"] = f"keys are stored rotated, in blocks of {block_size(dim)} dims; queries are rotated as they are loaded"
    block = queries_of_a_block(p, gpu.capability)
    if block:
        count = -(-queries // block)
        facts["blocks"] = (
            f"{count} a sequence, of {block} new tokens, {block * p.group} query rows; each is partitioned as a sequence"
        )
        p = replace(p, queries=block, batch=min(MOST_SEQUENCES, batch * count))
    plan = gluon_plan(p, gpu.num_sms, gpu.capability, True)
    if isinstance(plan, DecodePlan):
        return facts | plan.describe() | dict(resources(p, plan, gpu.capability))
    return facts | {"not gluon": plan} | portable_plan(p, gpu.num_sms, gpu.capability).describe(p)


# ------------------------------------------------------------------------------------------------------------ linear layers


def linear_explanation(
    features: Sequence[int],
    width: int,
    weights: Sequence[str],
    rows: int,
    dtype: str,
    gpu: GPU,
    table: Table = NO_TABLE,
    resources: Resources = no_resources,
) -> dict[str, str]:
    """As `explanation`, for x [rows, width] times one weight (`linear`), or two or three in one launch, of these out features.

    `weights`: one format for all of them, or one each. `table`: the measured plans of that GPU. x is contiguous and no weight has
    an act-order.
    """
    check(len(features) in (1, 2, 3), f"{len(features)} weights; a launch computes one, two (gate and up) or three (q, k and v)")
    check(len(weights) in (1, len(features)), f"weights={','.join(weights)!r}; give one format, or one for each of {len(features)}")
    for name, size in {
        "rows": rows,
        "in features": width,
        "out features": min(features),
        "all out features": sum(features),
    }.items():
        check(0 < size < 2**31, f"{name}={size}; it must be above 0 and below 2^31")
    check_half(dtype)
    formats = [weight_format(name) for name in weights] * (len(features) // len(weights))
    for fmt, n in zip(formats, features, strict=True):
        fmt.check_shape((n, width), f"weights={fmt.name!r}: a weight")
    facts = _described(gpu)
    shapes = ", ".join(f"{fmt} [{n}, {width}]" for fmt, n in zip(formats, features, strict=True))
    facts["work"] = f"x [{rows}, {width}] times {shapes}"
    weight_bytes = sum(fmt.nbytes((n, width)) for fmt, n in zip(formats, features, strict=True))
    bits = 8 * weight_bytes / (sum(features) * width)
    xy_bytes = 2 * rows * (width + sum(features))
    facts["bytes"] = f"{weight_bytes / 1e6:,.2f} MB of weights, {bits:.2f} bits a number; {xy_bytes / 1e6:,.2f} MB of x and y"
    problem = GemmProblem(tuple(zip(formats, features, strict=True)), rows, width, dtype)
    plan, source = plan_by_table(problem, gpu, True, table)
    if isinstance(plan, GemmPlan):
        kernel, *rest = plan.describe(rows).items()
        return facts | dict([kernel, ("plan", source), *rest, *resources(problem, plan, gpu.capability).items()])
    if expanded(problem):
        return facts | {"not gluon": plan} | describe_slabs(problem)
    return facts | {"not gluon": plan} | portable_tiles(problem, gpu).describe(problem)


def _described(gpu: GPU) -> dict[str, str]:
    check(gpu.num_sms > 0, f"sms={gpu.num_sms}; a GPU has at least one multiprocessor")
    note = "" if gpu.capability == H200.capability else f"; the rules were found on an {H200.name} and have not run on such a GPU"
    return {"gpu": f"{gpu.num_sms} multiprocessors, compute capability {gpu.capability[0]}.{gpu.capability[1]}{note}"}

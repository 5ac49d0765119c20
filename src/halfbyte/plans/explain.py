"""A plan of decode attention in words, for `halfbyte explain`."""

from __future__ import annotations

from halfbyte.errors import check
from halfbyte.formats import key_format, value_format
from halfbyte.plans.decode_attention import GluonPlan, Problem, gluon_plan
from halfbyte.plans.triton_decode import triton_tiles


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
    sm_count: int,
    capability: tuple[int, int],
) -> dict[str, str]:
    """Facts by name, in the order in which they are to be read. Raises `InvalidArgument` naming the size at fault."""
    for name, size in {"batch": batch, "heads": kv_heads, "dim": dim, "capacity": capacity, "queries": queries}.items():
        check(size > 0, f"{name}={size}; it must be above 0")
    check(q_heads % kv_heads == 0, f"heads={q_heads}/{kv_heads}; query heads must be a multiple of KV heads")
    check(dtype in ("fp16", "bf16"), f"dtype={dtype!r}; choose fp16 or bf16")
    k, v = key_format(keys), value_format(values)
    p = Problem(
        *(dtype, batch, kv_heads, q_heads // kv_heads, queries, dim, dim, capacity, k.name, v.name, page),
        *(True, False, False, False, False, False, deterministic_batch),
    )
    facts = {"gpu": f"{sm_count} multiprocessors, compute capability {capability[0]}.{capability[1]}"}
    facts["work"] = f"{batch * kv_heads} units (a KV head of a sequence), {p.rows} query rows each"
    per_token = (k.nbytes((1, 1, 32, dim)) + v.nbytes((1, 1, 32, dim))) / 32
    facts["bytes"] = f"{per_token:g} a token and KV head, {per_token * batch * kv_heads * capacity / 1e6:,.1f} MB when full"
    tuned = gluon_plan(p, sm_count, capability, True)
    return facts | (_tuned(tuned) if isinstance(tuned, GluonPlan) else {"not gluon": tuned} | _portable(p, sm_count, capability))


def _tuned(plan: GluonPlan) -> dict[str, str]:
    spec = plan.spec
    return {
        "kernel": "gluon, the tuned one",
        "tile": f"{spec.tile} tokens: {spec.warps} warps of {spec.tokens}; {spec.padded_rows} query rows side by side",
        "ring": f"{spec.stages} tiles, {spec.shared_bytes / 1024:.0f} KB of shared memory a program",
        "programs": f"{plan.programs}; each takes an equal share of the true lengths, counted on the device",
        "splits": "where shares meet inside a unit; the program that arrives last adds the parts up, in their order",
    }


def _portable(p: Problem, sm_count: int, capability: tuple[int, int]) -> dict[str, str]:
    tiles = triton_tiles(
        key_format(p.keys),
        value_format(p.values),
        batch=p.batch,
        heads=p.heads,
        rows=p.rows,
        capacity=p.capacity,
        dim=p.dim,
        processors=sm_count,
        capability=capability,
        chunk=1024 if p.deterministic_batch else 0,
    )
    share = f"{tiles.chunk} tokens each, whatever the batch" if tiles.chunk else "equal shares of a sequence's true length"
    return {
        "kernel": "triton, the portable one",
        "tile": f"{tiles.block_tokens} tokens by {tiles.block_rows} query rows, {tiles.num_warps} warps, {tiles.num_stages} stages",
        "programs": f"{p.batch * p.heads * tiles.splits * -(-p.rows // tiles.block_rows)}",
        "splits": f"{tiles.splits} a unit, {share}; a second kernel adds them up in their order",
    }

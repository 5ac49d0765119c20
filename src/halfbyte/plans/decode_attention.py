"""How decode attention is compiled and partitioned: pure functions of the problem and the device.

`gluon_plan` says how the tuned kernel would run a problem, or why it cannot. Lengths are not part of a problem: the host fixes
the number of programs, and each takes its share of the true lengths on the device, so that a captured graph stays valid.
"""

from __future__ import annotations

from dataclasses import replace

from halfbyte.device import GPU, Capability, block_shared_memory, supports_pdl, supports_wgmma
from halfbyte.errors import Unsupported
from halfbyte.formats import kv_format
from halfbyte.plans.decode_portable import TritonTiles, portable_plan
from halfbyte.plans.decode_problem import DTYPES, DecodeProblem
from halfbyte.plans.decode_shapes import MOST_ROWS, fastest, latents, many_rows
from halfbyte.plans.decode_spec import DecodePlan, DecodeSpec
from halfbyte.plans.kv_codec import KVSpec, kv_spec, padded
from halfbyte.reference.hadamard import block_size

#: The tuned kernel counts tokens in 32 bits: the most tokens (of all heads) and sequences of a call.
MOST_TOKENS, MOST_SEQUENCES = 2**32, 4096
#: Query rows per KV head times head_dim that the registers of the kernel for few rows hold, and dims with tokens in 16 bits.
MOST_NUMBERS, MOST_EXACT_DIMS = 4096, 256


def gluon_plan(p: DecodeProblem, num_sms: int, capability: Capability, use_pdl: bool) -> DecodePlan | str:
    """How the tuned kernel runs this problem, or the reason why it cannot."""
    refusal = _refusal(p, capability)
    keys = kv_spec(kv_format(p.keys), p.dim, p.k_token_stride, p.k_scale_stride)
    values = kv_spec(kv_format(p.values), p.value_dim, p.v_token_stride, p.v_scale_stride)
    if refusal or isinstance(keys, str) or isinstance(values, str):
        return refusal or next(s for s in (keys, values) if isinstance(s, str))
    limit = block_shared_memory(capability)
    spec = DecodeSpec(
        keys,
        values,
        warps=4,
        tokens=16,
        stages=2,
        rows=p.rows,
        padded_rows=max(8, padded(p.rows)),
        queries=p.queries,
        batch=padded(p.batch),
        page=p.page,
        window=p.window,
        alibi=p.alibi,
        softcap=p.softcap,
        use_pdl=use_pdl and supports_pdl(capability),
        heads=_heads(keys, values, p.heads),
        rotate=block_size(p.dim) if p.rotate_keys else 0,
        sink_tokens=p.sink_tokens,
        recent_tokens=p.recent_tokens,
    )
    if p.latent:
        return latents(spec, p, num_sms, limit, supports_wgmma(capability))
    dim = max(p.dim, p.value_dim)
    if spec.tail_rows and (dim > MOST_EXACT_DIMS or spec.padded_rows * dim > MOST_NUMBERS):
        exact, most = f"sink_tokens={p.sink_tokens}, recent_tokens={p.recent_tokens}", MOST_NUMBERS // min(dim, MOST_EXACT_DIMS)
        return f"{exact}; the tuned kernel reads them for {most} query rows per KV head at most, and heads of {MOST_EXACT_DIMS}"
    if spec.padded_rows * dim <= MOST_NUMBERS:
        return fastest(spec, p, num_sms, limit)
    if p.deterministic_batch or not supports_wgmma(capability):
        where = "with deterministic_batch" if p.deterministic_batch else "on this GPU"
        return f"{p.rows} query rows of {dim} per KV head exceed the registers of the tuned kernel {where}"
    return many_rows(spec, p, num_sms, limit)


def queries_of_a_block(p: DecodeProblem, capability: Capability) -> int:
    """New tokens per block, for a call with more query rows than a tuned kernel holds; 0: do not divide the call.

    On Hopper as many as the wgmma kernel takes, if it reads these keys and values: not with sink or recent tokens, for instance.
    """
    if p.latent:
        return 0
    narrow = MOST_NUMBERS // max(p.dim, p.value_dim)
    if p.rows <= narrow:
        many = p.batch > MOST_SEQUENCES or p.batch * p.heads * p.capacity > MOST_TOKENS
        one = replace(p, batch=1)
        return p.queries if many and p.deterministic_batch and isinstance(gluon_plan(one, 1, capability, True), DecodePlan) else 0
    if p.deterministic_batch:
        p = replace(p, batch=1)  # blocks are launched in several pieces if necessary
    for rows in (MOST_ROWS, narrow) if supports_wgmma(capability) else (narrow,):
        queries = min(p.queries, rows // p.group)
        # The answer does not depend on the number of SMs.
        if queries and isinstance(gluon_plan(replace(p, queries=queries), 1, capability, True), DecodePlan):
            return queries if queries < p.queries else 0
    return 0


def ragged_blocks(p: DecodeProblem, most: int, capability: Capability) -> DecodeProblem:
    """Ragged queries, at most `most` per sequence, as a tuned kernel takes them: each block of them becomes a sequence."""
    even = replace(p, ragged=False, batch=1, queries=most)
    queries = queries_of_a_block(even, capability) or most
    if p.deterministic_batch:  # as many as fill 8 query rows; a decode has the same bits alone
        queries = min(most, max(1, 8 // p.group))
    if p.queries == p.batch * most:
        return replace(even, queries=queries, batch=p.batch * -(-most // queries))
    return replace(even, queries=queries, batch=p.queries // queries + p.batch + 1)  # padding behind them is one sequence more


def plan_of(p: DecodeProblem, level: str, gpu: GPU, use_pdl: bool) -> DecodePlan | TritonTiles:
    """The plan of a problem by its level, "auto" by the best that can. Raises `Unsupported` when the requested level cannot."""
    if p.dtype not in DTYPES.values():
        raise Unsupported(f"q is {p.dtype}; the {level} kernel takes float16 and bfloat16 queries; use impl='auto'")
    if level != "triton":
        plan = gluon_plan(p, gpu.num_sms, gpu.capability, use_pdl)
        if isinstance(plan, DecodePlan):
            return plan
        if level == "gluon":
            raise Unsupported(f"impl='gluon' cannot run this call: {plan}; use impl='auto', which takes the portable kernel here")
    return portable_plan(p, gpu.num_sms, gpu.capability if use_pdl else (8, 0))


def plans_of(p: DecodeProblem, level: str, most: int, gpu: GPU, use_pdl: bool) -> tuple[DecodePlan | TritonTiles, ...]:
    """The launches of a call, several for more blocks than the tuned kernel counts.

    most: the largest number of queries of a sequence, of ragged ones. Raises as `plan_of`.
    """
    blocks = _blocks(p, most, gpu.capability) if p.dtype in DTYPES.values() and level != "triton" else None
    if blocks is not None:
        room = max(1, min(MOST_SEQUENCES, MOST_TOKENS // max(1, p.heads * p.capacity)))
        plans = []
        for first in range(0, blocks.batch, room):
            count = min(room, blocks.batch - first)
            plan = plan_of(replace(blocks, batch=count), level, gpu, use_pdl)
            if isinstance(plan, DecodePlan):  # two kernels, for up to 64 sequences and for more, serve blocks of all prompts
                spec = replace(plan.spec, batch=64 if plan.spec.batch <= 64 else MOST_SEQUENCES)
                plans.append(replace(plan, spec=spec, blocks=count, first_block=first))
        if plans:
            return tuple(plans)
    return (plan_of(p, level, gpu, use_pdl),)


def _blocks(p: DecodeProblem, most: int, capability: Capability) -> DecodeProblem | None:
    """The blocks of a call as sequences; None: it has none."""
    if not p.ragged:
        queries = queries_of_a_block(p, capability)
        return replace(p, queries=queries, batch=p.batch * -(-p.queries // queries)) if queries else None
    if p.page and not p.latent and not (p.sink_tokens or p.recent_tokens or kv_format(p.keys).token_block):
        return ragged_blocks(p, most, capability)
    return None


def _refusal(p: DecodeProblem, capability: Capability) -> str:
    """Why the tuned kernel cannot run a problem, most checks of formats aside; "" if it can."""
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the tuned kernel needs 8.0"
    if p.ragged:
        return "ragged queries; the tuned kernel takes blocks of them, over pages of keys without a tail"
    if not p.aligned:
        codes = "codes are not aligned to 16 bytes, not contiguous along a head, or the queries span 2^31 elements or more"
        return codes + (", or the tail of the keys is not contiguous" if kv_format(p.keys).token_block else "")
    for name, dim in ((p.keys, p.dim), (p.values, p.value_dim)):
        fmt = kv_format(name)
        row = dim * fmt.code.bits // 8
        if p.deterministic_batch and not p.page and row % 32:
            return f"deterministic_batch: the capacity decides whether heads of {row} bytes are aligned"
        if not fmt.is_quantized and fmt.name != p.dtype:
            return f"{p.dtype} queries over {fmt.name} keys or values"
    if p.page and (p.page & (p.page - 1) or p.page < 16):
        return f"pages of {p.page} tokens; the tuned kernel reads pages of a power of two from 16 on"
    if p.batch * p.heads * p.capacity > MOST_TOKENS:
        return f"{p.batch} x {p.heads} x {p.capacity} tokens exceed the limit of {MOST_TOKENS}"
    if p.batch > MOST_SEQUENCES:
        return f"{p.batch} sequences exceed the limit of {MOST_SEQUENCES}"
    return ""


def _heads(keys: KVSpec, values: KVSpec, heads: int) -> int:
    """KV heads per work item: two, where the codes of a head and token are under 128 bytes, between other heads' codes.

    Such pieces do not reach full memory bandwidth; those of two adjacent heads do. If only values are narrow, it makes no
    difference.
    """
    return 2 if heads % 2 == 0 and all(s.pairs and 2 * s.words < 128 for s in (keys, values)) else 1

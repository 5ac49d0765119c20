"""`prefill_attention`: a chunk of new tokens over itself in 16 bits and over the packed past, merged by log-sum-exp."""

from __future__ import annotations

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import check
from halfbyte.formats import plain_format
from halfbyte.kv_buffer import AttentionOptions, Cache, DecodeCall, KVBuffer
from halfbyte.ops import _fused
from halfbyte.ops._library import can_bypass_dispatcher, can_bypass_on_cpu, kernel_level
from halfbyte.ops.decode_attention import attend, checked, options_of
from halfbyte.ops.merge_states import merged
from halfbyte.plans.decode_attention import MOST_NUMBERS
from halfbyte.plans.decode_shapes import MOST_ROWS
from halfbyte.plans.prompts import bucket
from halfbyte.reference import attention as reference
from halfbyte.tensors import LatentHeads


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: Cache,
    *,
    sm_scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    return_lse: bool = False,
    appended: bool = True,
    begins: bool = False,
    latent_heads: LatentHeads | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a new chunk over itself, unquantized, and over the packed past, merged by log-sum-exp.

    q [B, Hq, L, D]; k [B, H, L, D] and v [B, H, L, Dv] are the chunk's own keys and values, which `cache.append` has already
    stored as each sequence's last L tokens; appended=False: it has not, and the cache holds what came before. begins=True: nothing
    came before, and the cache, in which some of the last tokens may be missing (padding), is not read. Options and result as in
    `decode_attention`; `starts` counts from the cache's start. latent_heads: the cache holds latents (MLA), which these expand; k
    and v, expanded, have as many heads as q.

    With impl="auto" torch's fused kernels attend a long chunk to itself where they can (16 bits, heads of up to 256, of values no
    larger than of keys, no softcap, no ALiBi; on a CPU, if it multiplies bf16, that alone, and no shorter window).
    """
    is_latent = latent_heads is not None
    check(not is_latent or sm_scale is not None, "sm_scale is None; with latent_heads pass that of the model's own heads")
    options = options_of(cache, sm_scale, alibi_slopes, window, softcap, sinks, starts)
    call = DecodeCall(q, cache.keys, cache.values, cache.lengths, None, cache.page_table, options, impl, latent=is_latent)
    call = checked(call._replace(q=q[..., :1].expand(*q.shape[:3], call.query_dim)) if is_latent else call)
    options = call.options
    for name, x, buffer in (("k", k, cache.keys), ("v", v, cache.values)):
        sizes = (q.shape[1], "D") if is_latent else (buffer.heads, buffer.dim)
        check_tensor(name, x, (q.shape[0], sizes[0], q.shape[2], sizes[1]), device=q.device)
    own = options._replace(sinks=None, rotate_keys=False)
    level, parts = kernel_level("decode_attention", impl, q, "q"), []
    if not (begins or _fresh(cache, q.shape[2] * appended)):
        past = cache.lengths - q.shape[2] * appended
        of_cache = q if latent_heads is None else latent_heads.absorbed(q)
        over_past = call._replace(q=of_cache, query_start=past, options=options._replace(sinks=None, ends=past))
        out, lse = _attended(over_past, level)
        parts.append((out if latent_heads is None else latent_heads.expanded(out), lse))
        own = own if options.starts is None else own._replace(starts=(options.starts - past).clamp_min(0))
    parts.append(_over_itself(q, k, v, own, impl, level))
    out, lse = parts[0]
    if len(parts) > 1 or sinks is not None:
        merge = reference.merge_states if level in ("cpu", "reference") else merged
        out, lse = merge([part[0] for part in parts], [part[1] for part in parts], options.sinks)
    return (out, lse) if return_lse else out


def _fresh(cache: Cache, length: int) -> bool:
    """Whether the host knows that the cache holds only the newest `length` tokens."""
    bound = getattr(cache, "length_bound", None) if cache.lengths.shape[0] else None
    check(bound is None or bound >= length, f"k holds {length} tokens and the longest sequence {bound}: append the chunk first")
    return bound == length


def _over_itself(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: AttentionOptions, impl: str, chosen: str) -> _fused.Part:
    """Attention of the chunk over its own keys and values; by torch's kernels if the tuned one cannot hold all query rows."""
    if chosen == "auto" and can_bypass_dispatcher(q, k, v) and q.shape[1] // k.shape[1] * q.shape[2] * q.shape[3] > MOST_NUMBERS:
        result = _fused.causal(q, k, v, o)
        if result is not None:
            return result
    if (impl, chosen) == ("auto", "cpu") and not torch.compiler.is_compiling():
        with torch.autocast("cpu", enabled=False):  # which changes no type here, either
            if can_bypass_on_cpu(q, k, v) and (part := _fused.on_cpu(q, k, v, o)) is not None:
                return part
    lengths = torch.full(q.shape[:1], q.shape[2], dtype=torch.int32, device=q.device)
    keys, values = (KVBuffer(plain_format(x.dtype), x) for x in (k, v))
    return _attended(DecodeCall(q, keys, values, lengths, torch.zeros_like(lengths), None, o, impl), chosen)


def _attended(call: DecodeCall, level: str) -> _fused.Part:
    """`attend`; a kernel, which is compiled for its number of queries, gets a few more, whose results are dropped."""
    tokens = call.q.shape[2]
    if level in ("cpu", "reference") or torch.compiler.is_compiling() or not 1 < tokens <= MOST_ROWS:
        return attend(call)
    q = torch.nn.functional.pad(call.q, (0, 0, 0, bucket(tokens) - tokens))
    out, lse = attend(call._replace(q=q))
    return out[:, :, :tokens], lse[:, :, :tokens]

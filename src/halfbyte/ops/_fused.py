"""Attention of a prompt's 16-bit tokens over themselves by torch's fused kernels.

Nothing there is quantized, and cuDNN and FlashAttention are as fast as the tensor cores; so is torch's kernel on a CPU that
multiplies bf16. halfbyte's part is to ask them for the log-sum-exp, by which the past is added, and to say what they cannot do.
"""

from __future__ import annotations

from itertools import product

import torch
from torch.nn.attention import SDPBackend

from halfbyte.device import cpu_has_bf16
from halfbyte.kv_buffer import AttentionOptions

_FLASH, _CUDNN = SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value
#: The limit of the grid axis on which FlashAttention has sequences.
_MOST_SEQUENCES = 65_535

Part = tuple[torch.Tensor, torch.Tensor]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: AttentionOptions) -> Part | None:
    """q [B, Hq, L, D] over k [B, H, L, D] and v, each token over those before it and itself: out and its lse, float32 [B, Hq, L].

    Of the options sm_scale, window and `starts`, which count from the chunk's first token. None: torch has no such kernel.
    (In place of ALiBi's distance FlashAttention adds slope * position of the key, which shifts the log-sum-exp.)
    """
    if not _suits(q, k, v, o) or q.shape[0] == 0 or q.shape[2] <= 1:
        return None
    value_dim = v.shape[-1]
    q, k, v = map(_aligned, (q, k, _widened(v, q)))
    with torch.autocast(q.device.type, enabled=False):  # some of these ops would be given another type
        if o.starts is None and (o.window is None or o.window >= q.shape[2]):
            result = _whole(q, k, v, o.sm_scale)
        else:
            result = _pieces(q, k, v, o)
    return None if result is None else (result[0][..., :value_dim], result[1])


def on_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: AttentionOptions) -> Part | None:
    """`causal` on a CPU, KV head by KV head, without copies of keys for each query head. Padding is left out, so that each sequence
    has the bits that it has alone.
    """
    has_window = o.window is not None and o.window < q.shape[2]
    if not _suits(q, k, v, o) or has_window or q.dtype is not torch.bfloat16 or not cpu_has_bf16() or q.shape[2] <= 1:
        return None
    value_dim, group, v = v.shape[-1], q.shape[1] // k.shape[1], _widened(v, q)
    starts = [0] * len(q) if o.starts is None else o.starts.clamp(0, q.shape[2]).tolist()
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)

    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for b, head in product(range(len(q)), range(k.shape[1])):
        if (first := starts[b]) < q.shape[2]:
            heads = slice(head * group, (head + 1) * group)
            kv = (x[b : b + 1, head : head + 1, first:].expand(-1, group, -1, -1) for x in (k, v))
            result = attend(q[b : b + 1, heads, first:], *kv, 0.0, True, scale=o.sm_scale)
            out[b, heads, first:], lse[b, heads, first:] = result[0][0], result[1][0]
    return out[..., :value_dim], lse


def ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, most: int, o: AttentionOptions) -> Part | None:
    """`causal` of q [T, Hq, D] over k [T, H, D] and v, tokens bounds[b] .. bounds[b + 1] by themselves, at most `most` each.

    out, and lse [T, Hq]; tokens behind the last bound see nothing.
    """
    if not _suits(q, k, v, o) or not _takes_ragged(q, len(bounds) - 1):
        return None
    bounds = bounds.clamp(0, len(q)).cummax(0).values  # whatever it holds, no kernel leaves q
    out, lse = _flash(_aligned(q), _aligned(k), _aligned(_widened(v, q)), bounds, most, o)
    out = out[..., : v.shape[-1]]
    padding = torch.arange(len(q), device=q.device) >= bounds[-1]  # which is not written
    lse = lse.t().contiguous()  # else its strides hold T, for which the kernel that merges would be compiled
    return out.masked_fill(padding[:, None, None], 0), lse.masked_fill(padding[:, None], -torch.inf)


def _suits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: AttentionOptions) -> bool:
    """Whether torch has kernels for these types, sizes and options."""
    alike = q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    sizes = q.shape[-1] >= v.shape[-1] and q.shape[-1] % 8 == 0 and 8 <= q.shape[-1] <= 256
    return alike and sizes and o.softcap is None and o.alibi_slopes is None and o.sm_scale > 0


def _widened(v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Values with zeros behind them, as wide as queries: kernels take one size (keys of MLA have rotary dims besides)."""
    missing = q.shape[-1] - v.shape[-1]
    return torch.nn.functional.pad(v, (0, missing)) if missing else v


def _takes_ragged(q: torch.Tensor, sequences: int) -> bool:
    """Whether FlashAttention supports so many ragged sequences."""
    cuda = torch.backends.cuda
    is_there = cuda.is_flash_attention_available() and cuda.flash_sdp_enabled() and 0 < sequences <= _MOST_SEQUENCES
    return is_there and len(q) > 0 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, most: int, o: AttentionOptions) -> Part:
    """FlashAttention of rows q [T, Hq, D] within the sequences that begin at `bounds`: out, and lse [Hq, T]."""
    window = (None, None) if o.window is None else (o.window - 1, 0)
    with torch.autocast(q.device.type, enabled=False):  # it would be given another type
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, bounds, bounds, most, most, 0.0, True, False),
            scale=o.sm_scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )
    return out, lse


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, copied if it is not aligned for 16-byte loads."""
    *apart, last = x.stride()
    return x if last == 1 and x.data_ptr() % 16 == 0 and all(n % 8 == 0 for n in apart) else x.contiguous()


def _whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> Part | None:
    """By the kernel that torch's scaled_dot_product_attention would take, if it is one of the two that give the log-sum-exp."""
    gqa = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=sm_scale, enable_gqa=gqa)
    if choice == _CUDNN:
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=sm_scale)
    elif choice == _FLASH:
        results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=sm_scale)
    else:
        return None
    return results[0], results[1].view(q.shape[:3])


def _pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: AttentionOptions) -> Part | None:
    """By FlashAttention over sequences of any length, of which each sequence here is two: its padding, and the rest."""
    batch, heads, length, dim = q.shape
    if not _takes_ragged(q, 2 * batch):
        return None
    starts = torch.zeros(batch, dtype=torch.int32, device=q.device) if o.starts is None else o.starts.clamp(0, length)
    begin = torch.arange(batch, dtype=torch.int32, device=q.device) * length
    bounds = torch.cat([torch.stack([begin, begin + starts], 1).flatten(), begin.new_full((1,), batch * length)])
    q, k, v = (x.transpose(1, 2).reshape(batch * length, x.shape[1], dim) for x in (q, k, v))
    out, lse = _flash(q, k, v, bounds, length, o)
    out = out.view(batch, length, heads, dim).transpose(1, 2)
    lse = lse.view(heads, batch, length).transpose(0, 1)
    padded = torch.arange(length, device=q.device) < starts[:, None]
    return out.masked_fill(padded[:, None, :, None], 0), lse.masked_fill(padded[:, None, :], -torch.inf)

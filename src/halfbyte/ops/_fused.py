"""Attention of 16-bit tokens over themselves by torch's own fused kernels: what a prompt's tokens do among each other.

Nothing there is quantised, and cuDNN and FlashAttention are as fast as the tensor cores. halfbyte's part is to ask them for the
log-sum-exp, by which the past is added, and to say what they cannot do.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from halfbyte.planes import AttentionOptions

_FLASH, _CUDNN = SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value


def suits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: AttentionOptions) -> bool:
    """Whether torch has a fused kernel for these: 16 bits of one type, heads of equal size up to 256, neither softcap nor ALiBi.

    FlashAttention adds slope * position of the key in place of ALiBi's distance, which shifts the log-sum-exp. It may have been
    switched off, by torch.nn.attention.sdpa_kernel for instance.
    """
    alike = q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    sizes = q.shape[3] == v.shape[3] and q.shape[3] % 8 == 0 and 8 <= q.shape[3] <= 256
    plain = o.softcap is None and o.alibi_slopes is None and o.sm_scale > 0
    return alike and sizes and plain and torch.backends.cuda.flash_sdp_enabled()


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, L, D] over k [B, H, L, D] and v, each token over those before it and itself: out and its lse, float32 [B, Hq, L].

    Of the options: sm_scale, window and `starts`, which count from the chunk's first token.
    """
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    if o.starts is None and (o.window is None or o.window >= q.shape[2]):
        return _whole(q, k, v, o.sm_scale)
    return _pieces(q, k, v, o)


def _whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """By whichever kernel torch's scaled_dot_product_attention would take, of the two that also give the log-sum-exp."""
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=sm_scale, enable_gqa=grouped)
    if choice == _CUDNN:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=sm_scale)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=sm_scale)
    return found[0], found[1].view(q.shape[:3])


def _pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """By FlashAttention over sequences of any length, of which each sequence here is two: its padding, and the rest."""
    batch, heads, length, dim = q.shape
    starts = torch.zeros(batch, dtype=torch.int32, device=q.device) if o.starts is None else o.starts.clamp(0, length)
    begin = torch.arange(batch, dtype=torch.int32, device=q.device) * length
    bounds = torch.cat([torch.stack([begin, begin + starts], 1).flatten(), begin.new_full((1,), batch * length)])
    rows = [x.transpose(1, 2).reshape(batch * length, x.shape[1], dim) for x in (q, k, v)]
    before = None if o.window is None else o.window - 1
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *rows, bounds, bounds, length, length, 0.0, True, False,
        scale=o.sm_scale, window_size_left=before, window_size_right=None if before is None else 0,
    )  # fmt: skip
    out = out.view(batch, length, heads, dim).transpose(1, 2)
    lse = lse.view(heads, batch, length).transpose(0, 1)
    padded = torch.arange(length, device=q.device) < starts[:, None]
    return out.masked_fill(padded[:, None, :, None], 0), lse.masked_fill(padded[:, None, :], -torch.inf)

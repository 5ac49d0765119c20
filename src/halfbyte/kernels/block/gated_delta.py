"""One token of the gated delta rule in one launch: convolution, gates, the state and the norm, as in `reference/gated_delta.py`.

    u = decay k^T S        delta = beta (v - u)        S = decay S + k delta        y = decay q^T S + (q . k) delta

A program takes a value head of a sequence. Its state [Dk, Dv] stays in registers and is written once; the L2 cache gets it while
the launch before ends. Both sums are over the old state, so that neither waits for the other. A state of [128, 128] is 64 KB; fewer
columns a program would fill more of the SMs at batch size 1, and take the norm, which is over all of them, into a second launch.

Value heads of one key head read the same columns of the convolution's state. The last of them to have read writes, behind all else,
so no program waits; a counter for each key head is zero between launches.

Whatever a module rounds to 16 bits is rounded here at the same place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.codes import INTERPRETED, rounded
from halfbyte.plans.compiled_for import CompiledFor
from halfbyte.reference.gated_delta import LENGTH_EPS, DeltaCall

#: Numbers of a state that a thread holds: with fewer, a query has fewer numbers than there are threads, and the compiler lets each
#: of them compute as much of it as its part of the state needs.
_A_THREAD = 128


@dataclass(frozen=True)
class Sizes(CompiledFor):
    """What the kernel is compiled for: sizes of heads, tokens of the convolution, value heads of a key head; powers of two."""

    dk: int
    dv: int
    taps: int
    group: int
    rows: int
    columns: int


@triton.jit
def _silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); what 1 + u rounds away of a small u is put back by the quotient."""
    u = tl.exp(-tl.abs(x))
    w = 1 + u
    return tl.maximum(x, 0.0) + tl.where(w == 1, u, tl.log(w) * (u / (w - 1)))


@triton.jit
def _tokens(x, channel, inside, conv, taps: tl.constexpr, INTERPRETED: tl.constexpr):
    """The last `taps` tokens of some channels, the oldest first; x: where the newest ones lie."""
    tokens = ()
    for tap in tl.static_range(1, taps):
        tokens += (tl.load(conv + channel * taps + tap, mask=inside, other=0.0),)
    tokens += (rounded(tl.load(x, mask=inside, other=0.0).to(tl.float32), conv, INTERPRETED),)
    return tokens


@triton.jit
def _convolved(tokens, channel, inside, weight, bias, like, taps: tl.constexpr, INTERPRETED: tl.constexpr):
    """silu(conv) of some channels in f32."""
    total = channel.to(tl.float32) * 0
    for tap in tl.static_range(taps):
        total += tokens[tap].to(tl.float32) * tl.load(weight + channel * taps + tap, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    total = rounded(total, weight, INTERPRETED).to(tl.float32)
    total = rounded(_silu(total), weight, INTERPRETED).to(tl.float32)
    return rounded(total, like, INTERPRETED).to(tl.float32)


@triton.jit
def _keep(x, channel, inside, conv, taps: tl.constexpr, INTERPRETED: tl.constexpr):
    """Tokens read once more: to hold them meanwhile takes registers. No thread writes before all have read."""
    tokens = _tokens(x, channel, inside, conv, taps, INTERPRETED)
    tl.debug_barrier()
    for tap in tl.static_range(taps):
        tl.store(conv + channel * taps + tap, tokens[tap], mask=inside)


@triton.jit
def _prefetch(state, offsets):
    """Lines of 128 bytes into the L2 cache."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [state + offsets], tl.int32, is_pure=False, pack=1)


@triton.jit
def _of_length_one(x, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def gated_delta(
    q, k, v, z, b, a, strides, conv_weight, conv_bias, a_log, dt_bias, norm, conv, state, out, counters,
    heads, channels, share, scale, beta_scale, eps, length_eps,
    S: tl.constexpr, USE_PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A value head of a sequence. strides: of q, k, v, z, b and a by sequence, key head and, but for q and k, value head of it."""
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head, own = head // S.group, head % S.group
    i, j = tl.arange(0, S.rows), tl.arange(0, S.columns)
    in_k, in_v = i < S.dk, j < S.dv
    T: tl.constexpr = S.taps
    state += (batch * heads + head) * (S.dk * S.dv)
    if USE_PDL:
        LINE: tl.constexpr = 1024 // state.dtype.element_ty.primitive_bitwidth
        line = tl.arange(0, S.rows * S.columns // LINE) * LINE
        _prefetch(state, tl.minimum(line, S.dk * S.dv - 1))
        gdc_wait()
        gdc_launch_dependents()
    conv += batch * (channels * T)
    of_query = key_head * S.dk + i
    of_key = heads // S.group * S.dk + of_query
    of_value = 2 * (heads // S.group * S.dk) + head * S.dv + j
    q += batch * strides[0][0] + key_head * strides[0][1] + i
    k += batch * strides[1][0] + key_head * strides[1][1] + i
    v += batch * strides[2][0] + key_head * strides[2][1] + own * strides[2][2] + j
    queries = _tokens(q, of_query, in_k, conv, T, INTERPRETED)
    keys = _tokens(k, of_key, in_k, conv, T, INTERPRETED)
    values = _tokens(v, of_value, in_v, conv, T, INTERPRETED)
    in_b = tl.load(b + batch * strides[4][0] + key_head * strides[4][1] + own * strides[4][2]).to(tl.float32)
    in_a = tl.load(a + batch * strides[5][0] + key_head * strides[5][1] + own * strides[5][2]).to(tl.float32)
    rate, shift = tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    z += batch * strides[3][0] + key_head * strides[3][1] + own * strides[3][2]
    gate = tl.load(z + j, mask=in_v, other=0.0).to(tl.float32)
    factor = tl.load(norm + j, mask=in_v, other=0.0).to(tl.float32)
    at = state + i[:, None] * S.dv + j[None, :]
    whole = in_k[:, None] & in_v[None, :]
    old = tl.load(at, mask=whole, other=0.0).to(tl.float32)

    query = _convolved(queries, of_query, in_k, conv_weight, conv_bias, q, T, INTERPRETED)
    key = _convolved(keys, of_key, in_k, conv_weight, conv_bias, q, T, INTERPRETED)
    value = _convolved(values, of_value, in_v, conv_weight, conv_bias, q, T, INTERPRETED)
    query, key = _of_length_one(query, length_eps) * scale, _of_length_one(key, length_eps)
    beta = rounded(1 / (1 + tl.exp(-in_b)), b, INTERPRETED).to(tl.float32) * beta_scale
    decay = tl.exp(-tl.exp(rate) * _softplus(in_a + shift))
    delta = (value - decay * tl.sum(old * key[:, None], 0)) * beta
    y = decay * tl.sum(old * query[:, None], 0) + tl.sum(query * key, 0) * delta
    tl.store(at, rounded(old * decay + key[:, None] * delta[None, :], state, INTERPRETED), mask=whole)

    y = rounded(y, q, INTERPRETED).to(tl.float32)
    y = rounded(y * tl.rsqrt(tl.sum(y * y, 0) * share + eps), q, INTERPRETED).to(tl.float32)
    y = rounded(y * factor, norm, INTERPRETED).to(tl.float32)
    to = out + (batch * heads + head) * S.dv
    tl.store(to + j, rounded(y * _silu(gate), out, INTERPRETED), mask=in_v)

    _keep(v, of_value, in_v, conv, T, INTERPRETED)
    if S.group == 1:
        is_last = True
    else:
        counter = counters + batch * (heads // S.group) + key_head
        is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == S.group - 1
    if is_last:
        _keep(q, of_query, in_k, conv, T, INTERPRETED)
        _keep(k, of_key, in_k, conv, T, INTERPRETED)
        if S.group > 1:
            tl.store(counter, 0)


def launch(call: DeltaCall, counters: torch.Tensor, use_pdl: bool) -> None:
    """A checked call in fp16, bf16 or fp32. q, k, v and z have contiguous dims; counters: int32 zeros [B, Hk]. Nothing is empty."""
    projections, w, (batch, key_heads, group, dv), dk = call[:6], call.weights, call.v.shape, call.q.shape[2]
    sizes = Sizes(dk, dv, w.conv.shape[1], group, triton.next_power_of_2(dk), triton.next_power_of_2(dv))
    gated_delta[(key_heads * group, batch)](
        *projections, tuple(t.stride()[: 2 if i < 2 else 3] for i, t in enumerate(projections)),
        w.conv, w.conv_bias, w.a_log, w.dt_bias, w.norm, call.conv_state, call.state, call.out, counters,
        key_heads * group, call.conv_state.shape[1], 1 / dv, dk**-0.5, w.beta_scale, w.eps, LENGTH_EPS,
        S=sizes, USE_PDL=use_pdl, INTERPRETED=INTERPRETED,
        num_warps=max(4, sizes.rows * sizes.columns // (32 * _A_THREAD)), **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip

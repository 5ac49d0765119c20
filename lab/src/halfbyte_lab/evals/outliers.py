"""The shipped model with the outliers of large models: other numbers in its cache and its weights, the same answers in 16 bits.

Attention multiplies a query channel by the key channel of the same number, o_proj undoes what v_proj does to a value channel, and
a linear layer undoes what the norm in front of it does to its input. So one side can grow by 2^e while the other shrinks:

    k_proj rows * 2^e, q_proj rows / 2^e      both channels of a rotary pair alike, as RoPE mixes them
    v_proj rows * 2^e, o_proj columns / 2^e
    columns of linear layers * 2^e, norm weight / 2^e

Powers of two only change exponents: with a 16-bit cache every logit is equal bit for bit. Per-channel scales follow such outliers
exactly, too. They cannot follow those of some tokens only, which no exact transformation makes: `BY_TOKEN` is a model of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfbyte.errors import Unsupported
from halfbyte.reference.rope import apply_rope, rope_tables
from halfbyte.text import heldout_text


@dataclass(frozen=True)
class Outliers:
    """Outlier channels, as exponents e: each grows by 2^e.

    keys      one entry for each rotary pair of a KV head, from the slowest pair on, in every layer
    end_keys  the same in the first and in the last layer
    spikes    the same for keys of line ends alone, which grow by 2^e of the channel's RMS; not undone
    values    one entry for each value channel, from the first on
    columns   one entry for each input channel of q, k, v, gate and up projections, from the first on
    """

    name: str
    source: str
    keys: tuple[float, ...] = ()
    end_keys: tuple[float, ...] = ()
    spikes: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    columns: tuple[float, ...] = ()


#: Large keys sit in the slowest rotary pairs, at the same places in all heads and layers, 5 times the mean and more; values have
#: none (arXiv 2502.01563). No source says by how much weights or values are out of line; the factors of `columns` and `values` are
#: assumed, for 1 % of the channels as in AWQ (arXiv 2306.00978).
PROFILES: tuple[Outliers, ...] = (
    Outliers(
        "Llama-3",
        "arXiv 2502.01563: queries and keys above 5 times the mean in the slowest pairs of every layer",
        keys=(3,),
        values=(1,),
        columns=(2, 2),
    ),
    Outliers(
        "Qwen3",
        "SAW-INT4 on Qwen3-4B-Thinking: token-wise INT4 keys bring GPQA from 66.7 to 0, rotated ones to 65.8. No source has the "
        "magnitudes; these do the same to the shipped model",
        keys=(5, 2),
        columns=(2, 2),
    ),
    Outliers(
        "Qwen2.5",
        "Qwen2.5-7B: in the first layer a fifth of the key channels are out of line, by up to 272 / 1.7 in RMS, 5 % elsewhere "
        "(TheTom/turboquant_plus#45); key biases have norms of 605 and 921 in the first and the last layer, 22 elsewhere "
        "(ggml-org/llama.cpp#21385)",
        keys=(2, 2),
        end_keys=(7, 5, 4, 3, 2, 2),
        columns=(2, 2),
    ),
)
#: Factors that are no powers of two, and keys that are out of line where a line ends.
BY_TOKEN = Outliers(
    "by token",
    "arXiv 2402.17762: massive activations at the first token and at delimiters. Which keys they make, and how large, is assumed",
    keys=(math.log2(6), math.log2(3)),
    spikes=(3.5, 2.5),
    columns=(math.log2(3), math.log2(5)),
)
#: Bytes of text in which line ends are told from other tokens.
_READ = 4096


@torch.no_grad()
def with_outliers(model: Any, outliers: Outliers) -> Any:
    """A copy of a Llama-like model that computes the same in 16 bits and has these outliers. Raises `Unsupported` for others."""
    variant = copy.deepcopy(model)
    config, layers = variant.config, getattr(getattr(variant, "model", None), "layers", ())
    if not layers or not all(map(_is_like_llama, layers)):
        raise Unsupported(f"{type(model).__name__}: outliers are put into models with Llama's layers only")
    dim, kv_heads = config.head_dim, config.num_key_value_heads
    queries = config.num_attention_heads // kv_heads
    for number, layer in enumerate(layers):
        ends = outliers.end_keys if number in (0, len(layers) - 1) else ()
        pairs = _factors(ends or outliers.keys, dim // 2, like=layer.self_attn.k_proj.weight).flip(0)
        keys, values = torch.cat([pairs, pairs]), _factors(outliers.values, dim, like=layer.self_attn.v_proj.weight)
        attention, mlp = layer.self_attn, layer.mlp
        _scale_rows(attention.k_proj, keys.repeat(kv_heads))
        _scale_rows(attention.q_proj, (1 / keys).repeat(kv_heads * queries))
        _scale_rows(attention.v_proj, values.repeat(kv_heads))
        attention.o_proj.weight.mul_((1 / values).repeat(kv_heads * queries))
        for norm, linears in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            columns = _factors(outliers.columns, norm.weight.numel(), like=norm.weight)
            norm.weight.div_(columns)
            for linear in linears:
                linear.weight.mul_(columns)
    if outliers.spikes:
        _add_spikes(variant, outliers.spikes)
    return variant


def _add_spikes(model: Any, exponents: tuple[float, ...]) -> None:
    """Keys of line ends grow, in the slowest rotary pairs: each row of k_proj gets a direction that only they have."""
    text = torch.tensor([list(heldout_text().encode()[-_READ:])], device=model.device)
    inputs: list[torch.Tensor] = []
    hooks = [layer.input_layernorm.register_forward_hook(lambda m, x, y: inputs.append(y[0])) for layer in model.model.layers]
    try:
        for part in text.split(_READ // 4, 1):
            model(input_ids=part, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    ends, depth, dim = (text[0] == ord("\n")).float(), len(hooks), model.config.head_dim
    for number, layer in enumerate(model.model.layers):
        x, weight = torch.cat(inputs[number::depth]).float(), layer.self_attn.k_proj.weight
        ridge = x.T @ x + 1e-3 * (x.T @ x).diagonal().mean() * torch.eye(x.shape[1], device=x.device)
        direction = torch.linalg.solve(ridge, x.T @ (ends - ends.mean()))
        direction /= (x[ends > 0] @ direction).mean()
        for place, exponent in enumerate(exponents):
            low = dim // 2 - 1 - place
            for row in (at for head in range(0, len(weight), dim) for at in (head + low, head + low + dim // 2)):
                rms = (x @ weight[row].float()).square().mean().sqrt()
                weight[row] += (2.0**exponent * rms * direction).to(weight.dtype)


def _is_like_llama(layer: Any) -> bool:
    """Whether a layer has the projections of Llama. A norm of queries and keys would undo what is done to theirs."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    return hasattr(attention, "q_proj") and not hasattr(attention, "q_norm") and hasattr(mlp, "gate_proj")


def _factors(exponents: tuple[float, ...], size: int, *, like: torch.Tensor) -> torch.Tensor:
    """2^e for the first channels, 1 for the others: [size], in the dtype of a weight."""
    factors = torch.ones(size, dtype=like.dtype, device=like.device)
    factors[: len(exponents)] = torch.tensor([2.0**e for e in exponents], dtype=like.dtype, device=like.device)
    return factors


def _scale_rows(linear: Any, factors: torch.Tensor) -> None:
    linear.weight.mul_(factors[:, None])
    if linear.bias is not None:
        linear.bias.mul_(factors)


#: The channels of each head that a key bias shifts, up and down, and how far: as in Qwen2's first and last layers.
BIASED, BIAS = (3, 5), 200.0


@dataclass(frozen=True)
class Heads:
    """One layer in bf16: q [B, Hq, 1, D] of the newest token, k and v [B, H, T, D] of all, rotated by position."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def with_key_bias(self) -> Heads:
        """The same with a constant added to two channels of every key, rounded to bf16 again.

        In exact arithmetic that changes no output, as it adds the same to all scores of a query: what it changes is rounding.
        """
        bias = torch.zeros(self.k.shape[-1], device=self.k.device)
        bias[BIASED[0]], bias[BIASED[1]] = BIAS, -BIAS
        return replace(self, k=(self.k.float() + bias).to(self.k.dtype))


@torch.no_grad()
def recorded_heads(model: Any, ids: torch.Tensor) -> list[Heads]:
    """Heads of every layer of a Llama-like model while it reads `ids`, int64 [B, T]. It has halfbyte's attention."""
    from halfbyte.hf.cache import PackedCache
    from halfbyte.hf.model_support import CACHE

    queries: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, given: object, out: torch.Tensor) -> None:
        queries.append(out[:, -1:])

    blocks, config = model.model.layers, model.config
    cache = PackedCache(model, ids.shape[1], keys="bf16", values="bf16")
    hooks = [block.self_attn.q_proj.register_forward_hook(keep) for block in blocks]
    try:
        model(input_ids=ids.to(model.device), **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    rope = rope_tables(torch.tensor([ids.shape[1] - 1], device=model.device), config.head_dim, config.rope_parameters["rope_theta"])

    def heads(q: torch.Tensor, held: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Heads:
        k, v = (t[:, :, : ids.shape[1]].bfloat16() for t in held())
        return Heads(apply_rope(q.unflatten(-1, (-1, config.head_dim)).transpose(1, 2), *rope).bfloat16().contiguous(), k, v)

    return [heads(q, layer.kv.dequantized) for q, layer in zip(queries, cache.layers, strict=True)]

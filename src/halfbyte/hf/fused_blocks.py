"""A decoder's blocks in few launches: `model.generate(..., custom_generate=halfbyte.hf.generate, fuse_blocks=True)`.

    q, k, v = projections(norm(hidden))                 one launch; one more for norms of q and k over all heads (OLMo 2)
    norms of each head, positions, append; attention    two
    hidden += o_proj(attention)                         one, and what the norm of hidden needs; one more for a norm behind a branch
    act(gate) * up = projections(norm(hidden))          one
    hidden += down_proj                                 as o_proj

So with a tuned kernel for the weights, bf16 and up to 16 rows (`halfbyte.ops.block_linear`); otherwise norms with the sum before
them, and activations, have launches of their own.

What a family's block has is in `FAMILIES`, everything else is found by structure: projections fused in the checkpoint (Phi-3),
norms of q and k (Qwen 3, OLMo 2), sinks, sizes and counts of heads. A part without a description, such as a mixture of
experts, is called as it is.

`fused_view` makes a shallow copy of the model with other blocks: forwards of the family's own classes, over the same parameters.
The model is not changed. Blocks are for decoding, of a model with a packed cache, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from halfbyte.hf.attention import CACHE, attention
from halfbyte.hf.model_support import blocks, layer_window
from halfbyte.hf.weights import all_agree, all_reduce_of, partial_layer
from halfbyte.kv_buffer import HeadNorms, Rope, RopeLike
from halfbyte.nn import FusedProjections, FusedSlot, QuantLinear
from halfbyte.ops.all_reduce import AllReduce
from halfbyte.ops.block import add_norm, gated, norm_rows
from halfbyte.ops.block_linear import Rows, Unscaled, add_projection, gated_projection, halves, projected
from halfbyte.ops.linear import linear
from halfbyte.reference.block import Norm


class Description(NamedTuple):
    """A family's block.

    kind                                its norms, see `Norm`
    before_attention, after_attention   norms by name; None where a branch has none there
    before_mlp, after_mlp
    mlp                                 the name of what follows attention
    interleaved                         pairs that are rotated by position are interleaved, see `Rope`
    rotates                             whether an attention's q and k are rotated by position
    """

    kind: str
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    mlp: str = "mlp"
    interleaved: bool = False
    rotates: Callable[[Any], bool] = lambda attention: bool(getattr(attention, "use_rope", True))


def _rotates_in_windows(attention: Any) -> bool:
    """EXAONE's rule: where some layers have a window, only those."""
    return attention.sliding_window is None or bool(attention.is_sliding)


#: Families whose block is Llama's, by the kind of their norms. Their attention is Llama's too, perhaps with norms of q and k.
_PLAIN = {
    "rounded": [
        *("Arcee", "AriaText", "Cwm", "Dots1", "Emu3", "Glm4Moe", "Granite", "GraniteSWA", "HYV3", "Llama", "Mellum", "MiniMaxM2"),
        *("Ministral", "Mistral", "Mixtral", "Olmoe", "Phi3", "Phi4Multimodal", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"),
        *("SeedOss", "SmolLM3", "SolarOpen"),
    ],
    "exact": ["GptOss"],
    "offset": ["Gemma"],
}
_OLMO = Description("exact", None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GEMMA = Description(
    "offset", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
#: By the class of a block, among transformers' own.
FAMILIES = {
    **{f"{family}DecoderLayer": Description(kind) for kind, families in _PLAIN.items() for family in families},
    **dict.fromkeys(("FlexOlmoDecoderLayer", "Olmo2DecoderLayer", "Olmo3DecoderLayer"), _OLMO),
    **dict.fromkeys(("Gemma2DecoderLayer", "Gemma3DecoderLayer"), _GEMMA),
    "ApertusDecoderLayer": Description("rounded", "attention_layernorm", None, "feedforward_layernorm"),
    "Exaone4DecoderLayer": _OLMO._replace(kind="rounded", rotates=_rotates_in_windows),
    "ExaoneMoeDecoderLayer": Description("rounded", rotates=_rotates_in_windows),
    "GraniteMoeDecoderLayer": Description("rounded", mlp="block_sparse_moe"),
    **dict.fromkeys(
        ("Ernie4_5DecoderLayer", "Ernie4_5_MoeDecoderLayer", "GlmDecoderLayer"), Description("rounded", interleaved=True)
    ),
    "Glm4DecoderLayer": Description(
        "rounded", after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm", interleaved=True
    ),
    "HeliumDecoderLayer": Description("exact", interleaved=True),
    "HyperCLOVAXDecoderLayer": Description("rounded", after_attention="post_norm1", after_mlp="post_norm2"),
    "VaultGemmaDecoderLayer": Description("offset", before_mlp="pre_feedforward_layernorm"),
}
#: Classes of activations that `gated` knows.
_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh"}


def fused_view(model: Any) -> Any | None:
    """`model` with fused blocks, over the same parameters; None for a family without a description, or where hooks want to run.

    Tensor-parallel ranks all call it, and get a view all or none: fused blocks add up partial sums in another way.
    """
    layers = blocks(model)
    path = next((name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and list(m) == layers), "")
    parent = model.get_submodule(path.rpartition(".")[0])
    known = bool(layers) and all(map(_is_described, layers)) and path.endswith("layers") and hasattr(parent, "norm")
    if not all_agree(model, known and not model.training and not any(map(_is_watched, _running(model, path)))):
        return None
    family, norms = _family(layers[0]), [_norms_of(layer) for layer in layers]
    last, ahead, rotary_dim = _norm(parent.norm, family.kind), _Ahead(), _rotary_dim(parent)
    tables, all_reduce = _Tables(rotary_dim, family.interleaved), all_reduce_of(model)
    made = [
        FusedBlock(layer, (*own, following), ahead, _heads_of(layer.self_attn, family, tables, rotary_dim), all_reduce)
        for layer, own, following in zip(layers, norms, [*(n[0] for n in norms[1:]), last], strict=True)
    ]
    inner: dict[str, nn.Module] = {"layers": nn.ModuleList(made), "norm": _FinalNorm(last, ahead)}
    return _viewed(model, path.split(".")[:-1], inner)


def _viewed(module: nn.Module, path: list[str], children: dict[str, nn.Module]) -> nn.Module:
    """A copy of `module` that shares everything, but for the `children` of the module at `path`."""
    if path:
        children = {path[0]: _viewed(module.get_submodule(path[0]), path[1:], children)}
    view: nn.Module = object.__new__(type(module))
    vars(view).update({**vars(module), "_modules": {**module._modules, **children}})
    return view


def _running(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules whose forwards run, or would have run, in a view: those around the blocks, and all within them."""
    parts = path.split(".")[:-1]
    yield from (model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1))
    yield from (m for layer in model.get_submodule(path).children() for m in layer.modules())


def _is_described(layer: nn.Module) -> bool:
    kind = type(layer)
    return kind.__name__ in FAMILIES and kind.__module__.startswith("transformers.models.")


def _family(layer: nn.Module) -> Description:
    return FAMILIES[type(layer).__name__]


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody wants to see a module's calls (hooks, accelerate's offloading), or has replaced its forward."""
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    return hooked or ("forward" in vars(module) and not _is_parallel(module))


def _is_parallel(module: nn.Module) -> bool:
    """Whether transformers replaced the forward of a linear layer for tensor parallelism: a view calls those that reduce or gather.

    So it does for norms of q and k, whose gradients it adds up: nothing is trained here.
    """
    forward = vars(module)["forward"]
    norm = getattr(forward, "__qualname__", "").startswith("ReplicatedWithGradAllReduce.")  # a partial has no name
    theirs = getattr(forward, "__module__", None) == "transformers.distributed.tensor_parallel"
    return theirs and (norm or isinstance(module, nn.Linear | QuantLinear))


def _norm(module: Any, kind: str) -> Norm:
    return Norm(module.weight, module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps, kind)


def _norms_of(layer: Any) -> list[Norm | None]:
    """The norms of a block, in the order of `Description`."""
    family = _family(layer)
    names = family.before_attention, family.after_attention, family.before_mlp, family.after_mlp
    modules = [nn.Identity() if name is None else getattr(layer, name) for name in names]
    return [None if isinstance(module, nn.Identity) else _norm(module, family.kind) for module in modules]


class _Ahead:
    """What a block has normalized for the next one, along with its own result."""

    held: tuple[torch.Tensor, Rows] | None = None

    def take(self, hidden: torch.Tensor, norm: Norm | None) -> Rows:
        """norm(hidden), which was computed with `hidden`, unless this is the first block."""
        held, self.held = self.held, None
        if norm is None:
            return hidden
        return held[1] if held is not None and held[0] is hidden else norm_rows([hidden], [norm])[0]


class _FinalNorm(nn.Module):
    """The norm behind the last block."""

    def __init__(self, norm: Norm | None, ahead: _Ahead) -> None:
        super().__init__()
        self.norm, self.ahead = norm, ahead

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _whole(self.ahead.take(hidden, self.norm))


class FusedBlock(nn.Module):
    """A decoder block with its `norms` in the order of `Description`, then that of what comes behind it.

    heads: how its attention finds q, k and v; None: it is called as it is. all_reduce: as in `add_norm`.
    """

    def __init__(
        self, layer: Any, norms: Sequence[Norm | None], ahead: _Ahead, heads: _Heads | None, all_reduce: AllReduce | None
    ) -> None:
        super().__init__()
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp, self.following = norms
        self.ahead, self.all_reduce, self.multiplier = ahead, all_reduce, float(getattr(layer, "residual_multiplier", 1.0))
        self.attend: _Branch = _as_it_is(layer.self_attn) if heads is None else heads.attend
        self.mlp: _Branch = _mlp(getattr(layer, _family(layer).mlp))

    def forward(self, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        """hidden [B, L, N] and what the family's block is given, by keyword."""
        x = self.ahead.take(hidden, self.before_attention)
        hidden, x = self._sum(*self.attend(x, **given), hidden, self.after_attention, self.before_mlp)
        hidden, x = self._sum(*self.mlp(x), hidden, self.after_mlp, self.following)
        self.ahead.held = hidden, x
        return hidden

    def _sum(
        self, x: torch.Tensor, last: nn.Module | None, hidden: torch.Tensor, after: Norm | None, before: Norm | None
    ) -> tuple[torch.Tensor, Rows]:
        """The sum of the residual and a branch, whose `last` layer is left to do, and that sum normalized."""
        made: Rows | None
        if after is None and (quantized := _quantized(last)):
            hidden, made = add_projection(x, quantized.weight, quantized.bias, hidden, before, multiplier=self.multiplier)
            return hidden, hidden if made is None else made
        all_reduce = None
        if self.all_reduce is not None and (partial := partial_layer(last)):
            x, all_reduce = linear(x, partial.weight), self.all_reduce
        elif last is not None:
            x = last(x)
        hidden, made = add_norm(x, hidden, before, after=after, multiplier=self.multiplier, all_reduce=all_reduce)
        return hidden, hidden if made is None else made


#: Given x and what the family's block is given: what the last layer of a branch multiplies, and that layer; None: nothing is left.
_Branch = Callable[..., tuple[torch.Tensor, nn.Module | None]]


def _as_it_is(module: nn.Module) -> _Branch:
    """A module without a description."""

    def forward(x: Rows, **given: Any) -> tuple[torch.Tensor, None]:
        made = module(_whole(x), **given)
        return (made[0] if isinstance(made, tuple) else made), None  # a mixture returns the scores of its router, too

    return forward


def _mlp(module: Any) -> _Branch:
    """A gated MLP in two launches; any other as it is."""
    activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", getattr(module, "activation_fn", None))).__name__)
    if activation is None or not hasattr(module, "down_proj"):
        return _as_it_is(module)
    both = [module.gate_up_proj] if hasattr(module, "gate_up_proj") else [module.gate_proj, module.up_proj]

    def forward(x: Rows) -> tuple[torch.Tensor, nn.Module]:
        layers: list[Any] = [_quantized(layer) for layer in both]
        if any(layer is None or layer.weight.perm is not None or layer.weight.nested is not None for layer in layers):
            gate, up = (t for y in _project(x, both) for t in y.chunk(2 // len(both), -1))
            return gated(gate, up, activation), module.down_proj
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        if len(both) == 1:
            weights, biases = halves(weights[0], biases[0])
        return gated_projection(x, weights, biases, activation), module.down_proj

    return forward


def _whole(x: Rows) -> torch.Tensor:
    """Rows whose norm is finished, by a launch of its own if need be."""
    return x.normalized() if isinstance(x, Unscaled) else x


def _quantized(layer: Any) -> Any:
    """A layer whose weight is quantized, fused before or not, and whose output needs no other rank; else None."""
    known = type(layer) in (QuantLinear, FusedProjections, FusedSlot)
    return layer if known and layer.parallel_style in (None, "colwise") else None


def _project(x: Rows, layers: Sequence[nn.Module]) -> Sequence[torch.Tensor]:
    """x [..., K] by each of up to three layers: in one launch where all are quantized, fused before or not; else one by one.

    So are weights in act-order, each of which has an order of its own.
    """
    quantized: list[Any] = [_quantized(layer) for layer in layers]
    if None in quantized or (len(layers) > 1 and any(layer.weight.perm is not None for layer in quantized)):
        x = _whole(x)
        return [layer(x) for layer in layers]
    return projected(x, [layer.weight for layer in quantized], [layer.bias for layer in quantized])


# ---------------------------------------------------------------------------------------------------------------- attention


class _Tables:
    """cos and sin of a step as `append` takes them, made once for all blocks.

    Two pairs are held, as layers with a window may rotate at another base (Gemma 3).
    """

    held: tuple[tuple[torch.Tensor, Rope], ...] = ()

    def __init__(self, rotary_dim: int, interleaved: bool) -> None:
        self.half, self.interleaved = rotary_dim // 2, interleaved

    def __call__(self, embeddings: RopeLike, batch: int) -> Rope:
        """float32 [B, L, R/2], or [L, R/2] where all sequences are alike, from cos and sin [1 or B, L, R or R/2]."""
        for of, made in self.held:
            if of is embeddings[0]:
                return made
        cos, sin = (t[..., : self.half].float().contiguous() for t in embeddings[:2])
        made = Rope(*((cos, sin) if len(cos) == batch else (cos[0], sin[0])), self.interleaved)
        self.held = (*self.held[-1:], (embeddings[0], made))
        return made


def _rotary_dim(model: Any) -> int:
    """How many dimensions of a head are rotated; 0 where that is not known, or differs between layers."""
    buffers = model.rotary_emb.named_buffers() if hasattr(model, "rotary_emb") else ()
    found = {2 * len(frequencies) for name, frequencies in buffers if name.endswith("inv_freq")}
    return found.pop() if len(found) == 1 else 0


def _heads_of(module: Any, family: Description, tables: _Tables, rotary_dim: int) -> _Heads | None:
    """How an attention finds its heads; None where it is called as it is: what it rotates is not known, or it clips q, k and v."""
    rotates = family.rotates(module)
    unknown = rotates and not 0 < rotary_dim <= module.head_dim
    clips = getattr(module.config, "clip_qkv", None) is not None
    return None if unknown or clips else _Heads(module, family.kind, tables if rotates else None)


class _Heads:
    """An attention layer: projections, norms of q and k, positions, the cache, and the output projection."""

    def __init__(self, module: Any, kind: str, tables: _Tables | None) -> None:
        self.module, self.tables, self.dim = module, tables, module.head_dim
        self.window = layer_window(module.config, module.layer_idx)
        self.norms = [_norm(getattr(module, name), kind) for name in ("q_norm", "k_norm") if hasattr(module, name)]
        #: Norms of q and k that `append` applies before it rotates; then none are left to do.
        self.by_head = self._by_head() if tables is not None else None
        self.options = {
            "softcap": getattr(module, "attn_logit_softcapping", None),
            "s_aux": getattr(module, "sinks", None),
            "scaling": module.scaling,
            "sliding_window": self.window,
        }

    def attend(
        self, x: Rows, position_embeddings: RopeLike, attention_mask: Any = None, **given: Any
    ) -> tuple[torch.Tensor, nn.Module]:
        """What the output projection multiplies, and that layer. The cache is a `PackedCache`."""
        made = self._projected(x)
        batch, tokens = made[2].shape[:2]
        q, k, v = (t.view(batch, tokens, -1, self.dim).transpose(1, 2) for t in made)
        rotated: dict[str, Any] = {}
        if self.tables is not None:
            rotated = {"rope": self.tables(position_embeddings, batch), "q": q, "norms": self.by_head}
        keys, values = given.pop(CACHE).update(k, v, self.module.layer_idx, **rotated)
        q = q if keys.rotated is None else keys.rotated
        out, _ = attention(self.module, q, keys, values, attention_mask, **self.options, **given)
        return out.reshape(batch, tokens, -1), self.module.o_proj

    def _by_head(self) -> HeadNorms | None:
        """Norms of q and k over each head; None where there are none, or where they are over all of a token."""
        widths = {len(norm.weight) for norm in self.norms}
        if len(self.norms) != 2 or widths != {self.dim} or self.norms[0].eps != self.norms[1].eps:
            return None
        q, k = self.norms
        return HeadNorms(q.weight, k.weight, q.eps, q.kind)

    def _projected(self, x: Rows) -> tuple[torch.Tensor, ...]:
        """q, k and v [B, L, heads * D], normalized where the family does: over each head, or over all of a token."""
        module = self.module
        if hasattr(module, "qkv_proj"):
            sizes = module.config.num_attention_heads * self.dim, module.config.num_key_value_heads * self.dim
            q, k, v = _project(x, (module.qkv_proj,))[0].split((*sizes, sizes[1]), -1)
        else:
            q, k, v = _project(x, (module.q_proj, module.k_proj, module.v_proj))
        if self.norms and self.by_head is None:
            widths = [len(norm.weight) for norm in self.norms]
            q, k = norm_rows([t.unflatten(-1, (-1, n)) for t, n in zip((q, k), widths, strict=True)], self.norms)
        return q, k, v

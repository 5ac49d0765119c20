"""Which transformers models a packed cache fits, and why the others are refused; options of a cache, checked against a model.

The cache hands packed data to attention through what `update()` returns, which fits a model that passes the result on untouched.
`REFUSED` comes from a scan of every attention class of transformers 5.24. Other models are guarded by the handles, which refuse
every use except attention.
"""

from __future__ import annotations

import re
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, GenerationMixin, PreTrainedModel

from halfbyte.cache_plan import ModelSizes
from halfbyte.checkpoints.folder_guard import check_folder
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported, check
from halfbyte.formats import MIN_SCALE
from halfbyte.reference.quantize import F16_MAX

#: The name for `model.set_attn_implementation`. It must not hold "flash", "sdpa" or "/": transformers gives those a meaning.
NAME = "halfbyte"

#: Queries of a step, at most: they are answered in one pass over the packed cache.
DECODE_QUERIES = 16

#: What models and `generate()` call a cache: from transformers 5.24 on by another name, which warns of the old one.
CACHE = "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"

NO_WEIGHTS = 'output_attentions=True: attention weights are never formed; use attn_implementation="eager" to see them'

_PICKED = "an indexer with keys of its own picks the cached tokens that a query reads, and attention over packed data reads all"
_TOUCHED = "it changes or selects cached keys or values between the cache update and attention"
_NO_SEAM = "it computes attention itself and does not call the attention functions that can be registered in transformers"
_RECURRENT = "it is recurrent throughout, and has no keys and values"
_SHARED = "its layers share keys and values, and its configuration does not say which (kv_sharing_modes)"
_OWN_STATES = "the states of its recurrent layers are in the model, or in a cache of its own class"
_OVERLAY = "its masks are not causal everywhere (tokens of one block, such as an image, see each other)"
_WINDOW = "it does not pass its sliding window to attention"
_BIAS = "it adds a learned position bias to the scores"

_SPARSE = "an indexer with keys of its own picks the cached latents (MLA) that a query reads"

_BY_REASON: dict[str, str] = {
    _SPARSE: "axk2 deepseek_v32 deepseek_v4 dots3_note glm5_next glm_moe_dsa hy_v4 hy_v4_vl mistral_large4",
    _PICKED: "minimax_m3 minimax_m3_vl qwen4_exp",
    _TOUCHED: "decision_transformer diffllama doge idefics jetmoe mllama moonshine moonshine_streaming",
    _SHARED: "dory",
    _NO_SEAM: "bark big_bird blip bloom clvp codegen cpmant ctrl falcon flaubert git gpt_neo gpt_neox_japanese gptj imagegpt "
    "megatron-bert mpt openai-gpt prophetnet reformer rembert roformer tapas trocr xglm xlm xlnet",
    _RECURRENT: "falcon_mamba mamba mamba2 rwkv xlstm",
    _OWN_STATES: "minimax recurrent_gemma",
    _OVERLAY: "cosmos3_edge diffusion_gemma git idefics2 kosmos2 kosmos2_5 paligemma t5gemma2",
    _WINDOW: "moshi",
    _BIAS: "inkling inkling2 inkling2_loop longt5 mt5 pix2struct pop2piano switch_transformers t5 udop umt5",
}

#: model_type -> why a packed cache cannot serve it.
REFUSED: dict[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}

#: Families that apply a sliding window by a mask only, so attention takes it from the configuration.
WINDOW_IN_MASK = frozenset({"phimoe"})

#: Families whose layers with a sliding window have twice the KV heads that the configuration names.
TWICE_IN_WINDOWS = frozenset({"mimo_v2_flash"})

#: Hybrid families whose forward of several tokens forgets the states, or the number, of the tokens that the cache holds.
WHOLE_PROMPTS = frozenset({"bamba", "jamba", "zamba"})

#: Names of cross-attention in a block.
_CROSS = re.compile("cross|encoder_attn")

#: Types of layers, in transformers' words, that have keys and values; a state of fixed size; neither.
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding")
STATES = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
#: A layer that reads the keys and values of an earlier one.
SHARED = "dummy"
_NEITHER = ("moe", "mlp", SHARED)


def inner_model(model: Any) -> Any:
    """The transformers model whose `generate()` runs: the one inside, where `model` wraps it (PEFT, torch.compile)."""
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)


def ranks_of(model: Any) -> int:
    """Ranks that share each layer; 1 without tensor parallelism."""
    return getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1


#: The entry of a decoder's configuration with the scales of keys and values that its checkpoint stores, and the KV format of them.
KV_SCALES = "halfbyte_kv_scales"


def text_config(model_or_config: Any) -> Any:
    """The configuration of the decoder, from a model or from a configuration."""
    config = getattr(model_or_config, "config", model_or_config)
    if not hasattr(config, "get_text_config"):
        raise InvalidArgument(
            f"model_or_config is a {type(model_or_config).__name__}; pass a transformers model or its configuration (model.config)"
        )
    return config.get_text_config(decoder=True)


def learned_positions(model: Any, tokens: int) -> int | None:
    """How many positions a model has learned, if `tokens` are more: an embedding of positions then fails, on a GPU by an assertion
    that ends the process. None where they are not, and for models without such an embedding.
    """
    limit = getattr(text_config(model), "max_position_embeddings", None)
    if limit is None or tokens <= limit:
        return None
    tables = (isinstance(m, nn.Embedding) and re.search(r"wpe$|position", name) for name, m in model.named_modules())
    return limit if any(tables) else None


def kv_scales(config: Any) -> dict[str, Any] | None:
    """The entry `KV_SCALES` of a decoder's configuration; raises `CheckpointError` for one that halfbyte cannot have written."""
    entry, count = getattr(config, KV_SCALES, None), int(config.num_hidden_layers)
    if entry is None:
        return None
    layers = entry.get("layers") if isinstance(entry, dict) else None
    if not isinstance(layers, list) or len(layers) != count or not all(isinstance(x, list) and len(x) == 2 for x in layers):
        raise CheckpointError(f"config.json: {KV_SCALES} holds no scale of keys and of values for each of {count} layers")
    for scale in (x for pair in layers for x in pair):
        if scale is not None and not (isinstance(scale, int | float) and MIN_SCALE <= scale <= F16_MAX):
            raise CheckpointError(f"config.json: {KV_SCALES} holds {scale!r}; expected a scale that fp16 holds, or null")
    return {"format": entry.get("format"), "layers": layers}


class Decoder:
    """Facts about the decoder of a model, each looked up once, when it is first read."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, text_config(model)

    @cached_property
    def blocks(self) -> list[nn.Module]:
        return blocks(self.model)

    @cached_property
    def dims(self) -> list[tuple[int, int]]:
        """Sizes of a head of keys, and of values, of each block."""
        return [head_dims(self.config, layer) for layer in range(len(self.blocks))]

    @cached_property
    def kv_heads(self) -> list[int]:
        return [kv_heads(self.config, layer) for layer in range(len(self.blocks))]


def read_config(folder_or_id: Any) -> Any:
    """The configuration of a folder or Hub id. Kernels that it names are forgotten: transformers would download and run them."""
    if (folder := Path(folder_or_id)).is_dir():
        check_folder(folder)
    config = AutoConfig.from_pretrained(folder_or_id, trust_remote_code=False)
    config._attn_implementation = config._experts_implementation = None  # of its parts, too
    return config


#: Where transformers lists the classes of language models by configuration.
_LANGUAGE_MODELS = ("CausalLM", "Seq2SeqLM", "ImageTextToText", "MultimodalLM", "SpeechSeq2Seq")


def model_class(config: Any) -> Any:
    """The class of a language model: of those that transformers has for a configuration, the one that wrote it, else the first.

    One configuration may have several: BartForCausalLM is the decoder alone of BartForConditionalGeneration. Those that want a part
    of it only, the decoder of a vision-language model, are left out.
    """
    autos = [getattr(transformers, f"AutoModelFor{kind}", None) for kind in _LANGUAGE_MODELS]
    mappings = [auto._model_mapping.get(type(config), ()) for auto in autos if auto is not None]
    candidates = [kind for kinds in mappings for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
    parts = {type(getattr(config, name, None)) for name in type(config).sub_configs} - {type(config)}
    candidates = [kind for kind in candidates if kind.config_class not in parts]
    if not candidates:
        raise Unsupported(f"transformers has no language model for the configuration of {getattr(config, 'model_type', '?')!r}")
    wrote = getattr(config, "architectures", None) or ()
    return next((kind for kind in candidates if kind.__name__ in wrote), candidates[0])


def check_model_support(model_or_config: Any) -> None:
    """Raise `Unsupported`, with the reason, for a model whose attention cannot read a packed cache."""
    config, inner = getattr(model_or_config, "config", model_or_config), text_config(model_or_config)
    for candidate in (config, inner):
        name = str(getattr(candidate, "model_type", ""))
        reason = REFUSED.get(name) or REFUSED.get(name.removesuffix("_model").removesuffix("_text"))
        if reason is not None:
            raise _refusal(name, reason)
    name = str(getattr(inner, "model_type", "") or type(inner).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(name, "it is an encoder-decoder model, with a second cache for cross-attention")
    if not getattr(inner, "is_causal", True) or getattr(inner, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise _refusal(name, "its attention is not causal")
    if isinstance(model_or_config, nn.Module) and _sees_both_sides(model_or_config):
        raise _refusal(name, "its attention sees both sides (is_decoder=False); load it with is_decoder=True")
    if not getattr(inner, "num_hidden_layers", None):
        raise _refusal(name, "its configuration has no num_hidden_layers")
    kinds = set(layer_types(inner))
    if others := sorted(kinds - {*ATTENTION, *STATES, *_NEITHER}):
        raise _refusal(name, f"it has layers of type {', '.join(others)}; packed caches serve {', '.join(ATTENTION[:3])}")
    if not kinds & {*ATTENTION}:
        raise _refusal(name, "none of its layers has keys and values")
    if getattr(inner, "num_kv_shared_layers", 0) and not getattr(inner, "kv_sharing_modes", None):
        raise _refusal(name, _SHARED)
    if reason := latent_refusal(inner):
        raise _refusal(name, reason)


def check_continues(model: Any) -> None:
    """Raise `Unsupported` for a model that cannot read a text chunk by chunk."""
    name = str(getattr(text_config(model), "model_type", ""))
    if name in WHOLE_PROMPTS:
        raise Unsupported(
            f"{name} reads a text at once or token by token: transformers {transformers.__version__} computes a chunk of it as if "
            f"nothing came before; use generate()"
        )


def _sees_both_sides(model: nn.Module) -> bool:
    """Whether self-attention of the decoder says that it is not causal, as that of BERT does by default."""
    both = {
        id(m)
        for block in blocks(model)
        for m in block.modules()
        if vars(m).get("is_causal", getattr(type(m), "is_causal", True)) is False
    }
    modules = ((name, m) for block in blocks(model) for name, m in block.named_modules()) if both else ()
    return any(id(m) in both and not _CROSS.search(name) for name, m in modules)


def _refusal(name: str, reason: str) -> Unsupported:
    return Unsupported(
        f"a packed KV cache cannot be used with {name or 'this model'}: {reason}. Quantize its weights only (keys=None, "
        f"values=None) and keep transformers' own cache"
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the decoder: the outermost list of modules with one entry a layer. Empty when there is none.

    A model of several towers (images and text, encoder and decoder) may have as many layers in another one. A block with two
    attentions counts as two hidden layers, and as one of `num_layers`.
    """
    config = text_config(model)
    count = getattr(config, "num_hidden_layers", None)
    find: Any = getattr(model, "get_decoder", lambda: model)
    decoder = find()
    return _list_of(decoder, count) or _list_of(model, count) or _list_of(decoder, getattr(config, "num_layers", None))


def encoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the encoder, of an encoder-decoder model; else empty."""
    config: Any = getattr(model, "config", None)
    find: Any = getattr(model, "get_encoder", None)
    if not getattr(config, "is_encoder_decoder", False) or find is None:
        return []
    return _list_of(find(), getattr(config.get_text_config(encoder=True), "num_hidden_layers", None))


def _list_of(module: nn.Module, count: int | None) -> list[nn.Module]:
    """The outermost list of `count` modules in `module`; empty when there is none."""
    return next((list(m) for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == count), [])


def is_latent(config: Any) -> bool:
    """Whether the decoder of this configuration caches latents and rotary keys, of one KV head."""
    return bool(getattr(config, "kv_lora_rank", None) and getattr(config, "qk_rope_head_dim", None))


def latent_refusal(config: Any) -> str:
    """Why a packed cache cannot hold the latents of this configuration's decoder; "" where it can, and where there are none."""
    if is_latent(config) and getattr(config, "index_topk", None):
        return _SPARSE
    return "it has a sliding window over latents (MLA)" if is_latent(config) and getattr(config, "sliding_window", None) else ""


def check_no_latents(config: Any) -> None:
    """Raise `Unsupported` where keys to calibrate are made of latents."""
    if is_latent(config):
        raise Unsupported("calibrated keys over a cache of latents (MLA) are not implemented; leave the calibration out")


def layer_types(config: Any) -> list[str]:
    """The type of every layer, in transformers' words."""
    count = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    modes = getattr(config, "kv_sharing_modes", None) or [None] * count
    return [SHARED if mode == "reuse" else kind for kind, mode in zip(kinds, modes, strict=True)]


def layer_config(config: Any, layer: int) -> Any:
    """The configuration of a layer: in some families (Gemma 4) layers have sizes of their own."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def layer_window(config: Any, layer: int | None) -> int | None:
    """The sliding window of a layer according to the configuration, None for full attention."""
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window <= 0 or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is None or layer is None:
        return window
    return window if "sliding" in kinds[layer] else None


def layer_chunk(config: Any, layer: int | None) -> int | None:
    """Tokens of a chunk, in a layer whose tokens see their own chunk only; None in others."""
    kinds = getattr(config, "layer_types", None)
    return config.attention_chunk_size if kinds and layer is not None and kinds[layer] == "chunked_attention" else None


def layer_reach(config: Any, layer: int) -> int | None:
    """Tokens that a query of a layer sees at most, which its cache keeps; None: all."""
    return layer_window(config, layer) or layer_chunk(config, layer)


def half_type(model_or_config: Any) -> torch.dtype:
    """The 16-bit type that goes with a model: float16 if it computes in it, or was loaded in it and widened; else bfloat16."""
    dtype = getattr(model_or_config, "dtype", None)
    if dtype is torch.float32:
        dtype = getattr(getattr(model_or_config, "config", None), "dtype", None)
    return torch.float16 if dtype in (torch.float16, "float16") else torch.bfloat16


def model_sizes(config: Any) -> ModelSizes:
    """What a cache plan must have in common with the model of this configuration; raises where some layers have no cache."""
    if set(layer_types(config)) - {*ATTENTION}:
        raise Unsupported(
            f"a cache plan has formats for every layer, and some of {config.model_type} have no keys and values of their own"
        )
    sizes = {(kv_heads(config, layer), *head_dims(config, layer)) for layer in range(int(config.num_hidden_layers))}
    if len(sizes) > 1 and config.model_type not in TWICE_IN_WINDOWS:
        raise Unsupported(f"a cache plan is for layers of one size, and those of {config.model_type} have heads of several")
    return card_sizes(config)


def card_sizes(config: Any) -> ModelSizes:
    """What an evidence card must have in common with the model of this configuration, whatever its layers are."""
    return ModelSizes(
        str(config.model_type), int(config.num_hidden_layers), kv_heads(config), *head_dims(config), int(config.hidden_size)
    )


def kv_heads(config: Any, layer: int | None = None) -> int:
    """KV heads of a layer; None: those that the configuration names."""
    if is_latent(config):
        return 1
    own = layer_config(config, layer or 0)
    heads = int(getattr(own, "num_key_value_heads", None) or own.num_attention_heads)
    twice = layer is not None and config.model_type in TWICE_IN_WINDOWS and "sliding" in layer_types(config)[layer]
    return 2 * heads if twice else heads


def head_dims(config: Any, layer: int = 0) -> tuple[int, int]:
    """(head_dim of keys, head_dim of values) of a layer from a configuration; with MLA, of rotary keys and of latents."""
    own = layer_config(config, layer)
    if is_latent(own):
        return int(own.qk_rope_head_dim), int(own.kv_lora_rank)
    dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    return int(dim), int(getattr(own, "v_head_dim", None) or dim)


def all_head_dims(config: Any) -> list[tuple[int, int]]:
    """`head_dims` of every layer."""
    count = int(config.num_hidden_layers)
    if getattr(config, "is_heterogeneous", False):
        return [head_dims(config, layer) for layer in range(count)]
    return [head_dims(config)] * count


#: Capacities are rounded up to a multiple of this: every new capacity costs one more compiled graph.
BUCKET = 64


def one_each(name: str, given: Any, layers: int) -> tuple[Any, ...]:
    """An option of every layer: a list or tuple with one entry for each, or one that is for all."""
    if not isinstance(given, list | tuple):
        return (given,) * layers
    check(
        len(given) == layers,
        f"{name} has {len(given)} entries, and the model {layers} layers; pass one for all layers, or one for each",
    )
    return tuple(given)


def check_attention(model_or_config: Any) -> None:
    """Raise for a model whose attention is not halfbyte's, which could not read a packed cache."""
    current = getattr(getattr(model_or_config, "config", None), "_attn_implementation", None)
    if isinstance(model_or_config, torch.nn.Module) and current != NAME:
        raise InvalidArgument(
            f"model_or_config uses the attention implementation {current!r}, which cannot read a packed cache; "
            f'call model.set_attn_implementation("{NAME}") first (halfbyte.hf.quantize does it)'
        )

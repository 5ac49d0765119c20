"""`generate()` of a model with a packed cache: the cache by default, in recorded steps.

transformers has no public way to either: `cache_implementation` is a closed list. So `generate` of one model instance is replaced,
and runs transformers' own over a view of the model: a shallow copy whose class overrides what prepares a call. The documented way
to a packed cache, which needs no override, is `past_key_values=PackedCache(...)`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.utils import cached_file

from halfbyte.calibrated_keys import CalibratedKeys, read_calibration
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported, check, warn_once
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.cache_layers import CacheSettings
from halfbyte.hf.graph_generate import DecodeLoop, refuse_generator
from halfbyte.hf.model_support import BUCKET, CACHE, NAME, NO_WEIGHTS, layer_types, learned_positions, text_config
from halfbyte.settings import default_impl

#: The entry of config.json that holds the settings.
SAVED = "halfbyte_cache"
#: What files of earlier versions do not say.
_NEW = {"sink_tokens", "recent_tokens", "rotate_values", "calibration"}
#: Where a saved folder holds calibrated keys: not among the weights, which other loaders read from every file there.
CALIBRATION = "calibration/keys.safetensors"


def new_cache(model: Any, settings: CacheSettings, capacity: int) -> PackedCache:
    """A cache for `model`, with room for its sink and recent tokens at least."""
    return PackedCache(model, _room(settings, capacity), **settings.options)


def _room(settings: CacheSettings, capacity: int) -> int:
    return max(capacity, settings.sink_tokens + settings.recent_tokens)


def saved(settings: CacheSettings) -> dict[str, Any]:
    """What config.json holds: of calibrated keys, the name of their file, which `halfbyte.hf.save` writes."""
    options = {name: x for name, x in settings.options.items() if name != "calibration"}
    return options if settings.calibration is None else {**options, "calibration": CALIBRATION}


class Replaced:
    """What takes the place of a method of one model. An object, not a closure: it is copied and pickled with its model."""

    def __init__(self, model: Any, settings: CacheSettings) -> None:
        self.model, self.settings = model, settings

    def view(self, recorded: bool, uses: ExitStack) -> Any:
        """The model by another class: what `Prepared` overrides, over the same modules and configuration. uses: see there."""
        kind: Any = type(self.model)
        view: Any = object.__new__(_prepared(kind))
        vars(view).update({**vars(self.model), "owner": self, "recorded": recorded, "uses": uses})
        return view


class Generate(Replaced):
    """`model.generate` of a model with a packed cache. It takes the arguments of transformers' own, and three more."""

    #: What the last default cache was made of, and that cache, without memory: the next one is alike.
    _last: tuple[Hashable, PackedCache] | None = None

    def cache(self, model: Any, capacity: int) -> PackedCache:
        kind = self.settings, id(model.config), model.config._attn_implementation, model.dtype, default_impl()
        if self._last is not None and self._last[0] == kind and (cache := self._last[1].another(_room(self.settings, capacity))):
            return cache
        cache = new_cache(model, self.settings, capacity)
        blank = cache.another(capacity)
        self._last = None if blank is None else (kind, blank)
        return cache

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.model).generate.__get__(self.model))

    def __call__(
        self,
        *args: Any,
        recorded: bool = True,
        fuse_blocks: bool = True,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate.

        recorded       decode steps are recorded in CUDA graphs and replayed, where that is possible; a warning says why not. The
                       graphs and the cache of a call that returns neither are kept for the next call of the same batch size, up to
                       a quarter of the GPU's memory; `halfbyte.hf.release` frees them. False: transformers' own loop
        fuse_blocks    recorded steps run decoder blocks in few launches, where that gives what the family's own block gives, and
                       short prompts are padded and recorded. Rounding may change a token whose logits are nearly equal. False: the
                       tokens of transformers' loop
        generator      where samples are drawn from, on the model's device; None: torch's default

        prompt_lookup_num_tokens=n decodes speculatively in recorded steps, at most 15 drafts a step, for batches too.
        """
        own = type(self.model).generate
        if recorded and own is not GenerationMixin.generate:
            warn_once(f"generate() of {type(self.model).__name__} is a loop of its own, whose steps are not recorded")
        on_meta = all(t.is_meta for t in self.model.parameters())
        on_meta = on_meta and not any(hasattr(m, "_hf_hook") for m in self.model.modules())  # accelerate brings them for each call
        check(not on_meta, "this model is on the meta device, where weights have no numbers; load it again to generate")
        with ExitStack() as uses:
            if not recorded or own is not GenerationMixin.generate or kwargs.get("custom_generate") is not None:
                refuse_generator(generator)
                return own(self.view(False, uses), *args, **kwargs)
            loop = DecodeLoop(self.model, fuse_blocks, generator)
            return own(self.view(True, uses), *args, **{**kwargs, "custom_generate": loop})


class NoContinuousBatching(Replaced):
    """Stands in for `model.init_continuous_batching`, which may switch to another attention, and with it to a cache in 16 bits."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.config._attn_implementation == NAME:
            raise Unsupported(
                "continuous batching of transformers (generate_batch, serve) allocates pages in 16 bits; for a packed cache use "
                "generate() with a padded batch, else model.set_attn_implementation('sdpa') first"
            )
        return type(self.model).init_continuous_batching(self.model, *args, **kwargs)


class Prepared:
    """What a view of a model overrides of its class. uses: ends with the call, `PackedCache.used` of its caches."""

    owner: Generate
    recorded: bool
    uses: ExitStack
    config: Any

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int, *args: Any
    ) -> Any:
        """Put a packed cache into `model_kwargs` unless the call requests another, or none; one that was passed in grows."""
        implementation = generation_config.cache_implementation
        if implementation == NAME:  # in this call's copy; transformers' own code does not know the name
            generation_config.cache_implementation = None
        if implementation == "quantized" and self.config._attn_implementation == NAME:
            raise Unsupported(
                'cache_implementation="quantized" is a cache of transformers, and this model has a packed one: leave it out, or '
                'call model.set_attn_implementation("sdpa") first'
            )
        _check_positions(self, max_cache_length, generation_config)
        longest = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0, 1)
        longest += _beyond(generation_config, mode)
        cache = model_kwargs.get(CACHE)
        cache = getattr(cache, "self_attention_cache", cache)
        if isinstance(cache, PackedCache):
            layers, of_model = len(cache.layers), len(layer_types(text_config(self)))
            check(layers == of_model, f"past_key_values has {layers} layers, and the model {of_model}: make one for this model")
            self.uses.enter_context(cache.used())
            tokens = int(cache.get_seq_length())  # waits for a GPU, once a call
            if tokens and not getattr(self.config, "is_encoder_decoder", False):
                _check_goes_on(tokens, generation_config, model_kwargs.get("attention_mask"))
            cache.grow(longest + _behind(generation_config, tokens))
            _begin(cache, generation_config, model_kwargs, mode)
        packs = generation_config.use_cache is not False and generation_config.cache_implementation is None
        unset = model_kwargs.get(CACHE) is None and self.config._attn_implementation == NAME
        if packs and unset and getattr(generation_config, "is_assistant", False):
            # An assistant keeps its cache from the first call on, and how long that will get is not known here.
            warn_once("an assistant (draft) model keeps transformers' own growing cache")
        elif packs and unset:
            default = self.owner.cache(self, longest)
            default.is_default = True
            self.uses.enter_context(default.used())
            _begin(default, generation_config, model_kwargs, mode)
            crosses = model_kwargs.get("encoder_hidden_states") is not None
            model_kwargs[CACHE] = EncoderDecoderCache(default, DynamicCache()) if crosses else default
            return None
        rest = (generation_config, model_kwargs, mode, batch_size, max_cache_length, *args)
        return super()._prepare_cache_for_generation(*rest)  # type: ignore[misc]

    def _prepare_model_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """(inputs, their name, model_kwargs); prompts padded on the right, as pipelines do, moved to end in the last column."""
        inputs, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)  # type: ignore[misc]
        return _padded_left(inputs, name, model_kwargs)

    def _extract_generation_mode_kwargs(self, custom_generate: Any, kwargs: dict[str, Any], *others: Any) -> dict[str, Any]:
        """The options of the usual loop, which transformers keeps from one of somebody else's."""
        usual = None if isinstance(custom_generate, DecodeLoop) else custom_generate
        return dict(super()._extract_generation_mode_kwargs(usual, kwargs, *others))  # type: ignore[misc]

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Whether transformers' loop compiles its steps: by default only where the user switched recorded steps off."""
        has_latents = getattr(model_kwargs.get(CACHE), "has_latents", False)
        if (self.recorded or has_latents) and generation_config.compile_config is None:
            return False
        return bool(super()._valid_auto_compile_criteria(model_kwargs, generation_config))  # type: ignore[misc]


@functools.cache
def _prepared(kind: Any) -> Any:
    """A subclass of a model's class, under its name."""
    own = kind.prepare_inputs_for_generation

    @functools.wraps(own)  # transformers checks the arguments of a call against its signature
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's own inputs; where it dropped a packed cache, with that cache, emptied.

        Phi-3 drops its cache where RoPE changes from its short factors to its long ones: what was cached no longer fits, and all is
        computed anew. transformers' own 16-bit cache would take the place of the packed one.
        """
        inputs = own(self, *args, **kwargs)
        cache = kwargs.get(CACHE)
        if isinstance(cache, PackedCache) and inputs.get(CACHE) is None:
            cache.reset()
            inputs[CACHE] = cache
        return inputs

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Prepared, kind), {**names, "prepare_inputs_for_generation": prepare_inputs_for_generation})


def cache_settings(model: Any) -> CacheSettings | None:
    """What the default cache of a model's `generate()` is made of; None: it has none."""
    generate = getattr(model, "generate", None)
    return generate.settings if isinstance(generate, Generate) else None


#: What `generate()` passes along with one entry a token.
_BY_TOKEN = ("attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids")


def _padded_left(inputs: torch.Tensor, name: str, model_kwargs: dict[str, Any]) -> tuple[torch.Tensor, str, dict[str, Any]]:
    """The inputs of a call, moved row by row so that every prompt ends in the last column."""
    mask, past = model_kwargs.get("attention_mask"), model_kwargs.get(CACHE)
    has_past = past is not None and past.get_seq_length()
    if has_past or mask is None or mask.shape != inputs.shape[:2] or bool(mask[:, -1].all()):
        return inputs, name, model_kwargs
    warn_once(
        "attention_mask pads on the right; prompts were moved so that they are padded on the left, and come back so. Tokenise "
        'with padding_side="left"'
    )
    columns = torch.arange(mask.shape[1], device=mask.device)
    behind = mask.shape[1] - 1 - (columns * mask.bool()).amax(1)  # columns after the last token of a row
    source = (columns - behind[:, None]) % mask.shape[1]
    by_token = {x: model_kwargs.get(x) for x in _BY_TOKEN}
    by_name = {x: _moved(t, source) for x, t in by_token.items() if t is not None and t.shape[-1] == mask.shape[1]}
    inputs = inputs[torch.arange(mask.shape[0], device=mask.device)[:, None], source]
    return inputs, name, {**model_kwargs, **by_name, **({name: inputs} if name in model_kwargs else {})}


def _moved(t: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Columns `source` [B, T] of t [..., B, T], or of a row [..., 1, T] or [T] that all sequences share."""
    shape = (*t.shape[:-2], *source.shape)
    return t.expand(shape).gather(-1, source.expand(shape))


def _check_goes_on(held: int, generation_config: Any, mask: torch.Tensor | None) -> None:
    """Raise for a text that ends within the `held` tokens. transformers drops a mask without padding, and keeps its length."""
    columns = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[-1]
    if columns is not None and columns <= held:
        raise InvalidArgument(
            f"past_key_values holds {held} tokens, and the text with its attention_mask has {columns}: pass the whole text, or its "
            f"new tokens with an attention_mask of all; for another text, call reset() on the cache first"
        )


def _check_positions(model: Any, tokens: int, generation_config: Any) -> None:
    """Raise where learned positions end before the prompt does, or before the longest answer, of `tokens`, which nothing ends."""
    limit, new = learned_positions(model, tokens), generation_config.max_new_tokens
    if limit is not None:
        ends = generation_config.eos_token_id is not None and (new is None or generation_config.max_length - new <= limit)
        check(ends, f"max_new_tokens: prompt and answer take {tokens} positions, and the model has learned {limit}; ask for fewer")


def _behind(generation_config: Any, held: int) -> int:
    """Tokens held that the longest answer does not count: all, where the prompt is only what is new."""
    new = getattr(generation_config, "max_new_tokens", None)
    return held if new is not None and generation_config.max_length - new <= held else 0


def _drafts(mode: Any) -> bool:
    return bool(getattr(mode, "value", mode) == "assisted_generation")


def _begin(cache: PackedCache, generation_config: Any, model_kwargs: dict[str, Any], mode: Any) -> None:
    """Refuse a call that a packed cache cannot serve, and tell the cache of drafts."""
    if generation_config.output_attentions:
        raise Unsupported(NO_WEIGHTS)  # not every model passes the option on to attention
    if not _drafts(mode):
        cache.expect_drafts(None)
        return
    if length := int(cache.get_seq_length()):
        raise Unsupported(
            f"past_key_values holds {length} tokens, and transformers would feed them again before its first drafts; leave "
            f"past_key_values out, or assistant_model and prompt_lookup_num_tokens"
        )
    mask = model_kwargs.get("attention_mask")  # transformers drops one without padding
    source = model_kwargs.get("position_ids") if mask is None else mask
    without = generation_config.max_length - (generation_config.max_new_tokens or 0)
    cache.expect_drafts(int(without if source is None else source.shape[-1]))


def _beyond(generation_config: Any, mode: Any) -> int:
    """Tokens that drafts may reach beyond the longest answer: they are in the cache before they are judged."""
    if not _drafts(mode):
        return 0
    counts = (getattr(generation_config, name, None) or 0 for name in ("prompt_lookup_num_tokens", "num_assistant_tokens"))
    return int(max(*counts, BUCKET))


def saved_settings(config: Any) -> CacheSettings | None:
    """What a configuration from a file says about the cache, calibrated keys read from the folder that it came from; None when it
    says nothing. Formats are checked where they are used."""
    section, names = getattr(config, SAVED, None), {f.name for f in fields(CacheSettings)}
    if section is None:
        return None
    if not isinstance(section, dict) or not names - _NEW <= section.keys() <= names:
        raise CheckpointError(f"config.json has {SAVED}={str(section)[:100]}; expected an object with {', '.join(sorted(names))}")
    options: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in section.items()}
    if options.get("calibration") is not None:
        options["calibration"] = _saved_calibration(config.name_or_path)
    return CacheSettings(**options)


def _saved_calibration(folder_or_id: str) -> CalibratedKeys:
    try:
        return read_calibration(str(cached_file(folder_or_id, CALIBRATION)))
    except (OSError, InvalidArgument) as error:
        raise CheckpointError(
            f"{folder_or_id}: config.json has calibrated keys; save folders with halfbyte.hf.save: {error}"
        ) from error


def make_default(model: Any, settings: CacheSettings) -> None:
    """Let `generate()` make a packed cache, unless an argument of the call requests another. The model's own setting is dropped."""
    if not hasattr(model, "generate"):
        return
    defaults: Any = getattr(model, "generation_config", None)
    implementation = getattr(defaults, "cache_implementation", None)
    if implementation not in (None, NAME):
        warn_once(
            f"generation_config.cache_implementation={implementation!r} of this model is replaced by the packed cache; "
            f"pass cache_implementation= to generate() to have it back"
        )
    if defaults is not None:
        model.generation_config = defaults = copy.copy(defaults)  # other models may have the same object
        defaults.cache_implementation = NAME  # is saved, and stops a transformers that does not know halfbyte
    model.generate = Generate(model, settings)
    if hasattr(model, "init_continuous_batching"):
        model.init_continuous_batching = NoContinuousBatching(model, settings)

"""`model.generate(..., custom_generate=halfbyte.hf.generate)`: a decode loop with one CUDA graph a step, and no Dynamo on its path.

transformers prepares the call (prompt, cache, logits processors, stopping criteria) and hands it to `generate`, which runs the
prompt as transformers does and then, for every token:

    tokens -> static input ids -> [model.forward, positions + 1] -> logits -> processors, sampling, stopping criteria
                                  one CUDA graph, replayed          a few launches that the host issues ahead of the GPU

The forward is compiled where `generate()` would compile it, and Dynamo's guards are evaluated while warming up only. With
`fuse_blocks=True` it is not compiled, and has blocks of few launches (`fused_blocks.py`).

Nothing in it waits for the GPU. Whether every sequence has finished is read once in `EVERY` tokens, and tokens beyond the end are
cut off. On other devices the recorded forward is an ordinary call, and everything else the same.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput

from halfbyte.errors import InvalidArgument, Unsupported, warn_once
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.fused_blocks import fused_view
from halfbyte.hf.parallel import ranks_of

#: Tokens between two looks at whether all sequences have finished.
EVERY = 8
#: Calls of a forward before it is recorded: they compile and allocate what it needs.
WARM_UP = 2
#: What a step reads of a call's keyword arguments. Others may change from token to token.
_KNOWN = {"past_key_values", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}
#: Arguments of `generate()` that a forward does not use.
_UNUSED = ("tokenizer", "assistant_tokenizer")
_ADVANCING = ("position_ids", "cache_position")
#: Model -> its last step and the cache of it: the next call of the same shape replays the same graph.
_kept: WeakKeyDictionary[Any, Step] = WeakKeyDictionary()


def generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    inputs_tensor: Any = None,
    generator: torch.Generator | None = None,
    fuse_blocks: bool = False,
    **model_kwargs: Any,
) -> Any:
    """The decode loop of `model.generate(..., custom_generate=halfbyte.hf.generate)`; transformers calls it, users do not.

    Tokens are those of `generate()` with the same cache; sampled ones too, with the same seed (`torch.manual_seed`, or
    generator=, a `torch.Generator` on the model's device). The model must have a packed cache (`hf.quantize(model, keys=...)`).
    fuse_blocks=True: decoder blocks in fewer launches, whose rounding may change a token where two logits are nearly equal.
    Beam search, drafts and others run in transformers' own loop, after one warning that says why. After a call without
    return_dict_in_generate and without past_key_values, the memory of its cache is kept for the next.
    """
    if not isinstance(getattr(model, "_extract_generation_mode_kwargs", None), KeptOptions):
        raise InvalidArgument(
            "custom_generate=halfbyte.hf.generate needs a model with a packed cache; call halfbyte.hf.quantize(model, keys=..., "
            "values=...) first, or leave custom_generate out"
        )
    call = (input_ids, logits_processor, stopping_criteria, generation_config)
    if (reason := _why_not(model, input_ids, generation_config, synced_gpus, model_kwargs)) is not None:
        warn_once(f"custom_generate=halfbyte.hf.generate: {reason}, so transformers' own loop runs this call")
        others = {"synced_gpus": synced_gpus, "streamer": streamer, "inputs_tensor": inputs_tensor}
        return _of_transformers(model, call, generator, {**others, **model_kwargs})
    for name in _UNUSED:
        model_kwargs.pop(name, None)
    decode = getattr(model, "_optimize_model_for_decode", nullcontext)
    return _Loop(model, *call, streamer, generator, fuse_blocks).run(model_kwargs, decode)


class KeptOptions:
    """Stands in for `model._extract_generation_mode_kwargs`, which drops streamer, tokenizer and assistant of a custom loop."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, custom_generate: Any, kwargs: dict[str, Any], *others: Any) -> dict[str, Any]:
        """The options of the usual loop, and with `generate` its own as well."""
        own = type(self.model)._extract_generation_mode_kwargs
        if custom_generate is not generate:
            return dict(own(self.model, custom_generate, kwargs, *others))
        usual, ours = own(self.model, None, kwargs, *others), own(self.model, generate, kwargs, *others)
        return {**usual, **ours}


def _why_not(model: Any, input_ids: torch.Tensor, config: Any, synced_gpus: bool, given: dict[str, Any]) -> str | None:
    """Why a call cannot be recorded; None when it can."""
    cache = given.get("past_key_values")
    mode = config.get_generation_mode(given.get("assistant_model")).value
    positions = given.get("position_ids")
    unknown = sorted(name for name, x in given.items() if x is not None and name not in (*_KNOWN, *_UNUSED))
    ropes = " ".join(str(getattr(m, "rope_type", "")) for m in model.modules())
    found = {
        f"{mode} does not feed one token a step": mode not in ("greedy_search", "sample"),
        f"the cache is a {type(cache).__name__}, no PackedCache": not isinstance(cache, PackedCache),
        "not every op of this model runs as a kernel (float32, or HALFBYTE_IMPL)": not getattr(cache, "is_compileable", True),
        "compile_config is set": config.compile_config is not None,
        f"{', '.join(unknown)} may change from step to step": bool(unknown),
        "position_ids have more than two axes": positions is not None and positions.ndim != 2,
        "output_hidden_states and output_attentions are not collected": config.output_hidden_states or config.output_attentions,
        "its rotary embedding depends on the length": "dynamic" in ropes or "longrope" in ropes,
        "the model, or its input, lies on several devices": len({p.device for p in (*model.parameters(), input_ids)}) > 1,
        "several processes take part": synced_gpus or ranks_of(model) > 1,
        "max_length is not set": config.max_length is None,
    }
    return next((reason for reason, holds in found.items() if holds), None)


def _of_transformers(model: Any, call: tuple[Any, ...], generator: torch.Generator | None, options: dict[str, Any]) -> Any:
    """The loop that `generate()` would have called."""
    input_ids, processor, criteria, config = call
    options = {name: x for name, x in options.items() if x is not None}
    if generator is not None:
        raise Unsupported("generator= belongs to steps of halfbyte.hf.generate, which cannot run this call; use torch.manual_seed")
    mode = config.get_generation_mode(options.get("assistant_model"))
    name = GENERATION_MODES_MAPPING[mode]
    if "/" in name:
        raise Unsupported(f"{mode.value} is not part of transformers any more ({name}); leave custom_generate out")
    loop = getattr(type(model), name)
    if mode.value != "assisted_generation":
        options.pop("inputs_tensor", None)
    return loop(model, input_ids, logits_processor=processor, stopping_criteria=criteria, generation_config=config, **options)


class Step:
    """The forward of one token a sequence over static inputs; on a GPU it is recorded after `WARM_UP` calls, and replayed."""

    def __init__(self, cache: PackedCache, key: tuple[Any, ...]) -> None:
        self.cache, self.key = cache, key
        self.inputs: dict[str, Any] = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: torch.Tensor | None = None
        self.calls = 0

    def begin(self, inputs: dict[str, Any]) -> None:
        """Take the inputs of a call's first step: into the memory that a graph reads, where they look the same."""
        new, shape = pytree.tree_flatten(inputs)
        held, before = pytree.tree_flatten(self.inputs)
        if before == shape and all(_alike(a, b) for a, b in zip(held, new, strict=True)):
            for a, b in zip(held, new, strict=True):
                if isinstance(a, torch.Tensor):
                    a.copy_(b)
            return
        self.inputs = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, inputs)
        self.graph, self.calls = None, 0

    def __call__(self, forward: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] behind tokens [B], by the model's `forward`. Valid until the next call."""
        self.inputs["input_ids"].copy_(tokens[:, None])
        self.calls += 1
        if self.calls == WARM_UP + 1 and tokens.is_cuda:
            self._record(forward)
        if self.graph is None or self.logits is None:
            return self._forward(forward)
        self.graph.replay()
        return self.logits

    def _forward(self, forward: Any) -> torch.Tensor:
        logits: torch.Tensor = forward(**self.inputs, return_dict=True).logits[:, -1]
        for name in _ADVANCING:
            if isinstance(self.inputs.get(name), torch.Tensor):
                self.inputs[name].add_(1)
        return logits

    def _record(self, forward: Any) -> None:
        """Record the forward without running it. What cannot be recorded runs as it is, after one warning."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.inputs["input_ids"].device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.logits = self._forward(forward)
        except RuntimeError as error:
            torch.cuda.synchronize()
            warn_once(f"a decode step of this model cannot be recorded in a CUDA graph and runs without: {error}")
        else:
            self.graph = graph


def _alike(a: Any, b: Any) -> bool:
    """Whether a graph that read `a` may read `b`: tensors of one shape and type, or the same value."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b))


def _key(model: Any, cache: PackedCache, batch: int, config: Any, fuse_blocks: bool) -> tuple[Any, ...]:
    """What a recorded step depends on besides its inputs: the cache's layout, where the weights lie, and whether it is compiled."""
    layout = tuple((layer.kinds, layer.sink_tokens, layer.recent_tokens) for layer in cache.layers)
    weights = tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))
    return batch, cache.capacity, layout, model.training, bool(config.disable_compile), fuse_blocks, weights


class _Loop:
    """One call of `generate()`."""

    def __init__(
        self,
        model: Any,
        input_ids: Any,
        processor: Any,
        criteria: Any,
        config: Any,
        streamer: Any,
        generator: Any,
        fuse_blocks: bool,
    ) -> None:
        self.fuse_blocks = fuse_blocks
        self.model, self.processor, self.criteria, self.config = model, processor, criteria, config
        self.streamer, self.generator = streamer, generator
        batch, self.start = input_ids.shape
        self.ids = input_ids.new_empty(batch, max(config.max_length, self.start + 1))
        self.ids[:, : self.start] = input_ids
        self.length = self.start
        self.unfinished = input_ids.new_ones(batch)
        self.taken = input_ids.new_zeros(())  # steps that some sequence needed
        self.ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.scores: list[torch.Tensor] | None = [] if config.return_dict_in_generate and config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if config.return_dict_in_generate and config.output_logits else None

    def run(self, given: dict[str, Any], decode: Any) -> Any:
        """Generate; `given` are the model's keyword arguments for the prompt."""
        model, cache = self.model, given["past_key_values"]
        seen = not cache.is_default or bool(self.config.return_dict_in_generate)  # someone reads the cache afterwards
        step = self._step(cache, seen)
        given["past_key_values"] = step.cache
        outputs = model._prefill(self.ids[:, : self.start], self.config, given)
        given = model._update_model_kwargs_for_generation(outputs, given)
        logits, every = outputs.logits[:, -1], 1 if seen or self.streamer is not None else EVERY
        del outputs
        forward = self._forward(given)
        with decode():
            while self._take(logits, every):
                if self.length == self.start + 1:
                    now = self.ids[:, : self.length]
                    step.begin(model.prepare_inputs_for_generation(now, next_sequence_length=1, **given))
                logits = step(forward, self.ids[:, self.length - 1])
        if not seen:
            _kept[model] = step
        return self._result(step.cache)

    def _forward(self, given: dict[str, Any]) -> Any:
        """The forward of one token a sequence: with fused blocks, else compiled where `generate()` would compile it."""
        view = fused_view(self.model) if self.fuse_blocks else None
        if view is not None:
            return view
        compiles = self.model._valid_auto_compile_criteria(given, self.config)
        return torch.compile(self.model.__call__) if compiles else self.model.__call__

    def _step(self, cache: PackedCache, seen: bool) -> Step:
        """The step of the last call, if it fits, with its cache emptied; else a new one."""
        key, kept = _key(self.model, cache, self.ids.shape[0], self.config, self.fuse_blocks), _kept.pop(self.model, None)
        if kept is None or seen or kept.key != key:
            return Step(cache, key)
        kept.cache.reset()
        return kept

    def _take(self, logits: torch.Tensor, every: int) -> bool:
        """Choose the next tokens from logits [B, V]; whether to go on."""
        raw = logits.to(copy=True, dtype=torch.float32)
        scores = self.processor(self.ids[:, : self.length], raw)
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(raw)
        tokens = self._choose(scores)
        if self.ends:
            tokens = tokens * self.unfinished + self.config._pad_token_tensor * (1 - self.unfinished)
        self.ids[:, self.length] = tokens
        self.taken += self.unfinished.any()
        self.length += 1
        stops = self.criteria(self.ids[:, : self.length], None if self.scores is None else tuple(self.scores))
        self.unfinished = self.unfinished & ~stops
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
        if self.length >= self.config.max_length:
            return False
        return bool((self.length - self.start) % every) or bool(self.unfinished.any())

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Tokens [B]: the likeliest, or drawn as `torch.multinomial` draws them, without its check that waits for the GPU."""
        if not self.config.do_sample:
            return scores.argmax(-1)
        probabilities = scores.softmax(-1)
        noise = torch.empty_like(probabilities).exponential_(1, generator=self.generator)
        return (probabilities / noise).argmax(-1)

    def _result(self, cache: PackedCache) -> Any:
        if self.streamer is not None:
            self.streamer.end()
        taken = int(self.taken)
        ids = self.ids[:, : self.start + taken].clone()
        if not self.config.return_dict_in_generate:
            return ids
        scores, logits = (None if x is None else tuple(x[:taken]) for x in (self.scores, self.logits))
        return GenerateDecoderOnlyOutput(sequences=ids, scores=scores, logits=logits, past_key_values=cache)

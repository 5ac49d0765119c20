"""The decode loop of `model.generate()` over a packed cache: one recorded step a token, without Dynamo.

transformers prepares the call and hands it to a `DecodeLoop`, which runs the prompt as transformers does and then, for every token
or, with prompt_lookup_num_tokens=, for every run of accepted drafts:

    tokens -> static input ids -> [model.forward, positions + 1] -> logits -> [processors, choice, ends] -> tokens
                                  one CUDA graph, replayed                   one more, where only logits decide

Nothing waits for the GPU. Whether every sequence has finished is read once in `EVERY` steps, and tokens beyond the end are cut off.
On other devices the recorded forward is an ordinary call, and everything else the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.generation.utils import (
    GENERATION_MODES_MAPPING,
    MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
    GenerateDecoderOnlyOutput,
)

from halfbyte.errors import InvalidArgument, Unsupported, warn_once
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.choice import Choice, RecordedChoice
from halfbyte.hf.fused_blocks import fused_view
from halfbyte.hf.model_support import CACHE, learned_positions, ranks_of, text_config
from halfbyte.hf.recorded_step import (
    MOST_DRAFTS,
    Forward,
    LookupForward,
    PromptForward,
    check_prompt,
    keep_step,
    padded_prompt,
    records_prompts,
    take_step,
)
from halfbyte.hf.rehearsal import Prompts, compile_ahead
from halfbyte.hf.structure import Survey, survey
from halfbyte.ops.compiling import active

#: Steps between two looks at whether all sequences have finished; with drafts, which make fewer and longer steps.
EVERY, EVERY_LOOKUP = 8, 2
#: Calls of a forward before it is recorded: they compile and allocate what it needs.
WARM_UP = 1
#: Inputs that a step takes, as transformers continues them: the same from step to step, or larger by one.
_CONTINUED = {CACHE, "attention_mask", "position_ids", "cache_position"}
_CONTINUED |= {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
#: Inputs of the prompt alone.
_OF_PROMPT = {*MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL}
#: Arguments of `generate()` that a forward does not use.
_UNUSED = ("tokenizer", "assistant_tokenizer")


class DecodeLoop:
    """What `generate()` hands a prepared call to: recorded steps, or, with a warning that says why, transformers' own loop."""

    def __init__(self, model: Any, fuse_blocks: bool, generator: torch.Generator | None) -> None:
        self.model, self.fuse_blocks, self.generator = model, fuse_blocks, generator

    def __call__(
        self,
        view: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The result of the call: ids [B, T], or transformers' output object."""
        call = (input_ids, logits_processor, stopping_criteria, generation_config)
        choice, drafts = Choice(*call[1:], self.generator), _drafts(generation_config, model_kwargs)
        model = survey(self.model)
        reason = _why_not(view, model, input_ids, generation_config, synced_gpus, model_kwargs)
        if drafts and reason is None:
            reason = _why_no_lookup(view, choice, model_kwargs, len(input_ids), streamer)
        if reason is not None:
            if drafts and len(input_ids) > 1:
                raise Unsupported(
                    f"prompt_lookup_num_tokens={drafts}: {reason}, and transformers' own loop takes drafts for one sequence only; "
                    f"leave it out, or generate for one sequence at a time"
                )
            warn_once(f"generate() runs transformers' own loop, whose steps are not recorded: {reason}")
            others = {"synced_gpus": synced_gpus, "streamer": streamer, "inputs_tensor": inputs_tensor}
            return _of_transformers(view, call, self.generator, {**others, **model_kwargs})
        prompts = Prompts(len(input_ids), input_ids.shape[1], generation_config.max_length)
        compile_ahead(self.model, model, prompts, self.fuse_blocks)
        for name in _UNUSED:
            model_kwargs.pop(name, None)
        return _Loop(self, view, model.addresses, input_ids, choice, streamer, min(drafts, MOST_DRAFTS)).run(model_kwargs)


def _why_not(
    model: Any, found: Survey, input_ids: torch.Tensor, config: Any, synced_gpus: bool, given: dict[str, Any]
) -> str | None:
    """Why a call cannot be recorded; None when it can."""
    cache = given.get(CACHE)
    mode = config.get_generation_mode(given.get("assistant_model")).value
    steps = mode in ("greedy_search", "sample") or _drafts(config, given)
    tensors = {name for name, x in given.items() if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(x))}
    unknown = sorted(tensors - _CONTINUED - _OF_PROMPT)
    learned = learned_positions(model, (config.max_length or 0) - 1 + _drafts(config, given))
    reasons = {
        f"{mode} does not feed one token a step": not steps,
        f"the cache is a {type(cache).__name__}, no PackedCache": not isinstance(cache, PackedCache),
        "not every op of this model runs as a kernel (float32, or HALFBYTE_IMPL)": not getattr(cache, "records", True),
        "compile_config is set": config.compile_config is not None,
        f"{', '.join(unknown)} may change from step to step": bool(unknown),
        "output_hidden_states and output_attentions are not collected": config.output_hidden_states or config.output_attentions,
        "its rotary embedding depends on the length": found.by_length,
        "the model, or its input, lies on several devices": len(found.devices | {input_ids.device}) > 1,
        "processes that may finish at different tokens take part": synced_gpus,
        "max_length is not set": config.max_length is None,
        "steps run ahead of an answer's end, and the longest goes beyond the learned positions": learned is not None,
        "hooks watch the model, and a replayed graph calls none": input_ids.is_cuda and found.has_hooks,
        "prefix tuning makes a cache of its own": _adapter(model) == "PREFIX_TUNING",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _adapter(model: Any) -> str:
    """The kind of adapter of PEFT whose `generate()` is running, "" for none: PEFT puts its own method into the model's place."""
    owner = getattr(model.prepare_inputs_for_generation, "__self__", None)
    kind = getattr(getattr(owner, "active_peft_config", None), "peft_type", "")
    return str(getattr(kind, "value", kind))


def _drafts(config: Any, given: dict[str, Any]) -> int:
    """Drafts per step of prompt lookup; 0: none, or an assistant makes them."""
    assistant = given.get("assistant_model")
    looks_up = config.get_generation_mode(assistant).value == "assisted_generation" and assistant is None
    return int(config.prompt_lookup_num_tokens or 0) if looks_up else 0


def _why_no_lookup(model: Any, choice: Choice, inputs: dict[str, Any], batch: int, streamer: Any) -> str | None:
    """Why drafts of a call cannot be recorded, although the call can; None if they can."""
    cache, positions = inputs[CACHE], inputs.get("position_ids")
    read_later = not cache.is_default or bool(choice.config.return_dict_in_generate)
    tuned = getattr(text_config(model), "attn_temperature_tuning", False)
    reasons = {
        "drafts of prompt lookup are compared with greedy choices, and do_sample is set": choice.config.do_sample,
        "a logits processor, a stopping criterion or output_scores needs tokens one by one": choice.key(None) is None,
        "recurrent and convolutional states cannot take drafts back": cache.has_states,
        "recent tokens in 16 bits leave their window one by one": any(layer.options.window[1] for layer in cache.packed),
        "this model's forward takes no position_ids": "position_ids" not in inspect.signature(model.forward).parameters,
        "position_ids have more than two axes": positions is not None and positions.ndim != 2,
        "queries are scaled by the length of the first sequence": batch > 1 and tuned,
        "several sequences, of which each takes other drafts, cannot be streamed": batch > 1 and streamer is not None,
        "several sequences, of which each takes other drafts, leave no cache to go on with": batch > 1 and read_later,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _of_transformers(model: Any, call: tuple[Any, ...], generator: torch.Generator | None, options: dict[str, Any]) -> Any:
    input_ids, processor, criteria, config = call
    options = {name: x for name, x in options.items() if x is not None}
    refuse_generator(generator)
    mode = config.get_generation_mode(options.get("assistant_model"))
    name = GENERATION_MODES_MAPPING[mode]
    if "/" in name:
        raise Unsupported(f"{mode.value} is not part of transformers any more ({name}); pass recorded=False to load it from there")
    loop = getattr(type(model), name)
    if mode.value != "assisted_generation":
        options.pop("inputs_tensor", None)
    return loop(model, input_ids, logits_processor=processor, stopping_criteria=criteria, generation_config=config, **options)


def refuse_generator(generator: torch.Generator | None) -> None:
    """Raise for a generator where transformers' loop draws samples, which takes none."""
    if generator is not None:
        raise Unsupported("generator= belongs to recorded steps, which cannot run this call; use torch.manual_seed")


class _Loop:
    def __init__(
        self,
        owner: DecodeLoop,
        view: Any,
        addresses: tuple[Hashable, ...],
        input_ids: torch.Tensor,
        choice: Choice,
        streamer: Any,
        drafts: int,
    ) -> None:
        """drafts: of a step of prompt lookup; 0 without."""
        self.owner, self.view, self.prompts, self.choice, self.config = owner, view, input_ids, choice, choice.config
        self.addresses = addresses
        self.streamer, self.drafts, self.ngram = streamer, drafts, self.config.max_matching_ngram_size or 2
        #: Tokens of the longest sequence at least; without drafts, of all.
        self.length = self.start = self.streamed = input_ids.shape[1]
        self.forward: Forward | None = None

    def run(self, inputs: dict[str, Any]) -> Any:
        """Generate; `inputs` are the model's keyword arguments for the prompt."""
        view, cache = self.view, inputs[CACHE]
        is_visible = not cache.is_default or bool(self.config.return_dict_in_generate)  # someone reads the cache afterwards
        cache.expect_drafts(None)  # of transformers' own loop
        columns = max(self.choice.longest, self.start + 1)
        self.step = take_step(self.owner.model, self.addresses, cache, self.prompts, columns, not is_visible)
        self.tokens, inputs[CACHE] = self.step.tokens, self.step.cache
        if self.step.cache is not cache:
            view.uses.enter_context(self.step.cache.used())
        self.tokens.begin(self.prompts, self.choice.longest, self.choice.padding)
        outputs = self._prompt(inputs, not is_visible)
        inputs = view._update_model_kwargs_for_generation(outputs, inputs)
        logits = outputs.logits[:, -1]
        del outputs
        looks = self.streamer is not None or ranks_of(view) > 1  # of which one may stream, and all must run as many steps
        every = 1 if looks else EVERY_LOOKUP if self.drafts else 1 if is_visible else EVERY
        try:
            with view._optimize_model_for_decode():
                self._choose(logits)
                if self._goes_on(every):
                    self._steps(every, inputs)
        finally:
            self.step.cache.expect_chunk(None)
        if self.drafts:
            self.step.cache.set_lengths(self.tokens.lengths[:, 0] - 1)
        if not is_visible:
            keep_step(self.owner.model, self.step)
        return self._result()

    def _prompt(self, inputs: dict[str, Any], keeps: bool) -> Any:
        """The model's output for the prompts: by a kept graph or, as padding changes rounding, as transformers runs them."""
        tokens = self.prompts.shape[1]
        if keeps and self.owner.fuse_blocks and records_prompts(self.prompts) and self.config.prefill_chunk_size is None:
            own = self.view.prepare_inputs_for_generation(
                self.prompts, next_sequence_length=tokens, is_first_iteration=True, **inputs
            )
            if (padded := padded_prompt(own, tokens)) is not None:
                check_prompt(own, padded, self.tokens.lengths[:, 0])
                return self.step.prompt(PromptForward, self.view.training, padded, WARM_UP)(self.view)
        return self.view._prefill(self.prompts, self.config, inputs)

    def _steps(self, every: int, inputs: dict[str, Any]) -> None:
        view = fused_view(self.owner.model, self.addresses) if self.owner.fuse_blocks else None
        forward = self.view if view is None else view
        kind = view, self.view.training, self.drafts, self.ngram  # a view made anew is another
        self.forward = self._first_forward(kind, inputs)
        more = True
        while more:
            self._choose(self.forward(forward))
            more = self._goes_on(every)

    def _first_forward(self, kind: Hashable, inputs: dict[str, Any]) -> Forward:
        """The step's forward, over the inputs of this call's first step."""
        now = self.tokens.ids[:, : self.length]
        inputs = self.view.prepare_inputs_for_generation(now, next_sequence_length=1, **inputs)
        if not self.drafts:
            return self.step.forward(Forward, kind, inputs, WARM_UP)
        positions = inputs["position_ids"].expand(len(now), 1)
        self.tokens.left_padding.copy_(self.length - 1 - positions)
        width = 1 + self.drafts
        inputs |= {name: inputs[name].new_zeros(len(now), width) for name in ("input_ids", "position_ids")}
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        return self.step.forward(partial(LookupForward, ngram=self.ngram), kind, inputs, WARM_UP)

    def _choose(self, logits: torch.Tensor) -> None:
        """Choose the next tokens from logits [B, V] or, with drafts, [B, L, V]."""
        forward, choice, tokens = self.forward, self.choice, self.tokens
        self._note_nan(logits)
        if isinstance(forward, LookupForward):
            key, once = choice.key(None), partial(choice.of_drafts, forward)
            graph_call = once
        else:
            key, once = choice.key(self.length), partial(choice, tokens, length=self.length)
            graph_call = partial(once, seen=tokens.last)
        if forward is None or key is None or not forward.stays:
            once(logits)
        else:
            pool = forward.recorded.pool
            forward.choice(key, lambda: RecordedChoice(graph_call, pool, choice.generator))(logits)
        self.length += 1

    def _goes_on(self, every: int) -> bool:
        """Whether to go on, read from the device in one of `every` steps; streams the tokens so far."""
        if self.streamer is not None:
            stop = self._count()
            for column in range(self.streamed, stop):
                self.streamer.put(self.tokens.ids[:, column].cpu())
            self.streamed = stop
        if self.length >= self.choice.longest or self.choice.is_late:
            return False
        return bool((self.length - self.start) % every) or bool(self.tokens.unfinished.any())

    def _note_nan(self, logits: torch.Tensor) -> None:
        """Mark sequences that go on although logits [B, V], or [B, L, V] with drafts, hold NaN, of which argmax takes the first.

        Looked at behind the prompt and at the longest answer's last step, as a NaN that is cached stays.
        """
        is_watched = self.length == self.start or self.length + 1 >= self.choice.longest
        if is_watched and not self.config.remove_invalid_values and not active():  # launches that only compile give anything
            newest = logits if logits.ndim == 2 else logits[:, 0]
            self.tokens.undrawn |= self.tokens.unfinished & newest.isnan().any(-1)

    def _count(self) -> int:
        """Tokens of the longest sequence. Raises for sequences that no token could be chosen for."""
        tokens = self.tokens
        if (count := int(torch.where(tokens.undrawn.any(), -1, tokens.lengths.max()))) >= 0:
            return count
        rows = ", ".join(map(str, tokens.undrawn.nonzero()[:, 0].tolist()))
        raise InvalidArgument(
            f"generate: no token can be chosen for sequence {rows}, whose logits are NaN or, behind all logits processors of "
            f"do_sample, infinite or all -inf; look for what made them so (an overflow in float16, say), or pass "
            f"remove_invalid_values=True"
        )

    def _result(self) -> Any:
        if self.streamer is not None:
            self.streamer.end()
        stop = self._count()
        ids = self.tokens.ids[:, :stop].clone()
        if not self.config.return_dict_in_generate:
            return ids
        scores, logits = (None if x is None else tuple(x[: stop - self.start]) for x in (self.choice.scores, self.choice.logits))
        return GenerateDecoderOnlyOutput(sequences=ids, scores=scores, logits=logits, **{CACHE: self.step.cache})

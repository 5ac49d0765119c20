"""Kernels of `generate()`, compiled by many processes before they are launched: one after the other they take half a minute.

A rehearsal tells which: calls of the model with a few blocks, one of each kind, whose launches only compile. Plans are pure
functions and differ for few numbers of rows, so that the calls below reach every variant, whatever prompts and batches come.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig

from halfbyte.errors import Unsupported, check, warn_once
from halfbyte.hf.fused_blocks import fused_without_kernels, with_blocks
from halfbyte.hf.model_support import CACHE, blocks, ranks_of
from halfbyte.hf.recorded_step import MOST_PROMPT, prompt_bucket, release
from halfbyte.hf.structure import Survey, signature, survey
from halfbyte.nn import QuantLayer
from halfbyte.ops.compiling import active, cache_folder, compiling_only, cores, counts, stamp_of

if TYPE_CHECKING:
    from halfbyte.kernels.compiling.parallel import Ahead

#: Batch sizes up to which kernels are compiled at once. The first: by any call.
_BATCHES = (16, 32, 64, 128, 256)
#: Tokens of all sequences of a cache for which plans are those of long texts.
_LONG = 2**17
#: Tokens of prompts that no graph holds: beyond, shapes of tiles repeat.
_LONG_PROMPTS = (2560, 5120)
#: Tokens of a later turn of a conversation, which no graph holds: all classes of few rows, and some longer ones.
_TURNS = (2, 3, 5, 9, 17, 33, 65, 129, 130, 256, 1024, 4096)
#: Model -> the addresses of its weights, and for which calls kernels were compiled: the most sequences, whether blocks are fused.
_begun: WeakKeyDictionary[Any, tuple[Hashable, set[tuple[int, bool]]]] = WeakKeyDictionary()


class Prompts(NamedTuple):
    """A call of `generate()`: prompts [batch, tokens] over a cache of some capacity. padding: on the left of the first."""

    batch: int
    tokens: int
    capacity: int
    padding: int = 0


class Compiled(NamedTuple):
    """What `warm_up` did: kernels that it compiled, the seconds that it took, and the folder of Triton's cache that has them."""

    kernels: int
    seconds: float
    folder: str


def warm_up(model: Any, batch: int = _BATCHES[0]) -> Compiled:
    """Compile the kernels of `model.generate()` for prompts of every length and up to `batch` sequences, in parallel.

    model: on a GPU, with a packed cache (`halfbyte.hf.quantize`). `generate()` does the same, at its first call and mostly in the
    background; this is for an image of a machine, and for a server before its first request. Kernels that an earlier process
    compiled are not compiled again. Raises `Unsupported`, with the reason, where kernels cannot be compiled ahead.
    """
    check(isinstance(batch, int) and batch > 0, f"batch={batch!r}; pass the largest number of sequences of a call, at least 1")
    began = time.monotonic()
    if reason := _why_not(model, survey(model)):
        raise Unsupported(f"kernels are not compiled ahead: {reason}")
    ahead, _ = _begin(model, [], _largest(batch), fuse_blocks=True)
    if ahead is not None:
        ahead.finish()
    return Compiled(0 if ahead is None else len(ahead.jobs), time.monotonic() - began, cache_folder())


def compile_ahead(model: Any, facts: Survey, call: Prompts, fuse_blocks: bool) -> None:
    """Compile what a call of `generate()` launches, and in the background what others do: once, unless an earlier process did."""
    if active():
        return
    largest = _largest(call.batch)
    addresses, classes = _begun.get(model, ((), set()))
    if addresses != facts.addresses:
        classes = set()
        _begun[model] = facts.addresses, classes
    if any(n >= largest and fuses == fuse_blocks for n, fuses in classes) or _why_not(model, facts) or cores() == 1:
        return
    classes.add((largest, fuse_blocks))
    try:
        ahead, count = _begin(model, [call], largest, fuse_blocks)
        if ahead is not None:
            ahead.wait(count)
    except Exception as error:  # of the family's own code, which may want other inputs: the call itself shows it
        warn_once(f"kernels are compiled as they are launched, one by one, and not ahead: {error}")


def _begin(model: Any, now: Sequence[Prompts], largest: int, fuse_blocks: bool) -> tuple[Ahead | None, int]:
    """What is compiled from now on for up to `largest` sequences (None: nothing is left), and how many variants `now` needs."""
    rehearsal = _Rehearsal(model, fuse_blocks)
    stamps = {n: stamp_of(rehearsal.facts, n) for n in (largest, *(n for n in _BATCHES if n > largest))}
    if any(stamp.exists() for stamp in stamps.values()):
        return None, 0
    comparisons = rehearsal.fuse()
    with compiling_only(wait=False, stamp=stamps[largest]) as ahead:
        rehearsal.run(now)
        for launches in comparisons:
            launches()
        count = len(ahead.jobs)
        ahead.begin(is_last=False)
        rehearsal.run(_calls(largest))
        rehearsal.turns()
    return ahead, count


def _largest(batch: int) -> int:
    """The class of a batch size: it is compiled for with all smaller ones."""
    return max(_BATCHES[0], 1 << (batch - 1).bit_length())


def _why_not(model: Any, facts: Survey) -> str:
    """Why kernels of a model cannot be compiled ahead; "" where they can."""
    reasons = {
        "the model is not on one GPU": len(facts.devices) != 1 or next(iter(facts.devices)).type != "cuda",
        "it has no packed cache; pass keys= or values= to halfbyte.hf.quantize": not hasattr(model.generate, "settings"),
        "several processes share its layers": ranks_of(model) > 1,
        "it has an encoder": bool(getattr(model.config, "is_encoder_decoder", False)),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _calls(batch: int) -> Iterator[Prompts]:
    """Calls that reach every variant of up to `batch` sequences: steps of one, prompts of all buckets, and the other steps."""
    buckets = sorted({prompt_bucket(tokens) for tokens in range(1, MOST_PROMPT + 1)})
    yield from _of_batch(1)
    yield from (Prompts(1, tokens, tokens + 2) for tokens in (*buckets, *_LONG_PROMPTS))
    for sequences in counts(batch, _BATCHES[0]):
        yield from _of_batch(sequences)


def _of_batch(sequences: int) -> Iterator[Prompts]:
    """Short and long texts, and one that is padded."""
    least = prompt_bucket(1)
    yield from (Prompts(sequences, least, capacity) for capacity in (64, _LONG // sequences))
    yield Prompts(sequences, least, 64, padding=1)


class _Rehearsal:
    """Calls of a model with one block of each kind, for `compiling_only`. There are no logits: each token is greedy, token 0."""

    def __init__(self, model: Any, fuse_blocks: bool) -> None:
        self.whole, self.model, self.fuse_blocks = model, with_blocks(model, _one_of_each(blocks(model))), fuse_blocks
        self.model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id, pad_token_id=0)
        self.generate, self.capacity = copy.copy(model.generate), 1
        self.generate.model, self.generate.cache = self.model, self._cache

    @property
    def facts(self) -> tuple[object, ...]:
        """What decides which kernels are compiled, besides the calls."""
        weights = [(name, m.format.name) for name, m in self.model.named_modules() if isinstance(m, QuantLayer)]
        return signature(self.model), weights, self.generate.settings.options, self.model.dtype, self.fuse_blocks

    def run(self, calls: Iterable[Prompts]) -> None:
        """Calls for two tokens: a prompt and a step."""
        for call in calls:
            self.capacity, mask = call.capacity, self._zeros(call.batch, call.tokens) + 1
            mask[0, : call.padding] = 0
            options = {"max_new_tokens": 2, "do_sample": False, "fuse_blocks": self.fuse_blocks}
            with suppress(torch.OutOfMemoryError):  # a cache that does not fit, over which no call can run
                self.generate(torch.zeros_like(mask), attention_mask=mask, **options)
            release(self.model)  # or a second call would be recorded

    def fuse(self) -> list[Callable[[], object]]:
        """Fuse the blocks. What is launched for that, once, before a first step."""
        return fused_without_kernels(self.model) if self.fuse_blocks else []

    @torch.no_grad()
    def turns(self) -> None:
        """Turns of a conversation, whose past the cache holds."""
        cache = self._cache(None, 2 * sum(_TURNS))
        options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        for tokens in (_TURNS[-1], *_TURNS):
            self.model(input_ids=self._zeros(1, tokens), use_cache=True, **{**options, CACHE: cache})

    def _cache(self, model: Any, capacity: int) -> Any:
        return self.whole.generate.cache(self.whole, max(capacity, self.capacity))

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long, device=self.model.device)


def with_random_weights(model: Any, device: torch.device) -> Any:
    """A model on the meta device, with random weights on another: blocks of one kind share those of the first and of the last."""
    layers = blocks(model)
    ends = {id(layer) for layer in _one_of_each(layers)}
    first = {signature(layer): layer for layer in reversed(layers)}
    small = with_blocks(model, [layer if id(layer) in ends else first[signature(layer)] for layer in layers])
    with torch.no_grad():
        small.to_empty(device=device).initialize_weights()
    return small.eval()


def _one_of_each(layers: Sequence[Any]) -> list[Any]:
    """The first and the last block of each kind: a cache begins and ends with those."""
    kinds: dict[Hashable, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(signature(layer), []).append(number)
    return [layers[number] for number in sorted({number for some in kinds.values() for number in (some[0], some[-1])})]

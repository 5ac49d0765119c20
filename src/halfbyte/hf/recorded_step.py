"""Decode steps, and prompts, recorded as CUDA graphs, kept from one call of `generate()` to the next.

A `Step` is static memory (a cache, the tokens of a call, the inputs of a forward) and the graphs recorded over it: forwards, by the
structure of their inputs, and the choices of a token that read their logits. Graphs read lengths on the device, so a step serves
every call of its batch size that fits into its cache.

Launching a short prompt takes the host longer than it takes the GPU. So a prompt is padded on the right to a bucket of tokens, and
recorded when its bucket comes for the second time. Padding is computed and not stored; no token of the prompt sees it.

Prompt lookup (`generate(..., prompt_lookup_num_tokens=n)`) is a step, too:

    tokens -> drafts -> [newest token, drafts] -> model.forward -> logits -> tokens that the model itself would have chosen

The tokens that followed an earlier occurrence of the newest tokens are drafts of what follows now (prompt lookup decoding, Saxena
2023). One forward verifies all drafts, sequence by sequence. The tokens are those of single steps, up to rounding by M of a GEMM.
Rejected drafts are dropped by lengths alone. So none may finish a block of per-channel keys, which is quantized at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from halfbyte.errors import warn_once
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.handles import check_one_text, starts_of
from halfbyte.hf.model_support import BUCKET, CACHE, DECODE_QUERIES

Result = TypeVar("Result")
#: What is kept at most: steps of a model, forwards of a step, recorded lengths of prompts, choices of a forward.
MOST_STEPS, MOST_FORWARDS, MOST_PROMPTS, MOST_CHOICES = 4, 4, 8, 8
#: Bytes of kept caches on other devices than a GPU.
_BUDGET = 2**30
#: Drafts of one step: with the newest token they are the queries that attention answers in one pass.
MOST_DRAFTS = DECODE_QUERIES - 1
_ADVANCING = ("position_ids", "cache_position")
#: Tokens of a recorded prompt at most: more keep a GPU busy longer than the host takes to launch them.
MOST_PROMPT = 2048
#: Inputs of a recorded prompt that have a column for each token.
_BY_TOKEN = {"input_ids", "attention_mask", "position_ids"}
#: Model -> its steps by what they depend on, those used last at the end. A step in use is not among them.
_kept: WeakKeyDictionary[Any, dict[Hashable, Step]] = WeakKeyDictionary()
#: One thread records at a time: the beginning of a recording waits for the whole GPU, which another one under way forbids.
_RECORDING = threading.Lock()


class Recorded:
    """A function over static memory: called `warm_up` times, then replayed as a CUDA graph. Without graphs it is called."""

    def __init__(self, warm_up: int, pool: Any, generator: torch.Generator | None = None) -> None:
        """pool: of the graphs' memory. Those of a step share one, as they are replayed one after the other."""
        self.warm_up, self.pool, self.generator = warm_up, pool, generator
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None
        self.calls = 0

    def __call__(self, run: Callable[[], Result], device: torch.device) -> Result:
        """The result of `run`, valid until the next call."""
        self.calls += 1
        if self.calls == self.warm_up + 1 and device.type == "cuda":
            self._record(run, device)
        if self.graph is None:
            return run()
        self.graph.replay()
        return self.result  # type: ignore[no-any-return]

    def _record(self, run: Callable[[], Any], device: torch.device) -> None:
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        with _RECORDING:
            try:
                with torch.cuda.device(device), torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                    self.result = run()
                self.graph = graph
            except RuntimeError as error:
                torch.cuda.synchronize()
                warn_once(f"a forward of this model cannot be recorded in a CUDA graph and runs without: {error}")


class Tokens:
    """The tokens of a call, on the device.

    ids [B, columns]       `lengths` [B, 1] of each sequence, padding behind them
    last [B, 1]            the newest of them, which the forward reads
    left_padding [B, 1]    columns that positions do not count
    unfinished bool [B]    sequences that go on; `longest` [] tokens end all of them
    undrawn bool [B]       those that ended because their logits have no probabilities (NaN, infinity)
    """

    def __init__(self, prompts: torch.Tensor, columns: int) -> None:
        batch = len(prompts)
        self.ids = prompts.new_zeros(batch, columns)
        self.last, self.lengths, self.left_padding = (self.ids.new_zeros(batch, 1, dtype=torch.long) for _ in range(3))
        self.longest = self.lengths.new_zeros(())
        self.unfinished, self.undrawn = (torch.ones(batch, dtype=torch.bool, device=prompts.device) for _ in range(2))

    def begin(self, prompts: torch.Tensor, longest: int, padding: torch.Tensor | None) -> None:
        """Hold the prompts [B, T] of a call, and nothing else."""
        self.ids[:] = 0 if padding is None else padding
        self.ids[:, : prompts.shape[1]] = prompts
        self.lengths.fill_(prompts.shape[1])
        self.longest.fill_(longest)
        self.unfinished.fill_(True)
        self.undrawn.fill_(False)


class Forward:
    """The forward of a step over static inputs, and the choices that were recorded over its logits."""

    def __init__(self, kind: Hashable, inputs: dict[str, Any], recorded: Recorded, tokens: Tokens) -> None:
        self.kind, self.recorded, self.tokens = kind, recorded, tokens
        self.inputs = {**inputs, "input_ids": tokens.last}
        self.choices: dict[Hashable, Any] = {}

    def __call__(self, forward: Callable[..., Any]) -> torch.Tensor:
        """Logits behind the tokens in "input_ids", by the model's `forward`. Valid until the next call."""
        return self.recorded(lambda: self._run(forward), self.tokens.ids.device)

    @property
    def stays(self) -> bool:
        """Whether its logits have a fixed address, so that readers of them can be recorded; True where nothing is recorded."""
        return self.recorded.graph is not None or self.tokens.ids.device.type != "cuda"

    def choice(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """The choice that is kept under `key`, or what `make` makes."""
        result: Result = self.choices.pop(key) if key in self.choices else make()
        self.choices[key] = result
        _drop_oldest(self.choices, MOST_CHOICES)
        return result

    def takes(self, kind: Hashable, inputs: dict[str, Any]) -> bool:
        """Copy the inputs of another call into the memory that it reads, if they look the same."""
        new, shape = pytree.tree_flatten(inputs)
        leaves, before = pytree.tree_flatten(self.inputs)
        if self.kind != kind or before != shape or not all(map(_alike, leaves, new)):
            return False
        for a, b in zip(leaves, new, strict=True):
            if isinstance(a, torch.Tensor) and a is not b:
                a.copy_(b)
        return True

    def _run(self, forward: Callable[..., Any]) -> torch.Tensor:
        """Logits [B, V] behind the newest token of each sequence."""
        logits: torch.Tensor = forward(**self.inputs, return_dict=True).logits[:, -1]
        for name in _ADVANCING:
            if isinstance(self.inputs.get(name), torch.Tensor):
                self.inputs[name].add_(1)
        return logits


class LookupForward(Forward):
    """The forward of the newest token of each sequence and the drafts behind it.

    ngram         the longest suffix to match
    held, counts  tokens in the cache before it, and how many of its own are real
    """

    def __init__(self, kind: Hashable, inputs: dict[str, Any], recorded: Recorded, tokens: Tokens, ngram: int) -> None:
        super().__init__(kind, inputs, recorded, tokens)
        self.ids, self.positions, self.ngram = inputs["input_ids"], inputs["position_ids"], ngram
        self.inputs = inputs
        self.cache: PackedCache = inputs[CACHE]
        blocks = [layer.key_format.token_block for layer in self.cache.packed if layer.key_format.token_block]
        self.block = min(blocks, default=None)
        self.held, self.counts = (torch.zeros(len(self.ids), dtype=torch.int32, device=self.ids.device) for _ in range(2))

    def _run(self, forward: Callable[..., Any]) -> torch.Tensor:
        """Logits [B, L, V] behind the newest tokens and their drafts."""
        self._draft()
        self.cache.expect_chunk(self.counts, self.held)
        self.cache.set_lengths(self.held)
        logits: torch.Tensor = forward(**self.inputs, return_dict=True).logits
        return logits

    def _draft(self) -> None:
        """Set tokens, positions and the chunk."""
        tokens, width = self.tokens, self.ids.shape[1]
        length = tokens.lengths - 1
        drafts, matches = drafted(tokens.ids, tokens.lengths, width - 1, self.ngram)
        count = torch.where(matches, width, 1).minimum(tokens.longest - tokens.lengths)
        if self.block is not None:
            count = count.minimum((self.block - 1 - length % self.block).clamp_min(1))
        count = count * tokens.unfinished[:, None]
        column = torch.arange(width, device=length.device)
        self.ids.copy_(torch.cat([tokens.last, drafts], 1))
        self.positions.copy_(length - tokens.left_padding + column.minimum((count - 1).clamp_min(0)))
        for mine, new in ((self.held, length), (self.counts, count)):
            mine.copy_(new[:, 0])

    def take(self, chosen: torch.Tensor, ends: torch.Tensor, padding: torch.Tensor | int) -> None:
        """Keep the tokens [B, L] chosen after accepted drafts, up to one that `ends` its sequence."""
        tokens, column, count = self.tokens, torch.arange(chosen.shape[1], device=chosen.device), self.counts[:, None]
        stands = (chosen[:, :-1] == self.ids[:, 1:]) & (column[1:] < count) & ~ends[:, :-1]
        new = (1 + stands.long().cumprod(1).sum(1, keepdim=True)).minimum(count)
        tokens.ids.scatter_(1, tokens.lengths + column, torch.where(column < new, chosen, padding))
        tokens.lengths += new
        newest = (new - 1).clamp_min(0)
        tokens.last.copy_(chosen.gather(1, newest))
        tokens.unfinished &= (~ends.gather(1, newest) & (tokens.lengths < tokens.longest))[:, 0]


def drafted(ids: torch.Tensor, lengths: torch.Tensor, count: int, ngram: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts [B, count] behind the first `lengths` [B, 1] tokens of ids [B, columns], and whether there are any, bool [B, 1].

    They follow the latest earlier occurrence of the longest suffix of up to `ngram` tokens. Drafts beyond the end of the text
    repeat the occurrence.
    """
    column = torch.arange(ids.shape[1], device=ids.device)
    alike = column < lengths - 1
    match_lengths = torch.zeros_like(ids)  # tokens of the suffix that end in a column
    for back in range(ngram):
        suffix = ids.gather(1, (lengths - 1 - back).clamp_min(0))
        alike = alike & (ids.roll(back, 1) == suffix) & (column >= back)
        match_lengths += alike
    best = (match_lengths * ids.shape[1] + column).masked_fill(match_lengths == 0, -1).amax(1, keepdim=True)
    start = best % ids.shape[1] + 1
    ahead = torch.arange(count, device=ids.device) % (lengths - start).clamp_min(1)
    return ids.gather(1, (start + ahead).clamp_max(ids.shape[1] - 1)), best >= 0


class PromptForward(Forward):
    """The forward of a whole prompt over static inputs, as `padded_prompt` makes them."""

    def __init__(self, kind: Hashable, inputs: dict[str, Any], recorded: Recorded, tokens: Tokens) -> None:
        super().__init__(kind, inputs, recorded, tokens)
        self.inputs = inputs
        self.cache: PackedCache = inputs[CACHE]
        self.counts = torch.zeros(len(tokens.ids), dtype=torch.int32, device=tokens.ids.device)

    def _run(self, forward: Callable[..., Any]) -> Any:
        """The model's output object, with logits [B, 1, V] behind the last token of the prompt."""
        self.counts.copy_(self.inputs["logits_to_keep"] + 1)
        self.cache.expect_chunk(self.counts)
        try:
            return forward(**self.inputs, return_dict=True)
        finally:
            self.cache.expect_chunk(None)


def records_prompts(prompts: torch.Tensor) -> bool:
    """Whether prompts [B, T] there may be recorded: on a GPU, where replaying saves the host's launches."""
    return prompts.is_cuda


def padded_prompt(inputs: dict[str, Any], tokens: int) -> dict[str, Any] | None:
    """The inputs of a prompt's forward as a `PromptForward` takes them; None where it cannot, or the GPU is slower than the host.

    Padding repeats the last column. A window, a state or a measured scale would see it, and so would what else the inputs hold.
    """
    cache, ids = inputs.get(CACHE), inputs.get("input_ids")
    if not isinstance(cache, PackedCache) or cache.has_states or ids is None or len(ids) * tokens > MOST_PROMPT:
        return None
    formats = [fmt for layer in cache.packed for fmt in (layer.key_format, layer.value_format)]
    if any(fmt.granularity == "tensor" for fmt in formats) or any(layer.sliding is not None for layer in cache.packed):
        return None
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    if not tensors.keys() <= _BY_TOKEN or any(x.shape[-1] != tokens for x in tensors.values()) or inputs.get("logits_to_keep") != 1:
        return None
    if any(tuple(x.shape) != (len(ids), 1, 1, 1) for x in _ready_masks(inputs)):
        return None
    more = prompt_bucket(tokens) - tokens
    padded = {name: torch.cat([x, x[..., -1:].expand(*x.shape[:-1], more)], -1) for name, x in tensors.items()}
    return {**inputs, **padded, "logits_to_keep": torch.tensor([tokens - 1], device=ids.device)}


def _ready_masks(inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Masks by type of layer, made before the forward: where texts start, unless tokens of an image see each other."""
    mask = inputs.get("attention_mask")
    return [x for x in mask.values() if isinstance(x, torch.Tensor)] if isinstance(mask, dict) else []


def check_prompt(inputs: dict[str, Any], padded: dict[str, Any], lengths: torch.Tensor) -> None:
    """Raise for rows that hold several texts (`check_one_text`), of a prompt and its `padded_prompt`. Waits for a GPU."""
    mask, ready = padded.get("attention_mask"), _ready_masks(padded)
    starts = starts_of(mask, mask.shape[-1], 0) if isinstance(mask, torch.Tensor) else next(iter(ready), None)
    check_one_text(inputs.get("position_ids"), None if starts is None else starts.view(-1), lengths)


def prompt_bucket(tokens: int) -> int:
    """Tokens that a prompt is padded to: at least 16, and up to a quarter more than there are."""
    step = max(16, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // step) * step


class Step:
    """A cache, the tokens of a call, and the forwards that read them and those of prompts, the ones used last at the end."""

    def __init__(self, key: Hashable, cache: PackedCache, prompts: torch.Tensor, columns: int) -> None:
        self.key, self.cache = key, cache
        self.tokens = Tokens(prompts, max(columns, cache.capacity + 1) + DECODE_QUERIES)  # a step may write so many beyond the end
        self.forwards: list[Forward] = []
        self.prompts: list[Forward] = []
        self.pool = torch.cuda.graph_pool_handle() if prompts.is_cuda else None

    def fits(self, cache: PackedCache, columns: int) -> bool:
        """Whether a call that would use `cache` and so many columns of tokens can use this step."""
        return self.cache.capacity >= cache.capacity and self.tokens.ids.shape[1] >= columns + DECODE_QUERIES

    def forward(self, make: Callable[..., Forward], kind: Hashable, inputs: dict[str, Any], warm_up: int) -> Forward:
        """The forward of a `kind` that reads such inputs; they are those of a call's first step."""
        return self._kept(self.forwards, MOST_FORWARDS, make, kind, inputs, warm_up)

    def prompt(self, make: Callable[..., Forward], kind: Hashable, inputs: dict[str, Any], warm_up: int) -> Forward:
        """The forward of a `padded_prompt`."""
        return self._kept(self.prompts, MOST_PROMPTS, make, kind, inputs, warm_up)

    def _kept(
        self, held: list[Forward], most: int, make: Callable[..., Forward], kind: Hashable, inputs: dict[str, Any], warm_up: int
    ) -> Forward:
        """One of `held`, which are `most` and the one used last at the end, or a new one in place of the first."""
        match = next((forward for forward in held if forward.takes(kind, inputs)), None)
        if match is None:
            own = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, inputs)
            match = make(kind, own, Recorded(warm_up, self.pool), self.tokens)
        if match.recorded.graph is not None:
            self.cache.expect_replays(True)
        held[:] = [*(one for one in held if one is not match), match][-most:]
        return match


def take_step(model: Any, addresses: Hashable, cache: PackedCache, prompts: torch.Tensor, columns: int, keeps: bool) -> Step:
    """A step of a model with weights at `addresses` for a call with these prompts [B, T], a `cache` that holds nothing yet, and
    `columns` tokens at most.

    A kept step of the same batch size serves every call that fits into its cache. Else its cache is freed, and the new one has room
    for up to a quarter more than is needed. A model keeps `MOST_STEPS` steps; those used least recently are dropped for a new one,
    until all caches take a quarter of the GPU's memory. Without `keeps` the step is this call's, with its cache as it is.
    """
    if not keeps:
        return Step(None, cache, prompts, columns)
    cache.grow(max(1, columns - 1))  # a stopping criterion of the call may allow more than its configuration
    key, steps = _key(addresses, cache, prompts), _kept.get(model, {})
    step = steps.pop(key, None)
    if step is not None and step.fits(cache, columns):
        step.cache.reset()
        step.cache.expect_replays(False)  # until the prompt is there: else each layer would read how much it holds
        return step
    del step
    cache.grow(roomy(cache.capacity))
    budget = torch.cuda.get_device_properties(prompts.device).total_memory // 4 if prompts.is_cuda else _BUDGET
    _drop_oldest(steps, MOST_STEPS - 1, budget - int(cache.bytes_per_token * len(prompts) * cache.capacity))
    return Step(key, cache, prompts, columns)


def keep_step(model: Any, step: Step) -> None:
    """Keep a step for the next call."""
    steps = _kept.setdefault(model, {})
    for key in [key for key in list(steps) if key[-1] != step.key[-1]]:  # type: ignore[index]
        steps.pop(key, None)  # recorded over other weights; another thread may have taken it
    steps.pop(step.key, None)
    steps[step.key] = step
    _drop_oldest(steps, MOST_STEPS)


def kept_steps(model: Any) -> list[Step]:
    """The steps that a model keeps, the one used last at the end."""
    return list(_kept.get(model, {}).values())


def release(model: Any) -> int:
    """Free the caches and CUDA graphs that `halfbyte.hf.generate` keeps for a model's next call; the bytes of those caches.

    The next call makes and records new ones. They are freed with the model, too.
    """
    return sum(step.cache.nbytes for step in _kept.pop(model, {}).values())


def roomy(capacity: int) -> int:
    """A capacity of at least so many tokens, and up to a quarter more: there are four in each octave."""
    step = max(BUCKET, 1 << max(0, capacity.bit_length() - 3))
    return -(-capacity // step) * step


def _key(addresses: Hashable, cache: PackedCache, prompts: torch.Tensor) -> tuple[Any, ...]:
    """What a step depends on: batch size, the cache's layout, the mode of its memory, and, last, where the weights lie.

    The batch size is exact: another one may have other plans, and with them other rounding. Memory that was made in
    `torch.inference_mode` is read-only outside of it.
    """
    layout = tuple((layer.kinds, layer.options.window, id(layer.calibrated)) for layer in cache.packed)
    return len(prompts), prompts.dtype, prompts.device, layout, torch.is_inference_mode_enabled(), addresses


def _alike(a: Any, b: Any) -> bool:
    """Whether a graph that read `a` may read `b`: tensors of one shape and type, or the same value."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b))


def _drop_oldest(held: dict[Hashable, Any], most: int, budget: int | None = None) -> None:
    """Drop the first entries until there are `most`, of steps also until their caches take `budget` bytes at most."""
    while held and (len(held) > most or (budget is not None and sum(step.cache.nbytes for step in list(held.values())) > budget)):
        held.pop(next(iter(list(held)), None), None)

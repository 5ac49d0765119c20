"""Recorded steps of `generate()`: token for token what transformers' loop gives with the same cache.

On a CPU the recorded forward is an ordinary call; everything around it is what runs on a GPU.
"""

from __future__ import annotations

import copy
import gc
import re
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from families import tiny_model
from tiny_models import FAMILIES, left_padding
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation.streamers import BaseStreamer

import halfbyte.hf as hf
from halfbyte import KVCache
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.hf import choice, graph_generate, recorded_step
from halfbyte.hf.fused_blocks import fused_view
from halfbyte.hf.recorded_step import kept_steps
from watched import watched

#: Files that read a CPU's memory only: lengths, checks of contents and of the prompt's mask.
CPU_ONLY = ("cache.py", "cache_layers.py", "attention.py", "handles.py")
CACHE = {"keys": "int8", "values": "int4_g32"}


@pytest.fixture
def packed(build):
    return lambda family="llama", **options: hf.quantize(build(family), **{**CACHE, **options})


@pytest.fixture(autouse=True)
def _no_fallback(request, monkeypatch):
    """A call that falls back would be compared with itself."""
    if "falls_back" not in request.fixturenames:
        monkeypatch.setattr(graph_generate, "_of_transformers", lambda *a: pytest.fail("it fell back"))


@pytest.fixture
def falls_back():
    """Says that a test wants transformers' loop."""


def padded(ids):
    """Left padding of 5 and of 0 tokens, and so on."""
    mask = left_padding(ids, *range(5, 6 - len(ids), -1))
    return ids.masked_fill(mask == 0, 0), mask


def both(model, ids, **options):
    """Tokens of `generate()` and of the same call with steps of ours."""
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20, **options}
    found = []
    for custom in ({"recorded": False}, {"fuse_blocks": False}):
        torch.manual_seed(5)
        given = {name: copy.deepcopy(x) for name, x in options.items()}
        found.append(model.generate(ids, **given, **custom))
    return found


def named(value):
    """A test's name, alike in every process: without addresses."""
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_of_every_family(packed, prompt, family, batch):
    model, (ids, mask) = packed(family), padded(prompt(batch))
    theirs, ours = both(model, ids, attention_mask=mask)
    assert torch.equal(theirs, ours)
    assert len(set(theirs[:, 21:].flatten().tolist())) > 5  # not one token over and over


def some_tokens(model, ids, count):
    """Tokens that greedy continuations hold, at different places of each row."""
    new = model.generate(ids, recorded=False, do_sample=False, max_new_tokens=20, pad_token_id=0)[:, ids.shape[1] :]
    return [int(new[row, 3 * row + 2]) for row in range(count)]


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"min_new_tokens": 12},
        {"no_repeat_ngram_size": 2},
        {"logits_processor": tf.LogitsProcessorList([lambda ids, scores: scores.roll(ids.shape[1], -1)])},
        {"num_return_sequences": 2, "do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"max_time": 0.0},
    ],
    ids=named,
)
@pytest.mark.parametrize("ends", [False, True])
def test_options(packed, prompt, options, ends):
    model, (ids, mask) = packed(), padded(prompt(3))
    eos = {"eos_token_id": some_tokens(model, ids, 3)} if ends else {}
    theirs, ours = both(model, ids, attention_mask=mask, **options, **eos)
    assert torch.equal(theirs, ours)


def test_all_sequences_end_early(packed, prompt):
    """The end lies between two looks at the device: what was computed beyond it is cut off."""
    model, ids = packed(), prompt(3)
    new = model.generate(ids, recorded=False, do_sample=False, max_new_tokens=20, pad_token_id=0)[:, ids.shape[1] :]
    for place in (0, 1, 6, 7, 8, 9):
        theirs, ours = both(model, ids, eos_token_id=new[:, place].tolist())
        assert torch.equal(theirs, ours)
        assert theirs.shape[1] <= ids.shape[1] + place + 1


def test_scores_logits_and_the_cache_that_is_returned(packed, prompt):
    model, ids = packed(), prompt(2)
    eos = some_tokens(model, ids, 2)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "min_new_tokens": 3}
    theirs, ours = both(model, ids, eos_token_id=eos, **options)
    assert torch.equal(theirs.sequences, ours.sequences)
    for name in ("scores", "logits"):
        first, second = getattr(theirs, name), getattr(ours, name)
        assert len(first) == len(second) > 0
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for a, b in zip(theirs.past_key_values.layers, ours.past_key_values.layers, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(a.kv.dequantized(), b.kv.dequantized(), strict=True))
        assert torch.equal(a.kv.lengths, b.kv.lengths)
    again = both(model, prompt(2, seed=1))  # must not touch what was returned
    assert torch.equal(*again)
    assert int(ours.past_key_values.get_seq_length()) == int(theirs.past_key_values.get_seq_length())


def test_a_conversation_in_a_cache_of_its_own(packed, prompt):
    model, ids, found = packed(), prompt(2), []
    for custom in ({"recorded": False}, {"fuse_blocks": False}):
        cache, text = hf.PackedCache(model, 32, **CACHE), ids
        for _ in range(3):
            text = model.generate(text, past_key_values=cache, do_sample=False, max_new_tokens=15, **custom)
            text = torch.cat([text, prompt(2, 4, seed=9)], 1)
        found.append((text, cache.layers[0].kv))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1].lengths, found[1][1].lengths)


class Collected(BaseStreamer):
    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("eos", [False, True])
def test_a_streamer_gets_every_token_once(packed, prompt, eos):
    model, ids, found = packed(), prompt(1), []
    ends = {"eos_token_id": some_tokens(model, ids, 1)} if eos else {}
    for custom in ({"recorded": False}, {"fuse_blocks": False}):
        streamer = Collected()
        made = model.generate(ids, streamer=streamer, do_sample=False, max_new_tokens=20, pad_token_id=0, **ends, **custom)
        found.append((streamer.got, streamer.ended, made.tolist()))
    assert found[0] == found[1]
    assert found[0][1] == 1


class Reads(TorchDispatchMode):
    """The files whose code reads a number from a device, other than the CPU's own caches and ops."""

    def __init__(self):
        super().__init__()
        self.files = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            names = [frame.filename for frame in traceback.extract_stack()[:-1]]
            self.files.append(Path(next(n for n in reversed(names) if "/torch/" not in n)).name)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_device_is_read_once_in_so_many_tokens(packed, prompt, monkeypatch, family, sample):
    model, run, reads = packed(family), graph_generate._Loop.run, Reads()
    fused_view(model)  # which compares numbers, once
    monkeypatch.setattr(graph_generate._Loop, "run", lambda *a: watched(run, *a))

    def watched(*args):
        with reads:
            return args[0](*args[1:])

    ids, mask = padded(prompt(2))
    options = {"do_sample": sample, "top_k": 9, "top_p": 0.9, "max_new_tokens": 33, "eos_token_id": 10**6, "pad_token_id": 0}
    model.generate(ids, attention_mask=mask, **options)
    of_the_loop = [name for name in reads.files if name not in CPU_ONLY]
    assert of_the_loop == ["graph_generate.py"] * 5  # after 8, 16, 24, 32 tokens, and at the end


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_draws_from_logits_that_are_not_finite_are_refused(packed, prompt, value):
    """transformers' check of them would wait for the GPU in every step; a sequence that ended before does not matter."""
    model, steps = packed(), []

    def spoilt(module, args, logits):
        steps.append(logits)
        return logits if len(steps) < 4 else torch.cat([logits[:-1], torch.full_like(logits[-1:], value)])

    model.lm_head.register_forward_hook(spoilt)
    options = {"do_sample": True, "max_new_tokens": 9, "pad_token_id": 0}
    ids, streamer = prompt(3), Collected()
    with pytest.raises(InvalidArgument, match="generate: no token can be chosen for sequence 2, whose logits"):
        model.generate(ids, **options)
    steps.clear()
    with pytest.raises(InvalidArgument, match="for sequence 0, whose"):
        model.generate(prompt(1), streamer=streamer, **options)
    assert len(streamer.got) == 1 + 3  # the prompt, and what was drawn before
    steps.clear()
    assert model.generate(ids, remove_invalid_values=True, **options).shape[1] == ids.shape[1] + 9
    steps.clear()
    with pytest.raises(InvalidArgument, match="for sequence 0, 1, whose"):
        model.generate(prompt(2), suppress_tokens=[*range(model.config.vocab_size)], **options)
    steps.clear()
    ended = model.generate(ids, eos_token_id=[*range(model.config.vocab_size)], **options)
    assert ended.shape[1] == ids.shape[1] + 1


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 1}, {"prompt_lookup_num_tokens": 3}, {"output_logits": True}])
def test_greedy_tokens_of_nan_are_refused(packed, prompt, options):
    """The largest of NaN is the first of them: a text of token 0."""
    model, ids = packed(), prompt(1)
    options = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0, "return_dict_in_generate": True, **options}
    model.generate(ids, **options)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(InvalidArgument, match="generate: no token can be chosen for sequence 0, whose logits are NaN"):
        model.generate(ids, **options)
    if "prompt_lookup_num_tokens" not in options:  # which does without processors
        model.generate(ids, remove_invalid_values=True, **options)


def test_greedy_tokens_of_nan_that_come_later_are_refused(packed, prompt):
    model, steps = packed(), []

    def spoilt(module, args, logits):
        steps.append(logits)
        return logits if len(steps) < 4 else torch.full_like(logits, torch.nan)

    model.lm_head.register_forward_hook(spoilt)
    with pytest.raises(InvalidArgument, match="generate: no token can be chosen for sequence 0, 1, whose logits are NaN"):
        model.generate(prompt(2), do_sample=False, max_new_tokens=9, pad_token_id=0)


@pytest.mark.slow
def test_the_next_call_keeps_step_and_cache(packed, prompt):
    """Whatever the lengths of its prompts and answers, if the batch is as large and all fits."""
    model = packed()
    assert torch.equal(*both(model, prompt(2), max_new_tokens=60))
    (step,) = kept_steps(model)
    (forward,) = step.forwards
    for seed, tokens, new in ((4, 21, 60), (5, 30, 20), (6, 3, 2), (7, 40, 50)):
        assert torch.equal(*both(model, prompt(2, tokens, seed), max_new_tokens=new))
    padding = both(model, padded(prompt(2))[0], attention_mask=padded(prompt(2))[1])  # other inputs: another forward
    assert torch.equal(*padding)
    assert torch.equal(*both(model, prompt(2)))
    assert kept_steps(model) == [step]
    assert len(step.forwards) == 2
    assert step.forwards[1] is forward  # which was used last
    assert forward.inputs["input_ids"] is step.tokens.last
    hf.quantize(model, "int4_g32")  # the weights lie elsewhere
    assert torch.equal(*both(model, prompt(2)))
    assert step not in kept_steps(model)
    assert len(kept_steps(model)) == 1


@pytest.mark.parametrize("family", ["llama", "lfm2"])  # lfm2 has states, which transformers allocates
def test_a_step_made_in_inference_mode_serves_no_call_outside_of_it(prompt, family):
    model, ids = hf.quantize(tiny_model(family), keys="int8_tensor", values="int8_tensor"), prompt()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
        for drafts in ({}, {"prompt_lookup_num_tokens": 4}) if family == "llama" else ({},):
            with mode():
                ours = model.generate(ids, do_sample=False, max_new_tokens=9, fuse_blocks=False, **drafts)
                assert torch.equal(ours, model.generate(ids, do_sample=False, max_new_tokens=9, recorded=False))
    assert len(kept_steps(model)) == 2


def test_a_kept_cache_counts_its_prompt_as_a_new_one_does(packed, prompt, monkeypatch):
    """Else each layer would wait for the GPU, and attend to a past that is not there. Behind the prompt, graphs append."""
    model, done = packed(), []
    layers = model.config.num_hidden_layers
    watched(monkeypatch, KVCache, "expect_replays", lambda self, expected: done.append(expected))
    watched(monkeypatch, KVCache, "append", lambda self, k, *a, **b: done.append(k.shape[2]))
    options = {"max_new_tokens": 3, "do_sample": False, "fuse_blocks": False}
    model.generate(prompt(2), **options)
    assert done == [21] * layers + [1] * 2 * layers
    done.clear()
    (step,) = kept_steps(model)
    recorded = step.forwards[0].recorded
    recorded.graph, recorded.result = SimpleNamespace(replay=lambda: None), torch.zeros(2, model.config.vocab_size)
    model.generate(prompt(2), **options)
    assert done == [False] * layers + [21] * layers + [True] * layers


def test_what_is_kept_is_bounded(packed, prompt, monkeypatch):
    """A longer call replaces the step of its batch size; those used least recently go first, by number and by bytes."""
    model = packed()

    def kept(batch, tokens=21):
        assert torch.equal(*both(model, prompt(batch, tokens), max_new_tokens=3))
        return [(len(step.tokens.last), step.cache.capacity) for step in kept_steps(model)]

    assert kept(2) == [(2, 64)]
    assert kept(2, 600) == [(2, 640)]
    assert kept(2) == [(2, 640)]
    assert kept(1) == [(2, 640), (1, 64)]
    assert kept(2) == [(1, 64), (2, 640)]
    for batch in (3, 4):
        kept(batch)
    assert kept(5) == [(2, 640), (3, 64), (4, 64), (5, 64)]
    used = sum(step.cache.nbytes for step in kept_steps(model)[-2:])
    monkeypatch.setattr(recorded_step, "_BUDGET", used + step_bytes(model, 6))
    assert kept(6) == [(4, 64), (5, 64), (6, 64)]
    monkeypatch.setattr(recorded_step, "_BUDGET", 0)
    assert kept(1) == [(1, 64)]  # the last one always is
    nbytes, gone = kept_steps(model)[0].cache.nbytes, weakref.ref(kept_steps(model)[0].cache)
    assert hf.release(model) == nbytes > 0
    assert hf.release(model) == 0
    gc.collect()
    assert gone() is None


def step_bytes(model, batch):
    """Of a cache of 64 tokens a sequence."""
    return int(hf.PackedCache(model, 64, **CACHE).bytes_per_token * 64 * batch)


def test_room_of_a_kept_cache():
    for tokens in range(1, 70000, 37):
        room = recorded_step.roomy(tokens)
        assert tokens <= room <= max(tokens + 63, 1.25 * tokens)
        assert room % 64 == 0
        assert recorded_step.roomy(room) == room
    assert len({recorded_step.roomy(tokens) for tokens in range(4096, 8192)}) == 5  # the next octave's first among them


class Tape(TorchDispatchMode):
    """Ops of a function, which can run again over the same memory, as a CUDA graph does: numbers stay what they were."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "reads the device"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def taped(monkeypatch):
    """Choices are recorded and replayed here, too, over logits that stay where they are; the tapes."""
    tapes, run = [], recorded_step.Forward.__call__

    class Taped(recorded_step.Recorded):
        def __call__(self, function, device):
            self.calls += 1
            if self.calls <= self.warm_up:
                return function()
            if self.graph is not None:
                return self.graph.replay()
            self.graph = Tape()
            tapes.append(self.graph)
            with self.graph:
                return function()

    def in_place(self, forward):
        logits = run(self, forward)
        self.logits = self.logits.copy_(logits) if hasattr(self, "logits") else logits.clone()
        return self.logits

    monkeypatch.setattr(choice, "Recorded", Taped)
    monkeypatch.setattr(recorded_step.Forward, "__call__", in_place)
    return tapes


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({}, 1),
        ({"do_sample": True}, 1),
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02}, 1),
        ({"min_new_tokens": 9}, 2),  # before and behind that length
        ({"min_length": 30}, 2),
        ({"max_new_tokens": 1}, 0),
        ({"repetition_penalty": 1.3}, 0),
        ({"max_time": 1000.0}, 1),
        ({"do_sample": True, "typical_p": 0.8}, 0),
        ({"return_dict_in_generate": True, "output_scores": True}, 0),
        ({"return_dict_in_generate": True}, 1),
        ({"stopping_criteria": tf.StoppingCriteriaList([tf.MaxLengthCriteria(31)])}, 1),
        ({"stopping_criteria": tf.StoppingCriteriaList([tf.EosTokenCriteria(7)])}, 0),
    ],
    ids=named,
)
def test_choices_of_logits_alone_are_recorded(packed, prompt, taped, options, recorded):
    """And replayed by calls of other lengths. On a GPU a CUDA graph stands where the tape is."""
    model, keeps = packed(), not options.get("return_dict_in_generate")
    eos = some_tokens(model, prompt(3), 3)
    for seed, tokens in ((0, 21), (1, 30), (2, 5)):
        given = {**options, "min_length": tokens + 9} if "min_length" in options else options
        made = both(model, prompt(3, tokens, seed), eos_token_id=eos, **given)
        assert torch.equal(*(getattr(x, "sequences", x) for x in made))
        assert len(taped) == recorded * (1 if keeps else seed + 1)


@pytest.mark.slow
def test_every_way_to_choose_has_a_recorded_choice_of_its_own(packed, prompt, taped):
    model = packed()
    ways = [{"do_sample": True, "temperature": t, "top_k": k} for t in (0.5, 2.0) for k in (3, 9)]
    ways += [{"eos_token_id": [8, 9]}, {"eos_token_id": 8}, {"eos_token_id": 8, "pad_token_id": 3}]
    for _ in range(2):
        for options in ways:
            assert torch.equal(*both(model, prompt(2), **options))
        assert len(taped) == len(ways)
    other = [{"do_sample": True, "top_k": k} for k in range(20, 25)]
    for options in other:
        assert torch.equal(*both(model, prompt(2), **options))
    (step,) = kept_steps(model)
    assert len(step.forwards[0].choices) == recorded_step.MOST_CHOICES


def test_a_model_is_freed_with_its_step_and_can_be_copied(packed, prompt):
    model = packed()
    both(model, prompt(2))
    other = copy.deepcopy(model)
    assert torch.equal(*both(other, prompt(2)))
    assert kept_steps(other) != kept_steps(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_is_freed_though_its_methods_were_replaced_for_a_call(packed, prompt):
    """As PEFT replaces `prepare_inputs_for_generation`, by a method of an object that holds the model."""

    class Owner:
        def __init__(self, model):
            self.base = model

        def prepare_inputs_for_generation(self, *args, **kwargs):
            return type(self.base).prepare_inputs_for_generation(self.base, *args, **kwargs)

    model = packed()
    model.prepare_inputs_for_generation = Owner(model).prepare_inputs_for_generation
    model.generate(prompt(2), max_new_tokens=3, do_sample=False, pad_token_id=0)
    del model.prepare_inputs_for_generation
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_seeded_generator(packed, prompt):
    model, ids = packed(), prompt(2)
    options = {"do_sample": True, "max_new_tokens": 12}
    made = [model.generate(ids, generator=torch.Generator().manual_seed(seed), **options) for seed in (1, 1, 2)]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


@pytest.mark.slow(sample=4)
@pytest.mark.usefixtures("falls_back")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beam_search does not feed one token a step"),
        ({"prompt_lookup_num_tokens": 3, "do_sample": True}, "do_sample is set"),
        ({"prompt_lookup_num_tokens": 3, "repetition_penalty": 1.3}, "needs tokens one by one"),
        ({"prompt_lookup_num_tokens": 3, "stopping_criteria": tf.StoppingCriteriaList([tf.EosTokenCriteria(7)])}, "one by one"),
        ({"prompt_lookup_num_tokens": 3, "return_dict_in_generate": True, "output_scores": True}, "one by one"),
        ({"use_cache": False}, "no PackedCache"),
        ({"cache_implementation": "static"}, "StaticCache, no PackedCache"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    ],
)
def test_what_falls_back_says_why(packed, prompt, monkeypatch, options, reason):
    said = []
    monkeypatch.setattr(graph_generate, "warn_once", said.append)
    theirs, ours = (getattr(x, "sequences", x) for x in both(packed(), prompt(1), **options))
    assert torch.equal(theirs, ours)
    assert len(said) == 1
    assert reason in said[0]


@pytest.mark.usefixtures("falls_back")
def test_an_assistant_reaches_transformers(packed, prompt):
    theirs, ours = both(packed(), prompt(1), assistant_model=packed())
    assert torch.equal(theirs, ours)


@pytest.mark.usefixtures("falls_back")
def test_a_generator_is_not_dropped_in_silence(packed, prompt):
    for options in ({"num_beams": 2}, {"recorded": False}):
        with pytest.raises(Unsupported, match="generator= belongs to"):
            packed().generate(prompt(1), generator=torch.Generator(), max_new_tokens=2, **options)

"""Prompt lookup in recorded steps: token for token greedy `generate()`, with fewer forwards.

On a CPU the recorded forward is an ordinary call; everything around it is what runs on a GPU.
"""

from __future__ import annotations

import copy

import pytest
import torch
from test_hf_graph_generate import Collected, Reads, _no_fallback, both, falls_back, named, packed, padded, some_tokens, taped
from tiny_models import FAMILIES, VOCAB

import halfbyte.hf as hf
from halfbyte.errors import Unsupported
from halfbyte.hf import graph_generate
from halfbyte.hf.recorded_step import MOST_DRAFTS, LookupForward, drafted, kept_steps
from watched import watched

__all__ = ["_no_fallback", "falls_back", "packed", "taped"]  # fixtures

CACHES = {
    "per-channel": {"keys": "int4_channel", "values": "int8"},
    "groups": {"keys": "int4", "values": "int4_g32", "rotate_values": True},
    "16 bits": {"keys": "bf16", "values": "bf16"},
    "sink tokens": {"keys": "int8", "values": "int8", "sink_tokens": 24},
}


class Oracle:
    """Stands in for `drafted`: what greedy decoding gives, with a wrong token here and there, in each sequence elsewhere."""

    def __init__(self, text, wrong):
        rows, columns = torch.arange(len(text))[:, None], torch.arange(text.shape[1])
        self.text = torch.where((columns + 3 * rows) % wrong == 0, (text + 1) % VOCAB, text)

    def __call__(self, ids, lengths, count, ngram):
        ahead = (lengths + torch.arange(count)).clamp_max(self.text.shape[1] - 1)
        return self.text.gather(1, ahead), lengths < self.text.shape[1]


@pytest.fixture
def right_drafts(monkeypatch):
    """right_drafts(text, wrong): the steps to come draft well; counts them."""
    steps = watched(monkeypatch, LookupForward, "_run", lambda *a: 1)

    def use(text, wrong):
        monkeypatch.setattr("halfbyte.hf.recorded_step.drafted", Oracle(text, wrong))
        del steps[:]
        return steps

    return use


def plain(model, ids, **options):
    """Greedy tokens of transformers' loop."""
    return model.generate(
        ids, **{"recorded": False, "do_sample": False, "pad_token_id": 0, "max_new_tokens": 40, **copy.deepcopy(options)}
    )


def with_drafts(model, ids, drafts=5, **options):
    """Greedy tokens of recorded steps with drafts."""
    return plain(model, ids, recorded=True, fuse_blocks=False, prompt_lookup_num_tokens=drafts, **options)


def lookup(model, ids, drafts=5, **options):
    return plain(model, ids, **options), with_drafts(model, ids, drafts, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_of_every_family(packed, prompt, right_drafts, family):
    """Windows, sinks, softcap, learned positions; left padding of three sequences that accept at different paces."""
    model, (ids, mask) = packed(family), padded(prompt(3))
    text = plain(model, ids, attention_mask=mask)
    steps = right_drafts(text, 5)
    assert torch.equal(with_drafts(model, ids, attention_mask=mask), text)
    assert len(steps) < 20


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("tokens", [9, 27])
@pytest.mark.parametrize("case", CACHES)
def test_greedy_of_every_kind_of_cache(build, prompt, right_drafts, case, tokens):
    """Blocks of per-channel keys are finished by accepted and by rejected drafts' places; 15 drafts at once."""
    model, ids = hf.quantize(build("llama"), **CACHES[case]), prompt(2, tokens)
    text = plain(model, ids, max_new_tokens=70)
    for wrong in (3, 7, 100):
        steps = right_drafts(text, wrong)
        assert torch.equal(with_drafts(model, ids, 15, max_new_tokens=70), text)
        assert len(steps) < (45 if wrong == 3 else 25)


@pytest.mark.parametrize("fuse_blocks", [False, True])
def test_its_own_drafts(packed, prompt, fuse_blocks):
    """No oracle: prompts that repeat themselves, and what follows."""
    model = packed("qwen3")
    ids = torch.cat([prompt(2, 12), prompt(2, 12), prompt(2, 5, 3), prompt(2, 12)], 1)
    given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 60}
    own = {"prompt_lookup_num_tokens": 4, "fuse_blocks": fuse_blocks}
    assert torch.equal(model.generate(ids, recorded=False, **given), model.generate(ids, **given, **own))


@pytest.mark.parametrize("place", [0, 1, 4, 9, 10, 11])
def test_ends_inside_of_accepted_drafts(packed, prompt, right_drafts, place):
    """What was accepted behind an end is cut off; the other sequences go on."""
    model, ids = packed(), prompt(3)
    text = plain(model, ids)
    right_drafts(text, 100)
    new = text[:, ids.shape[1] :]
    for ends in ([int(new[0, place])], new[:, place].tolist()):
        theirs, ours = lookup(model, ids, 9, eos_token_id=ends, pad_token_id=3)
        assert torch.equal(theirs, ours)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": 17},
        {"min_new_tokens": 12},
        {"min_length": 30},
        {"max_time": 1000.0},
        {"max_time": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 3])
def test_options(packed, prompt, right_drafts, taped, batch, options):
    """Recorded choices, replayed: a call of each kind comes twice."""
    model, (ids, mask) = packed(), padded(prompt(batch))
    right_drafts(plain(model, ids, attention_mask=mask), 6)
    options = {"eos_token_id": some_tokens(model, ids, batch), "attention_mask": mask, **options}
    theirs = plain(model, ids, **options)
    for _ in range(2):
        assert torch.equal(with_drafts(model, ids, **options), theirs)
    assert len(taped) <= 1


def test_a_streamer_gets_every_token_once(packed, prompt, right_drafts):
    model, ids, found = packed(), prompt(1), []
    right_drafts(plain(model, ids, max_new_tokens=20), 6)
    for options in ({"recorded": False}, {"fuse_blocks": False, "prompt_lookup_num_tokens": 5}):
        streamer = Collected()
        eos = some_tokens(model, ids, 1)
        model.generate(ids, streamer=streamer, do_sample=False, max_new_tokens=20, pad_token_id=0, eos_token_id=eos, **options)
        found.append((streamer.got, streamer.ended))
    assert found[0] == found[1]


@pytest.mark.parametrize("keys", ["int8_channel", "int8"])
def test_the_cache_that_is_returned_holds_no_rejected_draft(build, prompt, right_drafts, keys):
    """A conversation goes on with it, without drafts. Rounding of 1 and of 6 tokens at once moves a code by 1 at most."""
    model, ids = hf.quantize(build("llama"), keys=keys, values="int8"), prompt(1)
    text = plain(model, ids)
    right_drafts(text, 6)
    made = lookup(model, ids, eos_token_id=int(text[0, ids.shape[1] + 13]), return_dict_in_generate=True)  # amid accepted drafts
    first, second = (x.past_key_values for x in made)
    assert torch.equal(made[0].sequences, made[1].sequences)
    for a, b in zip(first.layers, second.layers, strict=True):
        assert torch.equal(a.kv.lengths, b.kv.lengths)
        for s, t in zip(a.kv.dequantized(), b.kv.dequantized(), strict=True):
            t = t[:, :, : s.shape[2]]  # room for drafts of transformers' own loop
            torch.testing.assert_close(s, t, rtol=0, atol=1e-2 * float(s.abs().max()))
    text = torch.cat([made[0].sequences, prompt(1, 4, 9)], 1)
    options = {"attention_mask": torch.ones_like(text), "do_sample": False, "max_new_tokens": 15, "pad_token_id": 0}
    after = [model.generate(text, past_key_values=x, **options) for x in (first, second)]
    assert torch.equal(*after)


def test_steps_are_kept_beside_those_of_single_tokens(packed, prompt):
    model, ids = packed(), prompt(2)
    for _ in range(2):
        assert torch.equal(*lookup(model, ids, 3))
        assert torch.equal(*both(model, ids, max_new_tokens=40))
    (step,) = kept_steps(model)
    assert [type(forward) is LookupForward for forward in step.forwards] == [True, False]
    assert torch.equal(*lookup(model, padded(ids)[0], 3, attention_mask=padded(ids)[1]))
    assert len(step.forwards) == 3
    lookup(model, ids, 40)
    assert step.forwards[-1].ids.shape == (2, 1 + MOST_DRAFTS)


def test_the_device_is_read_once_in_two_steps(packed, prompt, right_drafts, monkeypatch):
    model, ids, reads = packed(), prompt(2), Reads()
    steps, run = right_drafts(plain(model, ids), 6), graph_generate._Loop.run

    def watched(*args):
        with reads:
            return run(*args)

    monkeypatch.setattr(graph_generate._Loop, "run", watched)
    with_drafts(model, ids)
    assert len(steps) < 15
    assert reads.files.count("graph_generate.py") <= len(steps) // 2 + 2
    assert "recorded_step.py" not in reads.files
    assert "choice.py" not in reads.files


def plainly_drafted(tokens, count, ngram):
    """The same for one sequence, written as one says it."""
    for size in range(min(ngram, len(tokens) - 1), 0, -1):
        for stop in range(len(tokens) - 1, size - 1, -1):
            if tokens[stop - size : stop] == tokens[-size:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[stop + i])
                return text[len(tokens) :]
    return None


def test_drafts_against_a_plain_search():
    rng = torch.Generator().manual_seed(3)
    ids = torch.randint(4, (200, 24), generator=rng)
    lengths = torch.randint(1, 20, (200, 1), generator=rng)
    for count, ngram in ((1, 1), (6, 2), (15, 3)):
        found, some = drafted(ids, lengths, count, ngram)
        for row in range(len(ids)):
            expected = plainly_drafted(ids[row, : lengths[row, 0]].tolist(), count, ngram)
            assert bool(some[row]) == (expected is not None)
            assert expected is None or found[row].tolist() == expected
    assert 20 < int((~some).sum()) < 100


@pytest.mark.usefixtures("falls_back")
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"do_sample": True}, "do_sample"), ({"repetition_penalty": 1.3}, "one by one"), ({"streamer": Collected()}, "streamed")],
    ids=named,
)
def test_several_sequences_that_cannot_have_drafts_are_refused(packed, prompt, options, reason):
    with pytest.raises(Unsupported, match=f"{reason}.*one sequence only"):
        packed().generate(prompt(2), prompt_lookup_num_tokens=3, max_new_tokens=4, **options)


@pytest.mark.usefixtures("falls_back")
def test_a_window_of_recent_tokens_keeps_transformers_loop(build, prompt, monkeypatch):
    said = []
    monkeypatch.setattr(graph_generate, "warn_once", said.append)
    model = hf.quantize(build("llama"), keys="int8", values="int8", sink_tokens=2, recent_tokens=20)
    assert torch.equal(*lookup(model, prompt(1), 3))
    assert "leave their window one by one" in said[0]

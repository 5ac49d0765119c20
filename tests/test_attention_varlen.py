"""`attention_varlen` on a CPU: mixed batches are within the promise, and no bit depends on how tokens were cut into calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfbyte import engine
from halfbyte.cpu import attention_codes
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.kv_buffer import PagedView
from varlen_cases import MIXED, Batch, WithExactTokens, batch_of

pytestmark = pytest.mark.usefixtures("poisoned_memory")

#: Options, and how many tokens each sees at most.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "softcap and sinks": {"softcap": 5.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi and scale": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01]), "sm_scale": 0.3},
    "everything": {"window": 33, "softcap": 9.0, "sinks": torch.ones(4), "alibi_slopes": torch.full((4,), 0.05)},
}


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_mixed_batch(options: str, dtype: torch.dtype, impl: str) -> None:
    batch_of(MIXED, dtype=dtype, padding=5).check(impl, **OPTIONS[options])


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("keys", "values"), [(name, list(engine.PAGE_FORMATS)[3 - i]) for i, name in enumerate(engine.PAGE_FORMATS)]
)
def test_every_format(keys: str, values: str, impl: str) -> None:
    batch_of(MIXED, keys, values, dim=64, value_dim=128, rotate_keys="int4" in keys).check(impl)


def in_chunks(batch: Batch, chunk: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence whose tokens are all queries, attended in calls of at most so many."""
    view, outs = batch.view, []
    for begin in range(0, len(batch.q), chunk):
        q = batch.q[begin : begin + chunk]
        seen = view._replace(lengths=view.lengths * 0 + begin + len(q))
        bounds = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
        outs.append(engine.attention_varlen(q, seen, bounds, len(q), return_lse=True, **options))
    return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])


def assert_same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("compiled", [True, False], ids=["loops", "torch"])
@pytest.mark.parametrize(("impl", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("reference", torch.float32)])
@pytest.mark.parametrize(
    ("keys", "values", "options"),
    [("int8", "int4_g32", "plain"), ("int4", "int4", "everything"), ("fp8", "int8", "window"), ("bf16", "bf16", "plain")],
)
def test_bits_depend_neither_on_chunks_nor_on_pages_nor_on_the_batch(
    keys: str, values: str, options: str, impl: str, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of more than one block of tokens, alone and next to others. lse of 16-bit queries is what fp32 sums made of it."""
    if not compiled:
        monkeypatch.setattr(attention_codes, "compiler_works", lambda: False)
    prompt, given = [(300, 300), (9, 40), (1, 290)], {"impl": impl, **OPTIONS[options]}
    whole = batch_of(prompt[:1], keys, values, dtype=dtype).attend(**given)
    for chunk in (1, 7, 64, 257):
        assert_same(in_chunks(batch_of(prompt[:1], keys, values, dtype=dtype), chunk, **given), whole)
    for page in (48, 512):
        assert_same(in_chunks(batch_of(prompt[:1], keys, values, page=page, dtype=dtype), 100, **given), whole)
    mixed = batch_of(prompt, keys, values, dtype=dtype).attend(**given)
    assert_same(tuple(x[:300] for x in mixed), whole)
    others = batch_of(prompt, keys, values, cut=slice(1, None), dtype=dtype).attend(**given)
    assert_same(tuple(x[300:] for x in mixed), others)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("options", ["plain", "window", "softcap and sinks"])
def test_exact_prompts_attend_to_their_own_tokens(options: str, impl: str) -> None:
    """What INT4 would have made of the chunk's own keys and values is nowhere seen."""
    batch = batch_of(MIXED, "int4", "int4", padding=2, rotate_keys=True)
    batch.check(impl, exact=True, **OPTIONS[options])
    from_cache, exact = batch.attend(impl=impl)[0], batch.attend(impl=impl, prefill="exact", k=batch.k, v=batch.v)[0]
    assert (from_cache - exact).abs().max() > 0.01


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("prefill", ["cache", "exact"])
@pytest.mark.parametrize(("sinks", "recent"), [(4, 12), (0, 20), (20, 0), (3, 1)])
@pytest.mark.parametrize("options", OPTIONS)
def test_sink_and_recent_tokens(options: str, sinks: int, recent: int, prefill: str, impl: str) -> None:
    """Windows end among the recent tokens, and before them."""
    WithExactTokens.of(MIXED, sinks, recent, rotate_keys=True, padding=2).check(impl, prefill, **OPTIONS[options])


def test_results_go_where_out_says() -> None:
    batch = batch_of(MIXED, padding=3)
    expected, lse = batch.attend()
    for out in (torch.empty_like(expected), torch.empty(len(batch.q), 4, 2 * 64)[..., ::2]):
        found = batch.attend(out=out)
        assert found[0] is out
        assert_same((out, found[1]), (expected, lse))
    with pytest.raises(InvalidArgument, match=r"out has shape \[3, 4, 64\]; expected \[64, 4, 64\]"):
        batch.attend(out=torch.empty(3, 4, 64))
    with pytest.raises(InvalidArgument, match=r"out is torch\.float16; expected the dtype of q, torch.float32"):
        batch.attend(out=torch.empty(64, 4, 64).half())


def test_nothing_to_do() -> None:
    batch = batch_of(MIXED)
    none = torch.zeros(7, dtype=torch.int32)
    assert engine.attention_varlen(batch.q[:0], batch.view, none, 1).shape == (0, 4, 64)  # type: ignore[union-attr]
    out, lse = engine.attention_varlen(batch.q, batch.view, none, 1, return_lse=True)  # nothing but padding
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    empty = batch.view._replace(lengths=none[:0], page_table=torch.zeros(0, 3, dtype=torch.int32))
    out, lse = engine.attention_varlen(batch.q, empty, none[:1], 1, return_lse=True)
    assert not out.any()
    assert bool((lse == -torch.inf).all())


RAGGED = "T = 6 is B \\* max_query_len, so each sequence has 3 queries, and sequence 0 has 2 from token 0 on; pass a larger"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"q": torch.zeros(6, 4, 32)}, InvalidArgument, r"q has shape \[6, 4, 32\]; expected \[T, Hq, 64\]"),
        ({"q": torch.zeros(6, 3, 64)}, InvalidArgument, "q has 3 heads and the cache 2 KV heads"),
        ({"cache": 3}, InvalidArgument, "cache is a int; expected a KVCache, PagedKVCache or PagedView"),
        ({"bounds": torch.tensor([0, 2])}, InvalidArgument, r"cu_seqlens_q has shape \[2\]; expected \[3\]"),
        ({"bounds": torch.zeros(3)}, InvalidArgument, "cu_seqlens_q is torch.float32; expected int32 or int64"),
        ({"bounds": torch.tensor([0, 4, 2])}, InvalidArgument, r"cu_seqlens_q is \[0, 4, 2\]; expected it to rise"),
        ({"bounds": torch.tensor([0, 2, 7])}, InvalidArgument, r"cu_seqlens_q is \[0, 2, 7\]; .* from 0 to at most T = 6"),
        ({"bounds": torch.tensor([1, 2, 6])}, InvalidArgument, r"cu_seqlens_q is \[1, 2, 6\]; expected it to rise"),
        ({"most": 2}, InvalidArgument, "cu_seqlens_q gives sequence 1 4 queries; max_query_len=2 promises no more than that"),
        ({"most": 0}, InvalidArgument, "max_query_len=0; expected the largest number of queries of a sequence, at least 1"),
        ({"most": 3, "bounds": torch.tensor([0, 2, 5])}, InvalidArgument, RAGGED),
        ({"lengths": torch.tensor([2, 3]).int()}, InvalidArgument, "sequence 1 has 4 queries and a length of 3; lengths count"),
        ({"lengths": torch.tensor([2, 200]).int()}, InvalidArgument, "lengths run from 2 to 200; this cache holds 0 to 48 tokens"),
        ({"lengths": torch.tensor([9, 9])}, InvalidArgument, "cache.lengths is torch.int64; expected int32"),
        ({"page_table": torch.zeros(3, 2).int()}, InvalidArgument, r"cache.page_table has shape \[3, 2\]; expected \[2, pages\]"),
        ({"page_table": torch.zeros(2, 2).long()}, InvalidArgument, "cache.page_table is torch.int64; expected int32"),
        ({"prefill": "fast"}, InvalidArgument, "prefill='fast'; expected 'cache' or 'exact'"),
        ({"prefill": "exact"}, InvalidArgument, "prefill='exact' needs k and v"),
        ({"prefill": "exact", "k": torch.zeros(6, 2, 64), "v": torch.zeros(5, 2, 64)}, InvalidArgument, "v has shape"),
        ({"k": torch.zeros(6, 2, 64)}, InvalidArgument, "k and v were given with prefill='cache'"),
        ({"sinks": torch.zeros(2)}, InvalidArgument, r"sinks has shape \[2\]; expected \[4\]"),
        ({"window": 0}, InvalidArgument, "window=0; expected 1"),
        ({"impl": "gluon"}, Unsupported, "impl='gluon' of decode_attention runs on an NVIDIA GPU"),
        ({"q": torch.zeros(6, 4, 64, requires_grad=True)}, Unsupported, "decode_attention has no gradient"),
    ],
)  # fmt: skip
def test_calls_that_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    batch = batch_of([(2, 20), (4, 20)])
    call = {"cache": batch.view, "q": batch.q, "bounds": batch.bounds, "most": 5} | given
    for name in ("lengths", "page_table"):
        if name in call:
            call["cache"] = call["cache"]._replace(**{name: call.pop(name)})
    with pytest.raises(error, match=message):
        engine.attention_varlen(call.pop("q"), call.pop("cache"), call.pop("bounds"), call.pop("most"), **call).sum().backward()  # type: ignore[union-attr]


def test_compiled_code_attends_to_a_mixed_batch() -> None:
    batch = batch_of(MIXED)

    def step(q: torch.Tensor, view: PagedView, bounds: torch.Tensor, out: torch.Tensor) -> Any:
        return engine.attention_varlen(q * 2, view, bounds, 33, out=out, return_lse=True)

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        out = torch.empty_like(batch.q)
        results.append((*run(batch.q, batch.view, batch.bounds, out), out))
    assert_same(*results)

"""The cpu level of decode attention against float64, within the error of eager PyTorch in the query's dtype."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from allocated import Allocated
from attention_levels import CALLS, DRAWN, decode_call, errors, in_pages, same, small, strided
from gpu.gpu_cases import VALUES, Call, build
from halfbyte.cpu import attention_codes, threads
from halfbyte.cpu import decode_attention as cpu
from halfbyte.formats import KV_FORMATS
from halfbyte.kv_buffer import DecodeCall, KVBuffer
from sizes import head_dim

#: Numbers of a block that is decoded at once: a block of one token, of a few, and what is used.
BLOCKS = (1, 2048, cpu.BLOCK)


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loops of `compiled` do not apply, both are torch's operators."""
    if request.param == "torch":
        monkeypatch.setattr(attention_codes, "compiler_works", lambda: False)
    else:
        pytest.importorskip("numba", reason="loops are compiled by numba: pip install halfbyte[cpu]")


def run(call: DecodeCall, block: int = cpu.BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    with mock.patch.object(cpu, "BLOCK", block):
        return cpu.decode_attention(call)


def check(call: Call, *blocks: int) -> None:
    for block in blocks or BLOCKS:
        assert not errors(call, run(decode_call(call), block))


@pytest.mark.parametrize("name", CALLS)
def test_every_call_keeps_the_promise(name: str) -> None:
    """In fp32 too, where eager PyTorch leaves errors of sums alone."""
    call = small(**CALLS[name])
    check(call)
    if len(call.q) and not CALLS[name].get("dtype"):
        check(small(**CALLS[name] | {"dtype": "float32"}), 2048)


@pytest.mark.parametrize("number", range(len(DRAWN)))
def test_drawn_calls_keep_the_promise(number: int) -> None:
    check(build(DRAWN[number], "cpu"))


def test_float64_queries_are_computed_in_float64() -> None:
    call = small(keys="int8", values="int8_g32", queries=2, dtype="float64")
    out, _ = run(decode_call(call), 512)
    truth, _ = call.expected[0]
    # Only the order of sums differs: so many roundings of terms no larger than the largest value.
    assert (out - truth).abs().max() <= 64 * torch.finfo(torch.float64).eps * truth.abs().max()


def test_a_window_reads_only_the_blocks_it_can_see() -> None:
    call = small({"window": 16}, lengths=(4096,), heads=1, group=1)
    with mock.patch.object(cpu, "_load", wraps=cpu._load) as load:
        check(call, 64 * 64)
    assert load.call_count == (0 if attention_codes.compiler_works() else 2)  # one block of keys, one of values


def test_no_capacity() -> None:
    call = decode_call(small(lengths=(0, 0)))
    bare = [KVBuffer(p.format, *(t[:, :, :0] for t in p.tensors() if t is not None)) for p in (call.keys, call.values)]
    out, lse = run(call._replace(keys=bare[0], values=bare[1]))
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("page", [None, 32])
def test_memory_is_that_of_a_block_however_long_the_cache_is(name: str, page: int | None) -> None:
    """One decoded block, its scores, and what unpacking and gathering make on the way; compiled loops decode less."""
    block, values = 1 << 14, name if name in VALUES else "int8"
    call = decode_call(small(keys=name, values=values, lengths=(8000, 5000), dim=head_dim(name), page=page, dtype="float32"))
    with Allocated() as allocated:
        run(call, block)
    least = 0 if attention_codes.compiler_works() else 1
    assert least <= allocated.most / (8 * block) <= 3  # in numbers of 8 bytes, as float64 has them


@pytest.mark.parametrize("keys", ["fp16", "int8", "int8_token", "int8_tensor", "fp8", "int4_g32", "int4_channel"])
@pytest.mark.parametrize("values", ["bf16", "fp8_tensor", "int4_g32", "int8_token"])
def test_other_memory_gives_the_same_bits(keys: str, values: str) -> None:
    """Pages, and tokens before heads."""
    sizes = {"keys": keys, "values": values, "lengths": (70, 3, 33), "slack": 16, "queries": 2}
    call = decode_call(small(**sizes))
    for other in (in_pages(call, 32), decode_call(small(**sizes, layout="BTHD"))):
        assert same(run(other), run(call))


@pytest.mark.parametrize("shift", [1, 2, 3, 5])
def test_views_at_any_offset_and_stride(shift: int) -> None:
    call = decode_call(small(keys="int4_g32", values="int8", queries=2, dtype="float32"))
    assert same(run(strided(call, shift, 2)), run(call))


@pytest.mark.parametrize("keys", ["bf16", "int8_token", "int4_channel"])
@pytest.mark.parametrize("values", ["fp16", "int4_g32"])
def test_lengths_need_not_be_read(keys: str, values: str) -> None:
    """What a GPU does, where reading them would make it stop: visit and mask everything."""
    call = small({"window": 40}, keys=keys, values=values, lengths=(90, 33, 0), queries=3)
    capacity = call.cache.keys.codes.shape[2]
    with mock.patch.object(cpu, "_span", return_value=cpu._Span(0, capacity, 32)):
        check(call, 1, cpu.BLOCK)


def test_nothing_given_is_changed() -> None:
    call = decode_call(small({"starts": torch.tensor([1, 2], dtype=torch.int32)}, keys="int4_channel", values="bf16"))
    given = [call.q, *call.keys.tensors(), *call.values.tensors(), call.lengths, call.query_start]
    before = [None if t is None else t.clone() for t in given]
    run(call, 1)
    for t, old in zip(given, before, strict=True):
        assert t is None or t.equal(old) or t.isnan().equal(old.isnan())


def test_many_tokens() -> None:
    check(small(lengths=(8111,), dtype="bfloat16", heads=1, group=4), 1 << 17)
    check(small(lengths=(8111,), keys="int4_channel", heads=1, group=4), 1 << 17)


def test_very_low_scores_are_not_mistaken_for_masked_ones() -> None:
    check(small({"sm_scale": -5e4}, keys="fp16", values="fp16", queries=2), 1, cpu.BLOCK)


@pytest.mark.parametrize(("lengths", "queries"), [((100, 1100), 1), ((62,), 8), ((257, 1024, 3), 5)])
@pytest.mark.parametrize("name", ["int8", "int4_g32", "int4_channel"])
def test_loops_read_nothing_behind_a_length(name: str, lengths: tuple[int, ...], queries: int) -> None:
    """Where a block or a split of tokens begins behind the end of a sequence, or behind what its first queries see."""
    check(small(keys=name, values="int4", dtype="bfloat16", queries=queries, heads=1, group=1, lengths=lengths), cpu.BLOCK)


ALL = {"window": 700, "softcap": 5.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0]).repeat(2)}


@pytest.mark.parametrize("keys", KV_FORMATS)
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_loops_take_every_call(keys: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits on any number of threads, for a sequence alone and among others, and for any chunk of its queries."""
    loops = mock.Mock(wraps=attention_codes.decode_attention)
    monkeypatch.setattr(attention_codes, "decode_attention", loops)
    values = keys if keys in VALUES else "int8"
    whole = decode_call(small(options, keys=keys, values=values, group=4, queries=5, lengths=(1300, 40, 0), dtype="bfloat16"))
    out, lse = run(whole)
    assert loops.called == attention_codes.compiler_works()
    if not loops.called:
        return
    monkeypatch.setattr(threads, "STEPS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # as `over_rows` reads it
    assert same(run(whole), (out, lse))
    for b, i in itertools.product(range(2), range(0, 5, 2)):
        one, queries = slice(b, b + 1), slice(i, i + 2)
        alone = whole._replace(
            q=whole.q[one, :, queries],
            keys=whole.keys.select(torch.tensor([b])),
            values=whole.values.select(torch.tensor([b])),
            lengths=whole.lengths[one],
            query_start=whole.query_start[one] + i,
        )
        part = out[one, :, queries], lse[one, :, queries]
        assert same(cpu.decode_attention(alone), part)
        assert same(cpu.chunk_attention(alone, int(alone.query_start)), part)


@pytest.mark.slow
def test_cpus_without_avx512(tmp_path: Path) -> None:
    """The same promise of the code that they run."""
    if not attention_codes.compiler_works() or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("loops that are compiled for another x86 CPU")
    script = "import torch; from test_cpu_attention import check, small\n"
    script += "for keys, values in (('int8', 'int4_g32'), ('int4_channel', 'fp8'), ('int2_g32', 'bf16')):\n"
    script += "    for dtype in ('float32', 'bfloat16'):\n"
    script += "        check(small(keys=keys, values=values, queries=3, lengths=(37, 300, 0), dtype=dtype))\n"
    features = "+avx2,+avx,+fma,+f16c,+bmi,+bmi2,+sse4.2"
    machine = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **machine, "PYTHONPATH": folders}, check=True)

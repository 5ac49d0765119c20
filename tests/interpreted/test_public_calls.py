"""The public functions with impl="triton" on a CPU, through Triton's interpreter: what a user calls, from end to end."""

from __future__ import annotations

import pytest
import torch

import halfbyte as hb
from accuracy import lse_bound
from halfbyte.errors import Unsupported
from halfbyte.reference.attention import read
from halfbyte.reference.hadamard import rotate
from halfbyte.settings import interpreted

#: numpy warns of what a GPU computes silently, and as meant: log2 of 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(("keys", "values", "page"), [("int8", "int4_g32", 0), ("int4", "fp8", 16), ("int4_channel", "int8", 0)])
def test_append_and_attend(keys: str, values: str, page: int) -> None:
    assert interpreted()
    rng = torch.Generator().manual_seed(0)
    made = [
        hb.PagedKVCache(2, 2, 64, 64, page_size=page, keys=keys, values=values)
        if page
        else hb.KVCache(2, 2, 64, 64, keys=keys, values=values)
        for _ in range(2)
    ]
    for count in (35, 1):
        k, v = torch.randn(2, 2, 2, count, 64, generator=rng).bfloat16()
        for cache in made:
            cache.append(k, v)
    q = torch.randn(2, 6, 2, 64, generator=rng).bfloat16()
    slopes, sinks = torch.rand(6), torch.randn(6)
    options = {"alibi_slopes": slopes, "sinks": sinks, "window": 20, "softcap": 30.0, "return_lse": True}
    for deterministic in (False, True):
        out, lse = hb.decode_attention(q, made[0], impl="triton", deterministic_batch=deterministic, **options)  # type: ignore[arg-type]
        truth, truth_lse = hb.decode_attention(q, made[1], impl="reference", **options)  # type: ignore[arg-type]
        torch.testing.assert_close(out, truth, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse, truth_lse, rtol=0, atol=1e-3)


KEYS = ["fp16", "int8", "int4_channel", "fp8", "int2"]


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("keys", KEYS)
def test_lse_is_within_its_stated_bound(keys: str, turn: int) -> None:
    """`offset`: of every score, as a large common part of keys gives; `peaked`: one key far above the others.

    Every offset with and without rotation and a peak, every two values of any two together.
    """
    number = KEYS.index(keys)
    offset, rotated, peaked = (0.0, -300.0, -6e4)[turn], (number + turn) % 2 == 1, (1.0, 60.0)[(number // 2 + turn) % 2]
    cache = hb.KVCache(1, 1, 128, 128, keys=keys, values="int8", rotate_keys=rotated, dtype=torch.float16)
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 1, 128, generator=rng), torch.randn(1, 1, 100, 128, generator=rng)
    q[..., 0], k[..., 0] = 8.0, offset / (20 if rotated and offset < -1e4 else 1)  # fp16 holds what rotation makes of it
    k[:, :, 17, 1:] *= peaked
    cache.append(k, k.clamp(-100, 100))
    for query in (q.half(), q.bfloat16()):
        lse = hb.decode_attention(query, cache, sm_scale=1.0, return_lse=True, impl="triton")[1]
        multiplied = rotate(query.double()) if rotated else query.double()
        stored = read(cache.keys, cache.lengths, None)[:, :, :100].double()
        truth = (multiplied @ stored.mT).logsumexp(-1)
        assert ((lse.double() - truth).abs() <= lse_bound(multiplied, stored, 2**-11 if rotated else 0)).all()


def test_prefill_and_the_registered_op() -> None:
    k, v = torch.randn(2, 1, 2, 40, 64).half()
    q = torch.randn(1, 4, 40, 64).half()
    cache = hb.KVCache(1, 2, 64, 64, dtype=torch.float16)
    cache.append(k, v)
    out, expected = (hb.prefill_attention(q, k, v, cache, impl=impl) for impl in ("triton", "reference"))
    torch.testing.assert_close(out, expected, rtol=0.01, atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_of_more_rows_than_a_grid_has_blocks(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    """131,072 tokens of a model with 16 query heads a KV head; here 33 tokens, and 2 blocks of 32 rows in a launch."""
    k, v = torch.randn(2, 2, 2, 40, 64).bfloat16()
    q = torch.randn(2, 8, 33, 64).bfloat16().transpose(0, 1).contiguous().transpose(0, 1)
    cache = hb.KVCache(2, 2, 64, 64)
    cache.append(k, v, counts=torch.tensor([40, 35]))
    options = {"window": 9, "starts": torch.tensor([0, 4]), "return_lse": True, "impl": "triton"}
    whole = hb.decode_attention(q, cache, deterministic_batch=deterministic, **options)  # type: ignore[arg-type]
    monkeypatch.setattr("halfbyte.ops.decode_attention.MOST_BLOCKS", 2)
    cut = hb.decode_attention(q, cache, deterministic_batch=deterministic, **options)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_what_cannot_run_here_is_refused() -> None:
    cache = hb.KVCache(1, 2, 64, 64)
    cache.append(*torch.randn(2, 1, 2, 3, 64))
    with pytest.raises(Unsupported, match=r"q is torch\.float32; the triton kernel takes float16 and bfloat16"):
        hb.decode_attention(torch.randn(1, 2, 1, 64), cache, impl="triton")
    with pytest.raises(Unsupported, match=r"impl='gluon' of decode_attention runs on an NVIDIA GPU"):
        hb.decode_attention(torch.randn(1, 2, 1, 64).half(), cache, impl="gluon")

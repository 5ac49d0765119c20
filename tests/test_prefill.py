"""Prompts on a GPU that is not there: which part of `prefill_attention` runs where, and what torch's kernels are asked for."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from accuracy import attention_errors, eager_attention
from halfbyte.cache import KVCache
from halfbyte.formats import plain_format
from halfbyte.kv_buffer import AttentionOptions, DecodeCall, KVBuffer
from halfbyte.ops import _fused
from halfbyte.reference import attention as reference

prefill = importlib.import_module("halfbyte.ops.prefill_attention")


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk over itself, as specified."""
    lengths = torch.full((q.shape[0],), q.shape[2], dtype=torch.int32)
    keys, values = (KVBuffer(plain_format(x.dtype), x) for x in (k, v))
    return reference.decode_attention(DecodeCall(q, keys, values, lengths, torch.zeros_like(lengths), None, o))


def tokens(batch: int, length: int, heads: int = 2, group: int = 3, dim: int = 64) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, n, length, dim, generator=rng).bfloat16() for n in (heads * group, heads, heads))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who attended to what, in turn."""
    asked: list[str] = []
    attend, merge = prefill.attend, prefill.merged

    def told(name: str, run: Any) -> Any:
        return lambda *args: asked.append(name) or run(*args)

    def by_kernels(call: DecodeCall) -> Any:
        asked.append("its past" if call.keys.format.is_quantized else "itself")
        return attend(call._replace(impl="reference"))

    monkeypatch.setattr(prefill, "kernel_level", lambda op, impl, q, name: impl)
    monkeypatch.setattr(prefill, "can_bypass_dispatcher", lambda *given: True)
    monkeypatch.setattr(prefill, "attend", by_kernels)
    monkeypatch.setattr(prefill, "merged", told("merged", merge))
    monkeypatch.setattr(_fused, "causal", told("fused", lambda *a: None if a[3].softcap else causal(*a)))
    return asked


def attended(asked: list[str], bound: int | None, length: int = 40, past: int = 0, **options: Any) -> list[str]:
    """What is asked for, of a chunk behind a past, where the host knows `bound`; held against the specification."""
    q, k, v = tokens(2, length)
    cache = KVCache(2, 2, 64, length + past, keys="int8", values="int8")
    if past:
        cache.append(*tokens(2, past)[1:])
    cache.append(k, v)
    expected = prefill.prefill_attention(q, k, v, cache, impl="reference", **options)
    asked.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "length_bound", bound)
        found = prefill.prefill_attention(q, k, v, cache, **options)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    return list(asked)


def test_a_prompt_goes_where_it_is_fast(gpu: list[str]) -> None:
    assert attended(gpu, 40) == ["fused"]
    assert attended(gpu, None) == ["its past", "fused", "merged"]
    assert attended(gpu, 41) == ["its past", "fused", "merged"]
    assert attended(gpu, 60, past=20) == ["its past", "fused", "merged"]
    assert attended(gpu, 40, sinks=torch.randn(6)) == ["fused", "merged"]
    assert attended(gpu, 40, softcap=20.0) == ["fused", "itself"]  # what torch has no kernel for
    assert attended(gpu, 21, length=21) == ["itself"]  # 63 rows of 64: one go of the tuned kernel


def test_padding_is_a_sequence_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FlashAttention is asked for, and what is made of its answer."""

    def flash(q: Any, k: Any, v: Any, at_q: Any, at_k: Any, most_q: int, most_k: int, *flags: Any, **options: Any) -> Any:
        assert flags == (0.0, True, False)
        assert v.shape[2] == q.shape[2], "FlashAttention takes heads of one size"
        assert torch.equal(at_q, at_k)
        assert (at_q.dtype, most_q, most_k) == (torch.int32, 50, 50)
        left = options["window_size_left"]
        assert options["window_size_right"] == (None if left is None else 0)
        o = AttentionOptions(options["scale"], window=None if left is None else left + 1)
        out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan)
        for a, b in zip(at_q[:-1].tolist(), at_q[1:].tolist(), strict=True):
            if a < b:
                part, part_lse = causal(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), o)
                out[a:b], lse[:, a:b] = part[0].transpose(0, 1), part_lse[0]
        return out, lse, None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q, k, v = tokens(4, 50)
    v = v[..., :48]
    starts = torch.tensor([0, 7, 50, 99], dtype=torch.int32)
    for o in (
        AttentionOptions(0.1, starts=starts),
        AttentionOptions(0.1, starts=starts, window=9),
        AttentionOptions(0.1, window=9),
    ):
        found = _fused.causal(q, k, v, o)
        assert found is not None
        for mine, specified in zip(found, causal(q, k, v, o), strict=True):
            torch.testing.assert_close(mine, specified, rtol=0.01, atol=0.01)
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert _fused.causal(q, k, v, AttentionOptions(0.1, window=9)) is None


@pytest.mark.parametrize("value_dim", [64, 40])
@pytest.mark.parametrize("choice", ["cudnn", "flash", "neither"])
def test_torch_chooses_the_kernel(choice: str, value_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of fewer dims than keys, as MLA's, get zeros behind them."""
    q, k, v = tokens(2, 30)
    v[..., value_dim:] = 0

    def fused(name: str) -> Any:
        def run(q: Any, k: Any, v: Any, *args: Any, scale: float) -> Any:
            assert args == {"cudnn": (None, True, 0.0, True, False), "flash": (0.0, True, False)}[name]
            assert name == choice
            out, lse = causal(q, k, v, AttentionOptions(scale))
            return out, lse.unsqueeze(-1)

        return run

    number = {"cudnn": _fused._CUDNN, "flash": _fused._FLASH, "neither": 0}[choice]
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: number)
    for name in ("cudnn", "flash"):
        monkeypatch.setattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention", fused(name), raising=False)
    found = _fused.causal(q, k, v[..., :value_dim], AttentionOptions(0.2, window=30))
    assert (found is None) == (choice == "neither")
    if found is not None:
        assert torch.equal(found[0], causal(q, k, v, AttentionOptions(0.2))[0][..., :value_dim])
        assert found[1].shape == (2, 6, 30)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda q, k, v: (q.half(), k, v), {}),
        (lambda q, k, v: (q.float(), k.float(), v.float()), {}),
        (lambda q, k, v: (q[..., :32], k[..., :32], v), {}),
        (lambda q, k, v: (q[..., :60], k[..., :60], v[..., :60]), {}),
        (lambda q, k, v: (q[:, :, :1], k[:, :, :1], v[:, :, :1]), {}),
        (lambda q, k, v: (q[:0], k[:0], v[:0]), {}),
        (lambda q, k, v: (q, k, v), {"softcap": 5.0}),
        (lambda q, k, v: (q, k, v), {"alibi_slopes": torch.rand(6)}),
        (lambda q, k, v: (q, k, v), {"sm_scale": -0.1}),
    ],
)
def test_what_torch_is_not_asked_for(change: Any, options: dict[str, Any]) -> None:
    assert _fused.causal(*change(*tokens(2, 30)), AttentionOptions(**({"sm_scale": 0.1} | options))) is None


@pytest.mark.parametrize(("length", "dim", "group"), [(2, 64, 1), (40, 64, 3), (257, 128, 4), (300, 40, 9)])
def test_a_prompt_on_a_cpu_keeps_the_promise(length: int, dim: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's kernel, whatever the mean of the values; padding is not read, and sequences have the bits that they have alone."""
    monkeypatch.setattr(_fused, "cpu_has_bf16", lambda: True)
    q, k, v = tokens(3, length, group=group, dim=dim)
    v += torch.tensor([0.0, 1, 100]).view(3, 1, 1, 1).bfloat16()
    starts = torch.tensor([0, length // 2, length], dtype=torch.int32)
    for x in (q, k, v):
        for b, first in enumerate(starts.tolist()):
            x[b, :, :first] = torch.nan
    part = _fused.on_cpu(q, k, v, AttentionOptions(dim**-0.5, starts=starts))
    assert part is not None
    for b, first in enumerate(starts.tolist()):
        own = [x[b : b + 1, :, first:] for x in (q, k, v)]
        out, lse = (x[b : b + 1, :, first:] for x in part)
        assert not part[0][b, :, :first].any()
        assert (part[1][b, :, :first] == -torch.inf).all()
        if first == length:
            continue
        truth = causal(*(x.double() for x in own), AttentionOptions(dim**-0.5))
        base = eager_attention(*own, dim**-0.5), truth[1].bfloat16()
        assert not attention_errors(out, lse, truth, base)
        if length - first > 1:
            alone = _fused.on_cpu(*own, AttentionOptions(dim**-0.5))
            assert alone is not None
            assert torch.equal(out, alone[0])
            assert torch.equal(lse, alone[1])


def test_what_torch_has_no_kernel_for_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tokens(1, 40)
    monkeypatch.setattr(_fused, "cpu_has_bf16", lambda: True)
    assert _fused.on_cpu(q, k, v, AttentionOptions(0.125, window=39)) is None
    assert _fused.on_cpu(q, k, v, AttentionOptions(0.125, window=40)) is not None
    assert _fused.on_cpu(q.half(), k.half(), v.half(), AttentionOptions(0.125)) is None
    monkeypatch.setattr(_fused, "cpu_has_bf16", lambda: False)
    assert _fused.on_cpu(q, k, v, AttentionOptions(0.125)) is None

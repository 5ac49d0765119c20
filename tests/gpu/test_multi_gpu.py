"""More than one GPU: work happens where the tensors are, and one long sequence may be split over all of them."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_cases import Case, Variant, build, same_bits
from gpu_place import PLACE
from torch.multiprocessing.spawn import spawn

import halfbyte as hb
from halfbyte.ops.all_reduce import AllReduce
from halfbyte.ops.block import add_norm
from halfbyte.reference.block import Norm

GPUS = 0 if PLACE.dry else torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there are {GPUS}")
VARIANT = Variant("int8", "int4_g32", options=frozenset({"sinks"}))


def test_tensors_of_another_gpu_than_the_current_one(impl: str) -> None:
    case = Case(VARIANT, 2, (1000, 77, 0))
    expected = build(case, "cuda:0").run(impl)
    assert torch.cuda.current_device() == 0
    call = build(case, "cuda:1")
    out, lse = call.run(impl)
    assert out.device == lse.device == torch.device("cuda:1")
    assert not call.wrong(out, lse)
    again = call.run(impl)
    assert same_bits(again[0], out)
    assert same_bits(again[1], lse)
    assert torch.cuda.current_device() == 0
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert same_bits(out.cpu(), expected[0].cpu())


def test_appending_on_another_gpu() -> None:
    caches = [hb.KVCache(2, 2, 128, 64, device=device) for device in ("cpu", "cuda:1")]
    k, v = torch.randn(2, 2, 2, 33, 128)
    for cache in caches:
        cache.append(k.to(cache.device), v.to(cache.device))
    for a, b in zip(caches[0].tensors(), caches[1].tensors(), strict=True):
        assert same_bits(a, b.cpu())


def test_a_model_over_two_gpus_recovers_from_a_forward_that_failed() -> None:
    transformers = pytest.importorskip("transformers")
    import halfbyte.hf as hf

    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    cache = hf.PackedCache(hf.quantize(model, keys="int8", values="int8"), 64)
    k = torch.randn(1, 2, 5, 32, dtype=torch.bfloat16)
    for layer in (0, 1, 0):
        cache.update(k.to(f"cuda:{layer}"), k.to(f"cuda:{layer}"), layer)
    with pytest.raises(hb.HalfbyteError, match="stopped half-way"):
        cache.update(k.to("cuda:0"), k.to("cuda:0"), 0)
    cache.restore()
    assert [layer.kv.lengths.tolist() for layer in cache.layers] == [[5], [5]]


def test_one_sequence_over_all_gpus(impl: str) -> None:
    """Each GPU holds a part of the sequence; what they return is merged on the first."""
    rng = torch.Generator().manual_seed(0)
    length, sinks = 20_000, torch.randn(8, generator=rng)
    k, v = torch.randn(2, 1, 2, length, 128, generator=rng)
    q = torch.randn(1, 8, 1, 128, generator=rng).bfloat16()

    def attend(first: int, last: int, device: str, **options: Any) -> Any:
        cache = hb.KVCache(1, 2, 128, last - first, device=device)
        cache.append(k[:, :, first:last].to(device), v[:, :, first:last].to(device))
        return hb.decode_attention(q.to(device), cache, return_lse=True, impl=impl, **options)

    bounds = [length * i // GPUS for i in range(GPUS + 1)]
    parts = [attend(bounds[i], bounds[i + 1], f"cuda:{i}") for i in range(GPUS)]
    merged, lse = hb.merge_states(
        [out.to("cuda:0") for out, _ in parts], [part.to("cuda:0") for _, part in parts], sinks.to("cuda:0")
    )
    whole, whole_lse = attend(0, length, "cuda:0", sinks=sinks.to("cuda:0"))
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=2e-5)
    torch.testing.assert_close(merged, whole, rtol=0.02, atol=2 * torch.finfo(torch.bfloat16).eps * float(whole.abs().max()))


def _chain(reduce: AllReduce, xs: list[torch.Tensor], residual: torch.Tensor, norm: Norm, impl: str) -> list[torch.Tensor]:
    """hidden and out of some layers, each of which adds the ranks' x to the hidden of the one before."""
    made = []
    for x in xs:
        residual, out = add_norm(x.clone(), residual, norm, all_reduce=reduce, impl=impl)
        assert out is not None
        made += [residual, out]
    return made


def _right(hidden: torch.Tensor, residual: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether hidden is residual plus the total in float64 but for the roundings of both sums to bf16."""
    exact = residual.double() + total
    return bool(((hidden.double() - exact).abs() <= 1.01 * 2**-8 * (total.abs() + exact.abs())).all())


def _sum_as_rank(rank: int, ranks: int, port: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", f"tcp://localhost:{port}", rank=rank, world_size=ranks, device_id=device)
    width = 4096
    reduce = AllReduce(width, torch.bfloat16, device)
    assert reduce.exchange is not None, "the GPUs of this host cannot write to each other's memory"
    draw = torch.Generator(device).manual_seed(rank)
    alike = torch.Generator(device).manual_seed(99)
    norm = Norm(torch.randn(width, device=device, generator=alike).bfloat16(), 1e-5, "rounded")
    for rows in (7, 1, reduce.exchange.capacity, 3, reduce.exchange.capacity + 1):  # the last by NCCL
        residual = torch.randn(rows, width, device=device, generator=alike).bfloat16()
        xs = [torch.randn(rows, width, device=device, generator=draw).bfloat16() for _ in range(5)]
        totals = []
        for x in xs:
            parts = [torch.empty_like(x) for _ in range(ranks)]
            dist.all_gather(parts, x)
            totals.append(torch.stack(parts).double().sum(0))
        made = _chain(reduce, xs, residual, norm, "auto")
        if rows <= reduce.exchange.capacity:
            assert all(map(_right, made[::2], [residual, *made[:-2:2]], totals)), rows
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                recorded = _chain(reduce, xs, residual, norm, "auto")
            for _ in range(2000):
                graph.replay()
            assert all(map(same_bits, made, recorded)), rows
        every = torch.stack(made)
        others = [torch.empty_like(every) for _ in range(ranks)]
        dist.all_gather(others, every)
        assert all(same_bits(every, other) for other in others), rows
        torch.cuda._sleep(10**7 * rank)  # ranks come one after the other
        assert all(map(same_bits, _chain(reduce, xs, residual, norm, "triton"), made)), rows
    dist.destroy_process_group()


def test_sums_over_ranks_in_the_launch_that_needs_them() -> None:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    spawn(_sum_as_rank, (GPUS, port), nprocs=GPUS)

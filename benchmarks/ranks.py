"""Decode steps of tensor-parallel ranks, one process and one GPU each: the whole model's layers, with its all-reduces.

A rank has its heads, its columns of the feed-forward and its rows of the output layer, with random weights; embeddings, norms and
the residual are the same on every rank. Behind o_proj, down_proj and the output layer run transformers' own collectives: NCCL on
GPUs, where a recorded step holds them, and gloo on a CPU.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from halfbyte.device import Device, describe
from halfbyte.hf.every_forward import packed_forwards
from halfbyte.hf.model_step import Formats, Steps, Way, measure, of_sizes
from halfbyte.hf.model_support import blocks
from halfbyte.measure.checks import BenchmarkRefused
from halfbyte.measure.records import Record


class Whole(NamedTuple):
    """What all ranks together are, and what is measured of them: as for `measure`."""

    config: Any
    formats: Formats
    steps: Steps
    ways: Sequence[Way]
    judged: Callable[[Any], object]


def measure_ranks(whole: Whole, ranks: int, kind: str) -> list[Record]:
    """What the first of `ranks` processes measures, each on a GPU of its own, or all on a CPU (`kind`)."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    sent = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        spawn(_rank, (whole, ranks, kind, port, sent), nprocs=ranks)  # ends all ranks when one fails
    except ProcessRaisedException as error:
        raise BenchmarkRefused(f"{ranks} ranks: {str(error).strip().splitlines()[-1]}") from error
    records: list[Record] = sent.get()
    return records


def _rank(rank: int, whole: Whole, ranks: int, kind: str, port: int, sent: Any) -> None:
    """Measure as one of the ranks; the first sends its records."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    machine = describe(f"cuda:{rank}" if kind == "cuda" else "cpu")
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=ranks)

    def judged(quantized: Any) -> None:
        whole.judged(quantized)
        connect(quantized, ranks, machine)

    try:
        model = share(whole.config, ranks, machine, whole.formats)
        found = list(measure(model, whole.formats, whole.steps, machine, traced=False, ways=whole.ways, judged=judged))
        if rank == 0:
            sent.put([replace(record, shape={**record.shape, "ranks": ranks}) for record in found])
    finally:
        dist.destroy_process_group()


def share(config: Any, ranks: int, machine: Device, formats: Formats) -> Any:
    """One rank's part of a model of these sizes, not quantized and not connected yet."""
    mine = deepcopy(config)
    mine.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % ranks:
            raise BenchmarkRefused(f"{ranks} ranks cannot share {name}={getattr(config, name)}")
        setattr(mine, name, getattr(config, name) // ranks)
    mine.tie_word_embeddings = False
    torch.manual_seed(1 + dist.get_rank())
    model = of_sizes(mine, machine, formats)
    torch.manual_seed(0)
    with machine.torch:
        model.set_input_embeddings(nn.Embedding(config.vocab_size, config.hidden_size, dtype=model.dtype))
    return model


def connect(model: Any, ranks: int, machine: Device) -> None:
    """Put the collectives of transformers behind the layers that need other ranks, and see that all ranks choose the same token."""
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    except ImportError as error:
        raise BenchmarkRefused(f"ranks need the parallel styles of transformers 5.23, not {version('transformers')}") from error

    mesh, head = init_device_mesh(machine.kind, (ranks,)), model.get_output_embeddings()
    rows = [layer for block in blocks(model) for layer in (block.self_attn.o_proj, block.mlp.down_proj)]  # type: ignore[union-attr]
    for layer, style in [*((layer, "rowwise") for layer in rows), (head, "colwise_gather_output")]:
        layer.parallel_style = style
        ALL_PARALLEL_STYLES[style].install_forward(layer, mesh)
    head.out_features *= ranks
    model.config.distributed_config = DistributedConfig(tp_size=ranks)
    ids = torch.arange(8, device=machine.torch)[None]
    with torch.no_grad(), packed_forwards(model):
        logits = model(ids).logits[0].float().contiguous()
    others = [torch.empty_like(logits) for _ in range(ranks)]
    dist.all_gather(others, logits)
    if not all(torch.equal(logits, other) for other in others):
        raise BenchmarkRefused(f"{ranks} ranks have different logits")

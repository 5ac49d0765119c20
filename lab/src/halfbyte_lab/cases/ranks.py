"""Tensor-parallel ranks: as many processes, each with a GPU of its own, or all on a CPU; NCCL between GPUs, gloo on a CPU."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from halfbyte.device import Device, describe
from halfbyte_lab.measure.checks import BenchmarkRefused

T = TypeVar("T")


def first_of_ranks(work: Callable[[Device], Iterable[T]], ranks: int, kind: str) -> Iterator[T]:
    """What `work` gives on the first of so many ranks, as it comes; `kind` of device: "cuda" or "cpu".

    All ranks run `work`, a picklable function of the rank's device, in a process group. Raises `BenchmarkRefused` with the error of
    a rank that fails, which ends the others.
    """
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    sent = multiprocessing.get_context("spawn").SimpleQueue()
    running = spawn(_rank, (work, ranks, kind, port, sent), nprocs=ranks, join=False)
    done, failed = False, None
    try:
        while not done:
            try:
                done = running.join(timeout=0.05)
            except ProcessException as error:
                done, failed = True, error
            while not sent.empty():
                yield sent.get()
        if failed is not None:
            raise BenchmarkRefused(f"{ranks} ranks: {str(failed).strip().splitlines()[-1]}") from failed
    finally:
        for process in running.processes:
            process.kill()  # those that still run when nobody asks for more


def _rank(rank: int, work: Callable[[Device], Iterable[object]], ranks: int, kind: str, port: int, sent: Any) -> None:
    """Work as one of the ranks; the first sends what it has."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=ranks)
    try:
        for made in work(describe(f"cuda:{rank}" if kind == "cuda" else "cpu")):
            if rank == 0:
                sent.put(made)
    except Exception:
        threading.Timer(1.0, os._exit, (1,)).start()  # a GPU that waits for other ranks would keep this process for ever
        raise
    gc.collect()  # a graph that holds collectives would be waited for
    dist.destroy_process_group()

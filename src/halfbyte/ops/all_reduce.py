"""`AllReduce`: how partial sums of tensor-parallel ranks are added up, by the launch that needs them or by torch.distributed."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from halfbyte.kernels.block.all_reduce import Exchange

_T = TypeVar("_T")
#: Bytes that a rank sends in one launch at most: beyond, NCCL is as fast (four H200, 64 rows of 8192).
MOST_SENT = 4 << 20


class AllReduce:
    """Sums of rows [..., N] over the ranks of the default process group. Making one is a collective: all ranks do.

    exchange: for `add_norm`'s kernel, where all ranks are GPUs of one host that can write to each other's memory; else None.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.exchange, self._held, self.width = None, None, width
        row_bytes = 4 * width * (dist.get_world_size() - 1)  # bytes a row: each number with half of a count
        if width % 2 == 0 and dtype in (torch.float16, torch.bfloat16) and 0 < row_bytes <= MOST_SENT and _connected(device):
            self.exchange, self._held = _exchange(width, MOST_SENT // row_bytes, device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks by torch.distributed, which may overwrite x."""
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def exchange_of(self, x: torch.Tensor) -> Exchange | None:
        """What sums x [..., N] within a kernel; None where it has too many rows, another N, or is elsewhere."""
        exchange = self.exchange
        if exchange is None or x.shape[-1] != self.width or x.device != exchange.counts.device:
            return None
        return exchange if x.numel() <= exchange.capacity * self.width else None


def _connected(device: torch.device) -> bool:
    """Whether ranks have a GPU each on one host, and access to each other's memory: the same answer on all."""
    if device.type != "cuda":
        return False
    places = of_all((socket.gethostname(), device.index), device)
    others = [index for _, index in places if index != device.index]
    if len({host for host, _ in places}) > 1 or len(set(places)) < len(places):
        return False
    return all(of_all(all(torch.cuda.can_device_access_peer(device, other) for other in others), device))


def _exchange(width: int, capacity: int, device: torch.device) -> tuple[Exchange | None, object]:
    """Inboxes for so many rows, and what keeps them alive; nothing where a rank cannot share its memory, as in some containers."""
    from torch.distributed import _symmetric_memory as symmetric

    from halfbyte.kernels.block.all_reduce import Exchange

    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    # Blocks wait for those of other ranks, so all of a launch must fit on the GPU at a time.
    capacity = min(capacity, torch.cuda.get_device_properties(device).multi_processor_count)
    shape, dtype, inbox, memory = (2, ranks, capacity, width // 2), torch.int64, None, None
    with contextlib.suppress(RuntimeError):
        inbox = symmetric.empty(shape, dtype=dtype, device=device).zero_()
    if not all(of_all(inbox is not None, device)) or inbox is None:
        return None, None
    with contextlib.suppress(RuntimeError):
        memory = symmetric.rendezvous(inbox, group)
    torch.cuda.synchronize(device)
    if not all(of_all(memory is not None, device)) or memory is None:  # all inboxes are zeros when all ranks are here
        return None, None
    addresses = [memory.get_buffer(rank, shape, dtype).data_ptr() for rank in range(ranks)]
    counts = torch.zeros(capacity, dtype=torch.int32, device=device)
    return Exchange(torch.tensor(addresses, device=device), counts, dist.get_rank(), capacity), (inbox, memory)


def of_all(mine: _T, device: torch.device) -> list[_T]:
    """What each rank found: a collective."""
    answers: list[_T] = [mine] * dist.get_world_size()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        dist.all_gather_object(answers, mine)
    return answers

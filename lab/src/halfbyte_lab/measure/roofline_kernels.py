"""Triton kernels that attention is compared with: reading, copying, and a launch that does nothing. Import this on a GPU only.

They are passed through `triton.jit` by hand and not by a decorator, which would take their types away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: Numbers of 4 bytes that a program reads at a time, its warps, and programs for each multiprocessor (None: one a block).
#: Each thread has 4 to 8 loads of 16 bytes in flight; which way is fastest depends on the size.
READ_VARIANTS: tuple[tuple[int, int, int | None], ...] = (
    (8192, 16, 4),
    (8192, 16, 2),
    (4096, 8, 8),
    (4096, 8, 4),
    (2048, 4, 16),
    (16384, 16, 2),
    (8192, 8, None),
    (4096, 8, None),
)
COPY_VARIANTS = ((1024, 4), (2048, 4), (4096, 8), (8192, 8))


def _read(x: tl.tensor, out: tl.tensor, full: tl.tensor, words: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Sums of int32 x [words], one a program; `full` is words // BLOCK. The sum is what keeps the loads from being dropped."""
    first = tl.program_id(0).to(tl.int64)  # offsets pass 2^31 words at 8.6 GB
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(first, full, tl.num_programs(0)):
        total += tl.load(x + block * BLOCK + lanes, eviction_policy="evict_first")
    if first == 0:
        rest = (first + full) * BLOCK + lanes  # in 64 bits as well: `full` has 32
        total += tl.load(x + rest, mask=rest < words, other=0)
    tl.store(out + first, tl.sum(total.to(tl.int64), 0))


def _copy(x: tl.tensor, out: tl.tensor, words: tl.tensor, BLOCK: tl.constexpr) -> None:
    """out = x, both int32 [words]."""
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x + lanes, mask=lanes < words), mask=lanes < words)


# fmt: off
def _many_arguments(
    a0: tl.tensor, a1: tl.tensor, a2: tl.tensor, a3: tl.tensor, a4: tl.tensor, a5: tl.tensor, a6: tl.tensor,
    a7: tl.tensor, a8: tl.tensor, a9: tl.tensor, n0: tl.tensor, n1: tl.tensor, n2: tl.tensor, n3: tl.tensor,
    n4: tl.tensor, n5: tl.tensor, n6: tl.tensor, n7: tl.tensor, n8: tl.tensor, n9: tl.tensor, n10: tl.tensor,
    n11: tl.tensor, n12: tl.tensor, n13: tl.tensor, n14: tl.tensor, n15: tl.tensor, n16: tl.tensor, n17: tl.tensor,
    n18: tl.tensor, n19: tl.tensor,
) -> None:
    """Ten tensors and twenty numbers, as an attention kernel takes them; does next to nothing."""
    tl.store(a0, n0)
# fmt: on


_read_kernel, _copy_kernel, _launch_kernel = triton.jit(_read), triton.jit(_copy), triton.jit(_many_arguments)


@dataclass(frozen=True)
class Reader:
    """Reads a float32 vector and gives the sums of its bits, one for each program."""

    block: int
    warps: int
    programs_per_sm: int | None
    sm_count: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        words = x.numel()
        full = words // self.block
        most = full if self.programs_per_sm is None else self.programs_per_sm * self.sm_count
        programs = max(1, min(full, most))
        out = torch.empty(programs, dtype=torch.int64, device=x.device)
        _read_kernel[(programs,)](x.view(torch.int32), out, full, words, self.block, num_warps=self.warps)
        return out


def readers(sm_count: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The read-only kernels by name."""
    return {f"triton, {b} words, {w} warps, {p or 'all'} programs": Reader(b, w, p, sm_count) for b, w, p in READ_VARIANTS}


def copiers() -> dict[str, Callable[[torch.Tensor, torch.Tensor], object]]:
    """Copy kernels by name; each is called with (target, source), float32 vectors of one size."""

    def copier(block: int, warps: int) -> Callable[[torch.Tensor, torch.Tensor], object]:
        def copy(target: torch.Tensor, x: torch.Tensor) -> object:
            words = x.numel()
            grid = (triton.cdiv(words, block),)
            return _copy_kernel[grid](x.view(torch.int32), target.view(torch.int32), words, block, num_warps=warps)

        return copy

    return {f"triton, {block} words, {warps} warps": copier(block, warps) for block, warps in COPY_VARIANTS}


def launch(tensors: list[torch.Tensor], numbers: list[int]) -> object:
    """Triton's own cached launch of a kernel with ten tensors and twenty numbers."""
    return _launch_kernel[(1,)](*tensors, *numbers, num_warps=1)

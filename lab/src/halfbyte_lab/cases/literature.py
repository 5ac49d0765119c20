"""Figures of peers that cannot be installed everywhere: literature values, of another run than any that they stand beside.

Microseconds at 1, 2, 4, 8, 16, 32 and 64 rows, by CUDA-graph replay over weights rotated beyond the L2 cache, bf16 activations
(fp16 for IST Marlin and the published split-K kernel), groups of 128 for int4, blocks of 64 for NF4.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

#: Where the figures come from; printed wherever one of them is.
SOURCE = "measured on an H200 on 2026-11-21 with torch 2.11, Triton 3.6 and CUDA 13.0, in another run than ours"
ROWS = (1, 2, 4, 8, 16, 32, 64)
#: What was run: gemlite 0.6.0 (its fast autotuning), bitsandbytes 0.50.2 (the faster of its dispatch and its forced kernel),
#: humming-kernels 0.1.19, Marlin of vLLM's lineage (from GPTQModel, 2026-08-23), IST-DASLab's Marlin, applied-ai's Triton split-K.
PEERS = ("gemlite", "bitsandbytes", "humming", "marlin", "marlin ist", "applied-ai split-k")

_Row = tuple[float, ...]


def _read() -> dict[tuple[int, int], dict[tuple[str, str], _Row]]:
    """The file beside this one."""
    table: dict[tuple[int, int], dict[tuple[str, str], _Row]] = {}
    with Path(__file__).with_suffix(".csv").open(newline="") as file:
        for n, k, peer, code, *times in list(csv.reader(file))[1:]:
            table.setdefault((int(n), int(k)), {})[peer, code] = tuple(map(float, times))
    return table


#: By (N, K), then by "peer, code"; a code is what the weights are stored in.
MICROSECONDS = _read()


@dataclass(frozen=True)
class Quoted:
    """One literature value: seconds of a peer."""

    peer: str
    seconds: float


def fastest(n: int, k: int, rows: int, formats: str) -> Quoted | None:
    """The fastest quoted peer on y [rows, n] = x [rows, k] w^T whose weights are stored in the code of `formats`, if any."""
    if rows not in ROWS:
        return None
    code = code_of(formats)
    quotes = MICROSECONDS.get((n, k), {})
    times = [Quoted(peer, 1e-6 * row[ROWS.index(rows)]) for (peer, peer_code), row in quotes.items() if peer_code == code]
    return min(times, key=lambda q: q.seconds, default=None)


def code_of(formats: str) -> str:
    """ "int4_sym_g128" as "int4": which peers' weights a format stands beside. Double-quantized NF4 stands beside NF4."""
    return formats.partition("_")[0]

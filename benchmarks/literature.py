"""Figures of peers that cannot be installed everywhere: literature values, of another run than any that they stand beside.

Microseconds at 1, 2, 4, 8, 16, 32 and 64 rows, by CUDA-graph replay over weights rotated beyond the L2 cache, bf16 activations
(fp16 for IST Marlin and the published split-K kernel), groups of 128 for int4, blocks of 64 for NF4.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Where the figures come from; printed wherever one of them is.
SOURCE = "measured on an H200 on 2026-11-21 with torch 2.11, Triton 3.6 and CUDA 13.0, in another run than ours"
ROWS = (1, 2, 4, 8, 16, 32, 64)
#: What was run: gemlite 0.6.0 (its fast autotuning), bitsandbytes 0.50.2 (the faster of its dispatch and its forced kernel),
#: humming-kernels 0.1.19, Marlin of vLLM's lineage (from GPTQModel, 2026-08-23), IST-DASLab's Marlin, applied-ai's Triton split-K.
PEERS = ("gemlite", "bitsandbytes", "humming", "marlin", "marlin ist", "applied-ai split-k")

_Row = tuple[float, ...]

#: By (N, K), then by "peer, code"; a code is what the weights are stored in.
MICROSECONDS: dict[tuple[int, int], dict[tuple[str, str], _Row]] = {
    (6144, 4096): {
        ("gemlite", "int4"): (11.32, 19.27, 33.55, 24.32, 23.70, 41.28, 38.82),
        ("bitsandbytes", "nf4"): (15.26, 26.59, 45.67, 48.88, 48.77, 43.56, 44.05),
        ("humming", "int4"): (10.68, 10.68, 10.69, 10.75, 11.72, 12.35, 14.18),
        ("humming", "nvfp4"): (12.32, 12.32, 12.35, 12.33, 13.13, 13.80, 15.60),
        ("humming", "mxfp4"): (12.40, 12.26, 12.28, 12.29, 12.80, 13.29, 15.25),
        ("marlin", "int4"): (10.37, 10.35, 10.36, 10.39, 11.50, 19.17, 28.29),
        ("marlin", "nvfp4"): (11.91, 11.89, 11.87, 11.94, 12.98, 20.59, 28.92),
        ("marlin", "mxfp4"): (11.65, 11.63, 11.64, 11.68, 12.82, 20.39, 29.17),
        ("marlin ist", "int4"): (11.15, 11.15, 11.23, 11.26, 11.55, 17.51, 23.55),
        ("applied-ai split-k", "int4"): (24.32, 24.45, 24.28, 24.38, 24.35, 41.56, 77.41),
    },
    (4096, 4096): {
        ("gemlite", "int4"): (8.55, 13.48, 23.73, 16.52, 16.14, 23.19, 22.84),
        ("bitsandbytes", "nf4"): (11.07, 15.80, 24.36, 29.48, 29.82, 30.35, 28.93),
        ("humming", "int4"): (8.58, 8.59, 8.59, 8.67, 9.71, 10.42, 12.17),
        ("humming", "nvfp4"): (9.66, 9.71, 9.71, 9.74, 10.49, 11.67, 13.35),
        ("humming", "mxfp4"): (9.49, 9.55, 9.53, 9.64, 10.25, 11.26, 12.82),
        ("marlin", "int4"): (9.83, 9.82, 9.83, 9.82, 10.77, 20.51, 30.74),
        ("marlin", "nvfp4"): (10.81, 10.82, 10.82, 10.83, 11.79, 21.63, 31.01),
        ("marlin", "mxfp4"): (10.67, 10.67, 10.66, 10.68, 11.62, 21.48, 31.05),
        ("marlin ist", "int4"): (10.37, 10.37, 10.40, 10.42, 10.70, 18.05, 23.87),
        ("applied-ai split-k", "int4"): (16.49, 16.54, 16.52, 16.52, 16.55, 29.33, 53.81),
    },
    (8192, 8192): {
        ("gemlite", "int4"): (23.67, 44.17, 83.85, 52.26, 51.14, 79.30, 74.82),
        ("bitsandbytes", "nf4"): (36.68, 55.95, 94.44, 95.78, 96.05, 96.81, 112.39),
        ("humming", "int4"): (15.62, 15.67, 15.74, 15.86, 17.76, 21.66, 25.26),
        ("humming", "nvfp4"): (19.69, 19.46, 19.58, 19.65, 21.46, 25.29, 28.70),
        ("humming", "mxfp4"): (19.21, 19.04, 19.12, 19.20, 20.71, 25.37, 27.92),
        ("marlin", "int4"): (15.75, 15.80, 15.81, 15.85, 17.85, 24.52, 37.51),
        ("marlin", "nvfp4"): (19.52, 19.41, 19.53, 19.58, 21.76, 27.71, 39.29),
        ("marlin", "mxfp4"): (18.74, 18.75, 18.99, 18.80, 21.22, 27.85, 39.11),
        ("marlin ist", "int4"): (17.14, 17.12, 17.15, 17.26, 17.41, 23.75, 33.29),
        ("applied-ai split-k", "int4"): (50.79, 50.88, 50.84, 51.14, 51.04, 96.19, 184.04),
    },
    (10240, 8192): {
        ("gemlite", "int4"): (28.72, 54.33, 103.95, 65.60, 64.42, 111.05, 95.28),
        ("bitsandbytes", "nf4"): (41.28, 63.22, 133.29, 133.89, 135.36, 139.26, 137.14),
        ("humming", "int4"): (18.69, 18.78, 18.70, 18.85, 21.58, 27.40, 29.37),
        ("humming", "nvfp4"): (24.18, 24.14, 24.01, 24.29, 25.94, 32.04, 34.13),
        ("humming", "mxfp4"): (23.28, 23.08, 23.11, 23.24, 24.81, 31.71, 33.00),
        ("marlin", "int4"): (19.75, 19.58, 19.64, 19.80, 22.06, 27.95, 43.20),
        ("marlin", "nvfp4"): (24.45, 24.04, 24.05, 24.15, 26.62, 32.59, 46.22),
        ("marlin", "mxfp4"): (23.53, 22.93, 23.07, 23.06, 25.86, 32.13, 45.73),
        ("marlin ist", "int4"): (21.12, 21.15, 21.24, 21.43, 21.64, 27.37, 38.31),
        ("applied-ai split-k", "int4"): (63.03, 62.70, 62.75, 62.80, 62.86, 118.34, 227.05),
    },
    (16384, 16384): {
        ("gemlite", "int4"): (82.49, 164.91, 323.58, 188.85, 182.56, 278.15, 185.18),
        ("bitsandbytes", "nf4"): (119.97, 193.64, 265.76, 267.58, 270.60, 278.10, 357.70),
        ("humming", "int4"): (41.32, 41.31, 41.59, 41.93, 48.73, 66.71, 77.76),
        ("humming", "nvfp4"): (57.42, 57.05, 56.28, 56.55, 64.46, 82.30, 93.43),
        ("humming", "mxfp4"): (55.78, 55.67, 55.25, 55.11, 60.94, 78.96, 88.34),
        ("marlin", "int4"): (50.38, 50.45, 50.49, 50.62, 56.87, 66.50, 102.24),
        ("marlin", "nvfp4"): (63.86, 63.04, 63.06, 63.14, 70.70, 77.74, 109.68),
        ("marlin", "mxfp4"): (61.75, 59.76, 59.77, 60.38, 69.02, 78.10, 110.18),
        ("marlin ist", "int4"): (57.66, 53.31, 53.75, 53.95, 54.94, 65.73, 95.98),
        ("applied-ai split-k", "int4"): (182.30, 183.19, 182.54, 182.17, 181.88, 351.43, 688.47),
    },
}


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
    found = MICROSECONDS.get((n, k), {})
    times = [Quoted(peer, 1e-6 * row[ROWS.index(rows)]) for (peer, stored), row in found.items() if stored == code]
    return min(times, key=lambda q: q.seconds, default=None)


def code_of(formats: str) -> str:
    """ "int4_sym_g128" as "int4": which peers' weights a format stands beside. Double-quantized NF4 stands beside NF4."""
    return formats.partition("_")[0]

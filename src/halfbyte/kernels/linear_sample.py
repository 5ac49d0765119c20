"""Products with quantised weights: the sample that `make compile-check` compiles for the tuned kernel."""

from __future__ import annotations

#: (formats, rows, N of each, K, options): every kind of code and scale, every shape of tile, one weight and three.
SAMPLE = (
    ("int4_sym_g128", 1, (4096,), 4096, ""),
    ("int4_sym_g128", 8, (16384,), 8192, "bias"),
    ("int4_sym_g128", 16, (16384,), 8192, ""),
    ("int4_sym_g128", 16, (4096,), 4096, "fp16"),
    ("int4_sym_g128", 4, (4096, 1024, 1024), 4096, "bias"),
    ("int4_g128", 1, (4096, 1024, 1024), 4096, ""),
    ("int4_g128", 8, (28672,), 4096, ""),
    ("int4_g32", 2, (4096,), 4096, "fp16"),
    ("int4_g32", 4, (28672,), 4096, ""),
    ("int4_g32", 16, (4096,), 4096, ""),
    ("int4_g64", 8, (28672,), 4096, ""),
    ("int4_sym_g32", 8, (4096,), 4096, ""),
    ("int4_sym_col", 1, (28672,), 4096, ""),
    ("int8_col", 1, (4096,), 4096, ""),
    ("int8_g128", 16, (4096,), 4096, "fp16"),
    ("nf4", 1, (8192,), 8192, ""),
    ("nf4", 8, (28672,), 4096, ""),
    ("nf4", 16, (28672,), 4096, "fp16"),
    ("fp4_bnb", 4, (4096,), 4096, ""),
    ("mxfp4", 1, (4096, 1024, 1024), 4096, ""),
    ("mxfp4", 2, (28672,), 4096, ""),
    ("mxfp4", 8, (4096,), 4096, "fp16"),
    ("mxfp4", 16, (28672,), 4096, ""),
    ("nvfp4", 1, (4096, 1024, 1024), 4096, "bias"),
    ("nvfp4", 4, (28672,), 4096, ""),
    ("nvfp4", 8, (28672,), 4096, "fp16"),
    ("nvfp4", 16, (4096,), 4096, ""),
)

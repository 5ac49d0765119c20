"""GEMMs that every level is held to that runs without a GPU."""

from __future__ import annotations

from gpu.gpu_gemms import FORMATS, LAYOUTS, Case, drawn
from halfbyte.formats import WEIGHT_FORMATS

DTYPES = ("bfloat16", "float16")
#: One of each kind of code and scale.
KINDS = ("int4_g32", "int4_sym_g128", "int4_col", "int8_col", "nf4", "nf4_dq", "mxfp4", "nvfp4")
ZEROS = [name for name in FORMATS if WEIGHT_FORMATS[name].offset == "int"]


def _calls() -> dict[str, Case]:
    """By a name: every format in act-order and of one group, and the edges of sizes, memory and numbers."""
    calls: dict[str, Case] = {}
    for i, name in enumerate(FORMATS):
        dtype, group = DTYPES[i % 2], WEIGHT_FORMATS[name].group_size(128)
        calls[f"{name}, act-order"] = Case((name,), (33,), 3, 384, dtype, bias=True, act_order=True)
        calls[f"{name}, one group"] = Case((name,), (1 + 66 * (i % 2),), 1 + i % 3, group, DTYPES[i % 2 - 1])
        if WEIGHT_FORMATS[name].code.per_byte == 2:
            for rows, mean in ((1, 2.0), (4, 0.5)):  # a level that is rounded is as wrong wherever its code stands
                calls[f"{name}, {rows} x of a mean"] = Case((name,), (64,), rows, 1024, mean=mean)
    for i, name in enumerate(KINDS):
        for layout in LAYOUTS[1:]:
            calls[f"{name}, x by {layout}"] = Case((name,), (72,), 5, 256, DTYPES[i % 2], layout)
        for stored in ("columns", "odd"):
            calls[f"{name}, stored by {stored}"] = Case((name,), (24,), 3, 256, stored=stored, bias=True)
        for scale in (1e-4, 1e3):
            calls[f"{name} of size {scale}"] = Case((name,), (16,), 4, 256, scale=scale)
        rows, features = ((1, 16), (2, 17), (8, 31), (9, 70), (16, 33), (17, 131), (65, 33), (3, 127))[i]
        calls[f"{name}, {rows} x {features}"] = Case((name,), (features,), rows, (256, 640)[i % 2], bias=True)
    for name in ZEROS:
        for zero in (15, 128, 129, 255):  # 128 is the last whose differences from codes a signed byte holds
            for step in (1, 2):
                calls[f"{name}, {zero} in rows by {step}"] = Case((name,), (20,), 3, 384, DTYPES[zero % 2], zero=(zero, step))
        for rows, mean in ((1, 50.0), (16, 8.0), (100, 50.0)):
            calls[f"{name}, {rows} x of a mean of {mean}"] = Case((name,), (48,), rows, 1024, mean=mean)
    return calls


CALLS = _calls()
#: More, of one weight each.
DRAWN = [case for case in drawn(60, seed=7) if len(case.formats) == 1]

"""Plans of decode attention for many query rows: wgmma (kernels/decode/wgmma.py). Pure functions."""

from __future__ import annotations

from halfbyte.plans.decode_spec import DecodeWgmmaSpec, KVSpec

#: Query rows of a KV head that a program holds: 16 per warp.
MOST_ROWS = 128


def wgmma_spec(
    keys: KVSpec, values: KVSpec, rows: int, queries: int, batch: int, page: int, flags: dict[str, bool], limit: int
) -> tuple[DecodeWgmmaSpec, int] | str:
    """What the wgmma kernel is compiled for and how many programs an SM runs, or the reason why it cannot.

    A tile has as many tokens as padded rows: 64 for two programs of one warp group, 128 for one of two warp groups.
    """
    if rows > MOST_ROWS:
        return f"{rows} query rows per KV head; tuned kernels take up to {MOST_ROWS}"
    dims = {side.codes_per_word * side.padded for side in (keys, values)}
    if len(dims) > 1 or max(dims) > 128 or keys.block or any(side.codes_per_word == 1 for side in (keys, values)):
        what = "16-bit tokens, per-channel scales, heads of more than 128, or values of another size than keys"
        return f"{rows} query rows per KV head exceed the registers of the tuned kernels with {what}"
    padded_rows, per_sm = (64, 2) if rows <= 64 else (128, 1)
    warps = padded_rows // 16
    for stages in (3, 2):
        spec = DecodeWgmmaSpec(keys, values, warps, padded_rows // warps, stages, rows, padded_rows, queries, batch, page, **flags)
        if per_sm * (spec.shared_bytes + 2048) <= limit:
            return spec, per_sm
    return f"its ring takes {spec.shared_bytes} bytes of shared memory and this GPU has {limit}"

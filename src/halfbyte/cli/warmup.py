"""`halfbyte warmup`: the kernels of a model, compiled before it first runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from halfbyte import settings
from halfbyte.cli.options import Dtype, Keys, Values
from halfbyte.cli.shared import LmHead, Model
from halfbyte.errors import Unsupported


def warmup(
    model: Model,
    weights: Annotated[
        str, typer.Option(help="Format of the linear layers' weights; bf16 leaves them unquantized.")
    ] = settings.WEIGHTS,
    lm_head: LmHead = "bf16",
    keys: Keys = settings.KEYS,
    values: Values = settings.VALUES,
    batch: Annotated[int, typer.Option(min=1, help="The most sequences of a call.")] = 16,
    dtype: Dtype = settings.HALVES[0],
) -> None:
    """Compile the kernels of model.generate() ahead of time, for this machine's GPU and for prompts of every length.

    Name the formats that the model will have. A config.json is enough, without weights, unless they are quantized already: then
    they are loaded, and --weights is not needed.
    """
    from halfbyte import hf
    from halfbyte.device import describe
    from halfbyte.formats import plain_format
    from halfbyte.hf.rehearsal import with_random_weights
    from halfbyte.memory import load_config, meta_model, weight_or_plain
    from halfbyte.nn import QuantLinear
    from halfbyte.paths import resolve_model

    where = describe(None)
    if where.kind != "cuda":
        raise Unsupported(
            "warmup compiles kernels for the GPU of this machine, and torch finds none; run it on a machine like the one where the "
            "model will run, with the same versions of torch and Triton, and copy the folder of Triton's cache (TRITON_CACHE_DIR)"
        )
    folder, half = resolve_model(model), plain_format(dtype).code.dtype
    config = load_config(folder)
    cache: dict[str, Any] = {"keys": keys, "values": values}
    if getattr(config, "quantization_config", None) is None:
        lm = with_random_weights(meta_model(config, model).to(half), where.torch)
        formats: dict[str, Any] = {"weights": weight_or_plain(weights), "lm_head": weight_or_plain(lm_head)}
        hf.quantize(lm, **cache, **{name: fmt.name for name, fmt in formats.items() if fmt is not None})
    else:
        lm = hf.quantize(hf.load(folder, dtype=half).to(where.torch), **cache)
    done = [hf.warm_up(lm, batch)]
    if any(isinstance(m, QuantLinear) for m in lm.modules()):  # projections in one launch are other variants
        hf.quantize(lm, **cache, fuse_qkv=True, fuse_gate_up=True)
        done.append(hf.warm_up(lm, batch))
    kernels, seconds = sum(one.kernels for one in done), sum(one.seconds for one in done)
    print(f"{model}: compiled {kernels} kernels in {seconds:.0f} s for {where.name}, in {done[0].folder}")

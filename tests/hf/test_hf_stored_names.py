"""Quantized folders under the names that transformers itself writes: every family's, by writers of three layouts.

Which tensors of the files are in linear layers, and where, transformers itself tells: it loads the same values in 16 bits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, OTHERS, tiny_model
from safetensors.torch import load_file
from torch import nn

import halfbyte.hf as hf
from checkpoint_files import draw
from halfbyte.errors import HalfbyteError
from halfbyte.experts import QuantExperts
from halfbyte.hf.mixtures import in_order, stack_shape
from halfbyte.hf.weights import ROUTERS, linear_size, targets
from halfbyte.modules import dense_weight
from halfbyte.nn import QuantLayer
from saved_folders import configure, same, store

#: The layouts of GPTQModel, llm-compressor and modelopt.
KINDS = ("gptq v1", "ct int4", "modelopt nvfp4")
#: Renamed towers and decoders; experts under two kinds of names; projections that conversions split, and join.
FEW = ("qwen2_5_vl", "mixtral", "qwen3_moe", "llava", "molmo2", "nemotron_h")
ALL = os.environ.get("HALFBYTE_FAMILIES") == "all"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    store(folder, tensors)


def in_linear_layers(model: Any, folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Of each tensor in linear layers and experts, whether it is transposed (Conv1D).

    Tensors are filled with their numbers, which transformers then puts somewhere.
    """
    write(folder, {name: torch.full_like(t, 1 + i) if t.is_floating_point() else t for i, (name, t) in enumerate(tensors.items())})
    loaded = type(model).from_pretrained(folder, dtype=torch.float32)
    inside: dict[int, bool] = {}
    for name, target in targets(loaded).items():
        weight = getattr(target.owner, target.parameters[0])
        if not ROUTERS & {*name.split(".")} and not isinstance(target.owner, nn.Embedding):
            inside |= dict.fromkeys(map(int, weight.unique()), type(target.owner).__name__ == "Conv1D")
    embeddings = {int(m.weight[0, 0]) for m in loaded.modules() if isinstance(m, nn.Embedding)}
    return {name: inside[1 + i] for i, name in enumerate(tensors) if 1 + i in inside.keys() - embeddings}


def quantized_folder(model: Any, folder: Path, kind: str) -> int:
    """Write `model` twice, with values of this kind in its linear layers: into `folder`/plain in 16 bits, and into `folder`/theirs.

    Returns how many stored layers are quantized.
    """
    model.save_pretrained(folder / "plain")
    model.save_pretrained(folder / "theirs")
    plain, theirs, count = tensors_of(folder / "plain"), {}, 0
    inside, drawn = in_linear_layers(model, folder / "plain", plain), None
    for seed, (name, t) in enumerate(plain.items()):
        shape = t.shape[::-1] if inside.get(name) else t.shape
        fits = t.ndim == 2 and shape[0] % 8 == 0 and shape[1] % 32 == 0
        if name not in inside or not fits or not name.endswith(".weight") or "lm_head" in name:
            theirs[name] = t
            continue
        drawn, count = draw(kind, *shape, seed), count + 1
        theirs |= {f"{name.removesuffix('.weight')}.{part}": x for part, x in drawn.tensors.items()}
        values = torch.from_numpy(drawn.values).to(t.dtype)
        plain[name] = values.T if inside[name] else values
    write(folder / "plain", plain)
    write(folder / "theirs", theirs)
    if drawn is not None:
        configure(folder / "theirs", quantization_config=drawn.config)
    return count


def check_same(loaded: Any, plain: Any) -> int:
    """Every parameter of `loaded` has the value that it has in `plain`; returns how many are quantized."""
    count, parameters = 0, dict(plain.named_parameters())
    for name, module in loaded.named_modules():
        if not isinstance(module, QuantLayer):
            continue
        count += 1
        values = module.weight.dequantize()
        if isinstance(module, QuantExperts) and name in parameters:
            owner = plain.get_submodule(name.rpartition(".")[0])
            rows = parameters[name][: stack_shape(owner, name.rpartition(".")[2])[0]]
            wanted = in_order(owner, name.rpartition(".")[2], rows if rows.shape == values.shape else rows.mT)
        else:
            layer = plain.get_submodule(name)
            wanted = layer.weight if linear_size(layer) is None else dense_weight(layer)
        torch.testing.assert_close(values, wanted.float(), rtol=1e-6, atol=0, msg=name)
    own = {name: p for name, p in loaded.named_parameters() if name in parameters}
    assert all(torch.equal(p, parameters[name]) for name, p in own.items())
    return count


@pytest.mark.filterwarnings("ignore:.*(stay in 16 bits|are not used)")
@pytest.mark.parametrize("family", FEW)
def test_names_that_transformers_writes(family: str, tmp_path: Path) -> None:
    kind = KINDS[FEW.index(family) % len(KINDS)]
    stored = quantized_folder(tiny_model(family), tmp_path, kind)
    plain = hf.load(tmp_path / "plain")
    loaded = hf.load(tmp_path / "theirs")
    assert stored
    assert check_same(loaded, plain)
    again = hf.load(hf.save(loaded, tmp_path / "ours"))
    same(again, loaded)


EVERY = (*FAMILIES, *OTHERS) if ALL else ("dbrx", "gpt2", *FAMILIES[5::16], *OTHERS[7::16])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(stay in 16 bits|are not used)")
@pytest.mark.parametrize("family", EVERY)
def test_names_of_every_family(family: str, tmp_path: Path) -> None:
    try:
        model = tiny_model(family)
    except Exception as error:
        pytest.skip(f"transformers cannot build it: {error}")
    kind = KINDS[EVERY.index(family) % len(KINDS)]
    if not quantized_folder(model, tmp_path, kind):
        pytest.skip("no linear layer of it fits")
    try:
        plain = hf.load(tmp_path / "plain")
    except HalfbyteError as error:
        pytest.skip(f"transformers does not load what it saved: {error}")
    check_same(hf.load(tmp_path / "theirs"), plain)

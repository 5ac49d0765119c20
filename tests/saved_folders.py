"""Folders of models, as tests write and spoil them, and what was loaded of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoint_files import Drawn, draw
from halfbyte.hf.weights import linear_size

Tensors = dict[str, torch.Tensor]


def store(folder: Path, tensors: Tensors) -> None:
    """All tensors in one file."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Store a folder's tensors as `change` leaves them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    store(folder, tensors)


def configure(folder: Path, change: Callable[[dict[str, Any]], object] = lambda config: None, **entries: Any) -> None:
    """Write config.json as `change` leaves it, and with other entries."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config | entries))


def in_shards(folder: Path, shard_of: Callable[[str], int]) -> int:
    """Spread a folder's tensors over files by their names; returns the bytes of the largest file."""
    file, files = folder / "model.safetensors", dict[str, Tensors]()
    for name, t in load_file(file).items():
        files.setdefault(f"model-{shard_of(name)}.safetensors", {})[name] = t
    file.unlink()
    for shard, tensors in files.items():
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    places = {name: shard for shard, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return max(sum(t.nbytes for t in tensors.values()) for tensors in files.values())


def same(a: Any, b: Any, in_order: bool = True) -> None:
    """Two models have the same parameters, bit for bit."""
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    assert list(first) == list(second) or not in_order
    for name, t in first.items():
        assert t.dtype is second[name].dtype, name
        assert torch.equal(t.contiguous().view(torch.uint8), second[name].contiguous().view(torch.uint8)), name


#: Name of a module -> the kind of its weight, or None for 16 bits.
Chooser = Callable[[str], str | None]


def write(model: Any, folder: Path, kind_of: Chooser, **config: Any) -> Any:
    """Save `model` as another library would, the layers of its blocks of the kinds that `kind_of` gives for their names.

    Puts the values that these layers stand for into `model`, which is then what a loader must give.
    """
    state, drawn = {name: t.clone() for name, t in model.state_dict().items()}, Drawn({}, {}, None)  # type: ignore[arg-type]
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    for seed, (name, module) in enumerate(model.named_modules()):
        size, kind = linear_size(module), kind_of(name)
        if size is None or kind is None:
            continue
        drawn = draw(kind, *size, seed)
        values = torch.from_numpy(drawn.values)
        with torch.no_grad():
            module.weight.copy_(values if isinstance(module, nn.Linear) else values.T)
        state.pop(f"{name}.weight", None)
        state |= {f"{name}.{part}": t for part, t in drawn.tensors.items()}
    model.config.save_pretrained(folder)
    configure(folder, quantization_config={**drawn.config, **config})
    store(folder, state)
    return model


def blocks(kind: str, without: str = "lm_head") -> Chooser:
    """`kind` everywhere but in modules with this word in their name, and in the head."""
    return lambda name: None if "lm_head" in name or without in name else kind

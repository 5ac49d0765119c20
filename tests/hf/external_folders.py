"""Folders of tiny models as other libraries write them, drawn at random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA
from torch import nn

import decoders
from checkpoint_files import Drawn, draw
from halfbyte.hf.weights import linear_size

#: Sizes that every kind divides: rows of 128 and 256.
SIZES = {**LLAMA, "hidden_size": 128, "intermediate_size": 256}


def tiny(family: str = "llama", **options: Any) -> Any:
    """A random model whose layers fit every kind."""
    torch.manual_seed(3)
    if family == "gpt2":
        config: Any = tf.GPT2Config(vocab_size=101, n_embd=128, n_layer=2, n_head=2, n_positions=64)
    else:
        config = {"llama": tf.LlamaConfig, "qwen2": tf.Qwen2Config}[family](**{**SIZES, **options})
    config.eos_token_id = config.bos_token_id = None
    config.pad_token_id = 0
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


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
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {**drawn.config, **config}
    (folder / "config.json").write_text(json.dumps(described))
    save_file({name: t.contiguous() for name, t in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def blocks(kind: str, without: str = "lm_head") -> Chooser:
    """`kind` everywhere but in modules with this word in their name, and in the head."""
    return lambda name: None if "lm_head" in name or without in name else kind


def gpt_oss(folder: Path) -> Any:
    """A tiny gpt-oss with its experts in MXFP4 as OpenAI stores them; returns the model with the same values."""
    torch.manual_seed(0)
    options = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "eos_token_id": None, "pad_token_id": 0}
    config = tf.GptOssConfig(**options, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    rng, state = np.random.default_rng(0), load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, width, out = parameter.shape
            blocks = rng.integers(0, 256, (experts, out, width // 32, 16)).astype(np.uint8)
            scales = rng.integers(115, 122, (experts, out, width // 32)).astype(np.uint8)
            del state[name]
            state |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(decoders.gptoss_mxfp4(blocks, scales)).transpose(1, 2))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(described))
    return model

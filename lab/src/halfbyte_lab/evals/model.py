"""Load a model for evaluation, and continue texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from halfbyte.cli.shared import load_model
from halfbyte.device import describe
from halfbyte.errors import check, require
from halfbyte.memory import load_config, packed_layers
from halfbyte.paths import resolve_model
from halfbyte.text import Tokenizer, load_tokenizer
from halfbyte_lab.evals.quality import Setting, cache_for


def load(name: str, device: torch.device | str | None = None, dtype: str = "bf16") -> tuple[Any, Tokenizer]:
    """(model, tokenizer) of a folder, a Hub id or `demo`, with halfbyte's attention; arithmetic is in fp32 on a CPU.

    device: where the model goes; None: the GPU if there is one. dtype: the 16-bit type of weights that are not quantized, and of
    16-bit caches; one of `settings.HALVES`.
    """
    tokenizer = tokenizer_of(name)
    return model_of(name, device, dtype), tokenizer


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer alone, so that a text is checked before the model is loaded."""
    require("transformers", "halfbyte.hf")
    folder = resolve_model(name)
    return load_tokenizer(folder, load_config(folder).get_text_config(decoder=True).vocab_size)


def model_of(name: str, device: torch.device | str | None = None, dtype: str = "bf16") -> Any:
    """The model alone, as of `load`."""
    from halfbyte import hf

    return hf.quantize(load_model(name, device, dtype), keys=dtype, values=dtype)


def write(
    model: Any, tokenizer: Tokenizer, prompt: str, setting: Setting, tokens: int, *, temperature: float = 0.0, seed: int = 0
) -> Iterator[str]:
    """Continue `prompt` by `tokens` tokens, piece by piece, with a cache of the setting's formats and the weights as they are.

    temperature 0 takes the likeliest token. Stops at the model's end-of-text token. A piece is held back until its bytes are whole
    characters. What cannot be done raises here, before the first piece is made.
    """
    ids = tokenizer.encode(prompt)
    check(bool(ids), "prompt is empty; give at least one token of text to continue")
    check(temperature == 0 or 1e-3 <= temperature <= 1e3, f"temperature={temperature}; expected 0, or 0.001 to 1000")
    ids = ids if tokenizer.bos is None else [tokenizer.bos, *ids]
    _check_room(model, setting, len(ids), tokens)
    cache = cache_for(model, setting, max(len(ids) + tokens, sum(setting.exact)))
    return _pieces(model, tokenizer, ids, cache, tokens, temperature, seed)


def _check_room(model: Any, setting: Setting, prompt: int, tokens: int) -> None:
    """Refuse more tokens than a cache can count or this device's memory can hold, which would kill the process."""
    from halfbyte.hf.model_support import BUCKET

    check(0 < tokens < 2**31 - prompt - BUCKET, f"tokens={tokens}; expected at least 1, and with the prompt's {prompt} below 2^31")
    nbytes = packed_layers(model.config, setting.keys, setting.values, setting.skip_layers).nbytes(1, prompt + tokens)
    here, size = describe(model.device).memory_bytes, f"{nbytes / 1e9:,.1f} GB"
    check(nbytes < here, f"tokens={tokens}: their cache of {size} is larger than this device's memory, {here / 1e9:,.1f} GB")


@torch.no_grad()
def _pieces(
    model: Any, tokenizer: Tokenizer, ids: list[int], cache: Any, tokens: int, temperature: float, seed: int
) -> Iterator[str]:
    from halfbyte.hf.model_support import CACHE

    ends = model.generation_config.eos_token_id
    stops = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    step, output, length = torch.tensor([ids], device=model.device), list[int](), 0
    for i in range(tokens):
        logits = model(input_ids=step, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        step = _choose(logits, temperature, generator)
        if int(step) in stops:
            return
        output.append(int(step))
        text = tokenizer.decode(output)
        if not text.endswith("\ufffd") or i + 1 == tokens:
            yield text[length:]
            length = len(text)


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """One token, int64 [1, 1], from logits [1, V]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)

"""Weights that know their inputs: `halfbyte.hf.quantize(model, weights, calibrate=texts)`.

The model reads the texts block by block. In each block, the inputs x of a layer are those of the blocks before it as they are
quantized, and the sum of x x^T over all tokens decides how the weight is rounded (`halfbyte.reference.error_feedback`). Layers of
one input, such as q_proj, k_proj and v_proj, share that sum. Memory: the hidden states of the texts, and the sums of one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from halfbyte.errors import Unsupported, check
from halfbyte.formats import Format
from halfbyte.hf.model_support import Decoder
from halfbyte.hf.weights import Target, linear_size, progress_bar, quantized
from halfbyte.nn import QuantLayer
from halfbyte.text import load_tokenizer, windows

#: Windows of text that a model is calibrated on, at most, with so many tokens each; and the fewest tokens.
WINDOWS, LENGTH, FEWEST = 64, 1024, 1024


def token_windows(model: Any, calibrate: Any) -> torch.Tensor:
    """Tokens int64 [n, T] to calibrate on: those that were passed, or those of texts by the model's own tokenizer."""
    if isinstance(calibrate, torch.Tensor):
        is_tokens = calibrate.ndim == 2 and calibrate.dtype in (torch.int64, torch.int32)
        check(is_tokens, f"calibrate is {calibrate.dtype} {list(calibrate.shape)}; expected texts, or tokens int64 [n, T]")
        _check_enough(calibrate.numel())
        return calibrate
    texts = [calibrate] if isinstance(calibrate, str) else calibrate
    is_texts = isinstance(texts, Sequence) and bool(texts) and all(isinstance(text, str) for text in texts)
    check(is_texts, f"calibrate is a {type(calibrate).__name__}; expected texts, or tokens int64 [n, T]")
    config = model.config
    name = getattr(config, "_name_or_path", "")
    check(
        bool(name),
        "calibrate: this model was not loaded from a folder with a tokenizer; pass tokens int64 [n, T] in place of texts",
    )
    tokenizer = load_tokenizer(name, config.get_text_config(decoder=True).vocab_size)
    ids = [token for text in texts for token in tokenizer.encode(text)]
    _check_enough(len(ids))
    return windows(ids, min(LENGTH, len(ids)), WINDOWS, tokenizer.bos)


def _check_enough(tokens: int) -> None:
    advice = f"pass {FEWEST:,} or more, of texts that resemble the model's inputs"
    check(tokens >= FEWEST, f"calibrate has {tokens:,} tokens, too few to calibrate on; {advice}")


def check_targets(model: Any, chosen: Mapping[str, Target]) -> None:
    """Raise `Unsupported` for weights whose inputs cannot be known."""
    for name, target in chosen.items():
        if linear_size(target.owner) is None:
            raise Unsupported(
                f"calibrate: {name} is a mixture of experts, each of which has inputs of its own; leave calibrate out, or keep it "
                f"in 16 bits with skip_modules=({name!r},)"
            )
    inside = {id(m) for block in Decoder(model).blocks for m in block.modules()}
    if others := [name for name, target in chosen.items() if id(target.owner) not in inside]:
        raise Unsupported(
            f"calibrate: texts do not reach {others[0]}, outside of the decoder's blocks; keep it in 16 bits with "
            f"skip_modules=({others[0]!r},)"
        )


class _Chain:
    """What the blocks of a decoder get, for each window of text: hidden states, and the other arguments of each block."""

    def __init__(self, model: Any, tokens: torch.Tensor) -> None:
        """Run the model over windows of `tokens`, int64 [n, T], and record what its blocks get."""
        self.blocks = Decoder(model).blocks
        self.hidden: list[torch.Tensor] = []
        self.arguments: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
        self._family, self._output = type(model).__name__, torch.empty(0)
        hooks = [block.register_forward_pre_hook(self._before, with_kwargs=True) for block in self.blocks]
        hooks += [block.register_forward_hook(self._behind) for block in self.blocks]
        try:
            for window in progress_bar(tokens, "Reading", "windows"):
                self._read(model, window)
        finally:
            for hook in hooks:
                hook.remove()

    def _read(self, model: Any, window: torch.Tensor) -> None:
        self.arguments.append([])
        try:
            model(input_ids=window[None].to(model.device), use_cache=False)
        except _LastBlock:
            return
        raise Unsupported(f"calibrate: {self._family} does not call each of its blocks once, one after the other")

    def _before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls, named = self.arguments[-1], dict(kwargs)
        states = args[0] if args else named.pop("hidden_states", None)
        if block is not self.blocks[len(calls)] or not isinstance(states, torch.Tensor):
            raise Unsupported(f"calibrate: {self._family} does not call its blocks one after the other, with hidden states")
        if not calls:
            self.hidden.append(states)
        elif not torch.equal(states, self._output):
            raise Unsupported(f"calibrate: block {len(calls)} of {self._family} does not get what the block before it returns")
        calls.append((args[1:], named))

    def _behind(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._output = _states(output)
        if len(self.arguments[-1]) == len(self.blocks):
            raise _LastBlock

    def run(self, number: int) -> Iterator[torch.Tensor]:
        """The outputs of a block, window by window."""
        for states, calls in zip(self.hidden, self.arguments, strict=True):
            rest, named = calls[number]
            yield _states(self.blocks[number](states, *rest, **named))


class _LastBlock(Exception):
    """Ends a forward behind the last block."""


def _states(output: Any) -> torch.Tensor:
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states


class _Inputs:
    """Sums of x x^T over the inputs x of layers. Layers that are called with the same tensor share one."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.sums: dict[tuple[nn.Module, int], torch.Tensor] = {}
        self._of: dict[nn.Module, set[tuple[nn.Module, int]]] = {}  # layer -> keys of its sums: which layer had it first, and when
        self._seen: dict[tuple[nn.Module, int], torch.Tensor] = {}
        self._hooks = [layer.register_forward_pre_hook(self._add) for layer in layers]

    def next_window(self) -> None:
        """Forget the tensors of a window."""
        self._seen.clear()

    def _add(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0]
        key = next((key for key, tensor in self._seen.items() if tensor is x), None)
        if key is None:
            key = (layer, sum(first is layer for first, _ in self._seen))
            self._seen[key], rows = x, x.flatten(0, -2).float()
            self.sums[key] = self.sums.get(key, torch.zeros((), device=x.device)) + rows.T @ rows
        self._of.setdefault(layer, set()).add(key)

    def finish(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def hessian(self, name: str, layer: nn.Module) -> torch.Tensor:
        """The sum of a layer, float32 [K, K]."""
        if layer not in self._of:
            raise Unsupported(
                f"calibrate: no token reaches {name} by a call of it; keep it in 16 bits with skip_modules=({name!r},), or leave "
                f"calibrate out"
            )
        first, *others = (self.sums[key] for key in self._of[layer])
        return sum(others, first)


@torch.no_grad()
def calibrated_layers(
    model: Any, chosen: Mapping[str, tuple[Target, Format]], clip: str | None, tokens: torch.Tensor
) -> dict[Target, QuantLayer]:
    """Quantized layers for weights in the blocks of a model, which stays as it is, from windows of tokens, int64 [n, T]."""
    layers, training = dict[Target, QuantLayer](), model.training
    model.eval()
    try:
        chain = _Chain(model, tokens)
        for number, block in enumerate(progress_bar(chain.blocks, "Calibrating", "blocks")):
            inside = {id(module) for module in block.modules()}
            own = {name: each for name, each in chosen.items() if id(each[0].owner) in inside}
            earlier = {target: layers[target] for target, _ in own.values() if target in layers}  # of a block that shares weights
            with _rounded(earlier):
                inputs = _inputs_of(chain, number, [target.owner for target, _ in own.values()])
            for name, (target, fmt) in own.items():
                if target not in layers:
                    layers[target] = quantized(name, target, fmt, clip, inputs.hessian(name, target.owner))
            with _rounded({target: layers[target] for target, _ in own.values()}):
                chain.hidden = list(chain.run(number))
    finally:
        model.train(training)
    return layers


def _inputs_of(chain: _Chain, number: int, layers: list[nn.Module]) -> _Inputs:
    """The inputs of layers in a block."""
    inputs = _Inputs(layers)
    try:
        for _ in chain.run(number):
            inputs.next_window()
    finally:
        inputs.finish()
    return inputs


@contextmanager
def _rounded(layers: Mapping[Target, QuantLayer]) -> Iterator[None]:
    """Meanwhile weights have the values that they are quantized to."""
    weights: dict[Target, Any] = {target: target.owner.weight for target in layers}
    try:
        for target, layer in layers.items():
            values, weight = layer.weight.dequantize(), weights[target]
            values = values.T if type(target.owner).__name__ == "Conv1D" else values
            target.owner.weight = nn.Parameter(values.to(weight.dtype).contiguous(), requires_grad=False)
        yield
    finally:
        for target, weight in weights.items():
            target.owner.weight = weight

"""A decoder's blocks in few launches, as `generate()` runs them in recorded steps.

    q, k, v = projections(norm(hidden))                 one launch; one more for norms of q and k over all heads (OLMo 2)
    norms of each head, positions, append; attention    two
    hidden += o_proj(attention)                         one, and what the norm of hidden needs; one more for a norm behind a branch
    act(gate) * up = projections(norm(hidden))          one
    hidden += down_proj                                 as o_proj

So with a tuned kernel for the weights, bf16 and up to 16 rows (`halfbyte.ops.block_linear`); otherwise norms with the sum before
them, and activations, have launches of their own.

`structure.py` reads what a block consists of off a step of it. A fused form is proposed for each branch, attention, a gated MLP or
a recurrence, and taken if it gives what the family's own gave; any other branch, such as a mixture of experts, is called as it is,
but for the router of a mixture (`routers.py`). A block that is not two branches with norms around them runs as it is, between fused
ones or not.

`fused_view` makes a shallow copy of the model with other blocks, over the same parameters. The model is not changed. Blocks are for
decoding, of a model with a packed cache, without gradients.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig

from halfbyte.cpu.step import State, state_of
from halfbyte.errors import warn_once
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.fused_forms import AddedForms, Form, all_agree, all_reduce_of, partial_layer, quantized_layer, whole_rows
from halfbyte.hf.fused_parts import BlockLoops, Tables, fused_part
from halfbyte.hf.model_support import CACHE, blocks, half_type, text_config
from halfbyte.hf.routers import Routers
from halfbyte.hf.structure import (
    Call,
    ConfigOf,
    Reading,
    Structure,
    has_hooks,
    norms_of,
    placed,
    same,
    structure_of,
    survey,
    tensors_of,
    viewed,
)
from halfbyte.nn import QuantLinear
from halfbyte.ops.all_reduce import AllReduce
from halfbyte.ops.block import add_norm, norm_rows
from halfbyte.ops.block_linear import Rows, add_projection, runs_loops
from halfbyte.ops.linear import linear
from halfbyte.reference.block import Norm
from halfbyte.settings import torch_code

#: Tokens in the cache before the step that is recorded; the first of row 0 is padding.
_PROMPT = 3
#: Hooks would record a call of another thread.
_LOCK = threading.Lock()


class _View(NamedTuple):
    """A model with fused blocks.

    model       None where no block is fused
    reasons     by layer: why its block is not fused; "" where it is
    """

    model: Any
    reasons: list[str]


#: Model -> (addresses of its weights and how often they were written to, its view).
_views: WeakKeyDictionary[Any, tuple[tuple[Any, ...], _View]] = WeakKeyDictionary()
#: Copy of a model with some of its blocks -> those.
_some: WeakKeyDictionary[Any, list[nn.Module]] = WeakKeyDictionary()


def fused_view(model: Any, addresses: tuple[Hashable, ...] | None = None) -> Any | None:
    """`model` with fused blocks, over the same parameters; None where none is. Made once for the `addresses` of its weights.

    No block is fused where hooks want to run. Tensor-parallel ranks all call it, and get a view all or none: fused blocks add up
    partial sums in another way.
    """
    return _view(model, addresses).model


def why_not_fused(model: Any) -> list[str]:
    """By layer, why `fused_view` leaves its block as it is; "" where it is fused."""
    return _view(model, None).reasons


def fused_without_kernels(model: Any) -> list[Callable[[], object]]:
    """Fuse the blocks of a model, for `fused_view` to find, by numbers of torch code. The calls by which kernels would compare."""
    repeats: list[Callable[[], object]] = []
    with torch_code():
        _view(model, None, repeats)
    return repeats


def _view(model: Any, addresses: tuple[Hashable, ...] | None, repeats: list[Callable[[], object]] | None = None) -> _View:
    layers = _some[model] if model in _some else blocks(model)
    path = _path(model, layers)
    quiet = bool(layers) and not model.training and not any(map(_is_watched, _running(model, path)))
    if not all_agree(model, quiet):
        return _View(None, ["the model is in training, or hooks watch it"] * len(layers))
    weights = survey(model).addresses if addresses is None else addresses, weight_versions(model)
    previous, view = _views.get(model, ((), _View(None, [])))
    if previous != weights:
        view = _fused(model, path, layers, [] if repeats is None else repeats)
        view = view if all_agree(model, view.model is not None) else _View(None, view.reasons)
        _views[model] = weights, view
    return view


def readings(model: Any, layers: Sequence[nn.Module], around: nn.Module) -> Iterator[Reading]:
    """Two steps of a model's decoder, at a position near the others and at the last: some factors change far out only.

    around: the module that calls the layers.
    """
    decoder, config = model.get_decoder(), text_config(model)
    device, dtype = next(layers[0].parameters()).device, half_type(model)
    plain = "fp16" if dtype is torch.float16 else "bf16"
    cache, twin = (PackedCache(model, 64, keys=plain, values=plain, rotate_keys=False) for _ in range(2))
    rng = torch.Generator().manual_seed(0)
    states = torch.randn(2, _PROMPT + 2, config.hidden_size, generator=rng).to(device, decoder.get_input_embeddings().weight.dtype)
    mask = torch.ones(2, _PROMPT + 2, dtype=torch.long, device=device)
    mask[0, 0] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    positions[:, -1] = (getattr(config, "max_position_embeddings", None) or 1024) - 1

    def run(part: slice, kv_cache: PackedCache) -> None:
        options = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part], "use_cache": True, CACHE: kv_cache}
        decoder(inputs_embeds=states[:, part].clone(), **(_flags(model) | options))

    for kv_cache in (cache, twin):
        run(slice(0, _PROMPT), kv_cache)
    for step in range(_PROMPT, _PROMPT + 2):
        for layer in cache.packed:
            layer.calls = []
        with _recording(list(around.modules())) as calls:
            run(slice(step, step + 1), cache)
        of_attention = [call for layer in cache.packed for call in layer.calls]
        inside = [{id(m) for m in layer.modules()} for layer in layers]
        by_block = [[call for call in of_attention if id(call.module) in own] for own in inside]
        yield Reading(list(_by_block(calls, layers)), calls, by_block, cache, twin)


def _flags(model: Any) -> dict[str, bool]:
    """What the forward of a model reads from its configuration where a call leaves it out, and hands to its decoder."""
    config = text_config(model)
    names = inspect.signature(type(model).forward).parameters
    return {name: value for name in names if isinstance(value := getattr(config, name, None), bool)}


@contextmanager
def _recording(modules: Sequence[nn.Module]) -> Iterator[list[Call]]:
    """The calls of modules, in the order of their ends."""
    calls: list[Call] = []
    owner = threading.get_ident()

    def seen(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if threading.get_ident() == owner:  # other threads may run the model meanwhile
            calls.append(Call(module, args, kwargs, out))

    with _LOCK:
        hooks = [module.register_forward_hook(seen, with_kwargs=True) for module in modules]
        try:
            yield calls
        finally:
            for hook in hooks:
                hook.remove()


def _by_block(calls: Sequence[Call], layers: Sequence[nn.Module]) -> Iterator[list[Call]]:
    start = 0
    for layer in layers:
        stop = next(i for i in range(start, len(calls)) if calls[i].module is layer) + 1
        inside = {id(m) for m in layer.modules()}
        yield [call for call in calls[start:stop] if id(call.module) in inside]
        start = stop


def weight_versions(model: nn.Module) -> int:
    """How often the weights of a model were written to: numbers may agree for some weights only."""
    return sum(0 if t.is_inference() else int(getattr(t, "_version")) for t in tensors_of(model))  # noqa: B009 (a name of torch)


@torch.no_grad()
def _fused(model: Any, path: str, layers: Sequence[Any], repeats: list[Callable[[], object]]) -> _View:
    """A view of a model whose blocks at `path` are fused where their numbers agree. repeats: gets what launches the same again."""
    parent, _, name = path.rpartition(".")
    around = model.get_submodule(parent)
    try:
        near, far = readings(model, layers, around)
        repeats.append(lambda: [*readings(model, layers, around)])
    except torch.OutOfMemoryError:  # says nothing about the decoder
        raise
    except Exception as error:  # of the family's own code, which may want other inputs
        return _View(None, [f"its decoder cannot be read: {error}"] * len(layers))
    norms = norms_of(around)
    structures: list[Structure | None] = []
    reasons = []
    for calls in near.blocks:
        try:
            structures.append(structure_of(calls, norms))
            reasons.append("")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a block unlike any that is known: it runs as it is
            structures.append(None)
            reasons.append(str(error) or type(error).__name__)
    if all(structure is None for structure in structures):
        return _View(None, reasons)
    ahead, tables, routers, all_reduce = _Ahead(), Tables(), Routers(repeats), all_reduce_of(model)
    indices: dict[Hashable, int] = {}
    final = next((call for call in near.calls if id(call.module) in norms and same(call.x, near.blocks[-1][-1].y)), None)
    last = None if final is None else norms[id(final.module)]
    blocks: list[nn.Module] = []
    for i, (layer, structure) in enumerate(zip(layers, structures, strict=True)):
        if structure is None:
            blocks.append(layer)
            continue
        after = structures[i + 1] if i + 1 < len(layers) else None
        following = last if i + 1 == len(layers) else None if after is None else after.branches[0].before
        parts = [
            [fused_part(part, i, (near, far), norms, tables, routers, indices, repeats) for part in branch.parts]
            for branch in structure.branches
        ]
        forms = [own[0] if len(own) == 1 else AddedForms(own) for own in parts]
        blocks.append(FusedBlock(layer, structure, forms, following, ahead, all_reduce))
    inner: dict[str, nn.Module] = {name: nn.ModuleList(blocks)}
    if final is not None and structures[-1] is not None:
        inner |= {n: _FinalNorm(last, ahead) for n, m in around.named_children() if m is final.module}
    return _View(viewed(model, path.split(".")[:-1], inner), reasons)


def with_blocks(model: Any, layers: Sequence[nn.Module]) -> Any:
    """A copy of `model` that shares everything, with some of its blocks."""
    own = blocks(model)
    *path, name = _path(model, own).split(".")
    numbers: list[int] = []
    if len(layers) != len(own):
        places = {id(layer): i for i, layer in reversed(list(enumerate(own)))}
        numbers = [places[id(layer)] for layer in layers]
        layers = [placed(layer, number) for layer, number in zip(layers, numbers, strict=True)]
    copy = viewed(model, path, {name: nn.ModuleList(layers)})
    _some[copy] = list(layers)
    if numbers:
        around = vars(copy.get_submodule(".".join(path)))
        around |= {key: ConfigOf(x, numbers, len(own)) for key, x in around.items() if isinstance(x, PreTrainedConfig)}
    return copy


def _path(model: nn.Module, layers: Sequence[nn.Module]) -> str:
    """Where the list of these blocks is; "" where there is none."""
    return next((name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and list(m) == layers), "")


def _running(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules whose forwards run, or would have run, in a view: those around the blocks, and all within them."""
    parts = path.split(".")[:-1]
    yield from (model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1))
    around = model.get_submodule(".".join(parts)).children()
    weights = [(m, getattr(m, "weight", None)) for m in around]
    yield from (m for m, weight in weights if isinstance(weight, torch.Tensor) and weight.ndim == 1)  # the norm: a view has its own
    yield from (m for layer in model.get_submodule(path).children() for m in layer.modules())


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody wants to see a module's calls (hooks, accelerate's offloading), or has replaced its forward."""
    return has_hooks(module) or ("forward" in vars(module) and not _is_parallel(module))


def _is_parallel(module: nn.Module) -> bool:
    """Whether transformers replaced the forward of a linear layer for tensor parallelism: a view calls those that reduce or gather.

    So it does for norms of q and k, whose gradients it adds up: nothing is trained here.
    """
    forward = vars(module)["forward"]
    norm = getattr(forward, "__qualname__", "").startswith("ReplicatedWithGradAllReduce.")  # a partial has no name
    theirs = getattr(forward, "__module__", None) == "transformers.distributed.tensor_parallel"
    return theirs and (norm or isinstance(module, nn.Linear | QuantLinear))


class _Ahead:
    """What a block has normalized for the next one, along with its own result."""

    held: tuple[torch.Tensor, Rows] | None = None
    #: The same of a block that ran as compiled loops.
    state: State | None = None

    def take_state(self, hidden: torch.Tensor, norm: Norm | None) -> State:
        """hidden and norm(hidden) for compiled loops."""
        entry, self.state = self.state, None
        return entry if entry is not None and entry.hidden is hidden else state_of(hidden, whole_rows(self.take(hidden, norm)))

    def take(self, hidden: torch.Tensor, norm: Norm | None) -> Rows:
        """norm(hidden), which was computed with `hidden`, unless this is the first block."""
        entry, self.held = self.held, None
        if norm is None:
            return hidden
        return entry[1] if entry is not None and entry[0] is hidden else norm_rows([hidden], [norm])[0]


class _FinalNorm(nn.Module):
    """The norm behind the last block."""

    def __init__(self, norm: Norm | None, ahead: _Ahead) -> None:
        super().__init__()
        self.norm, self.ahead = norm, ahead

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return whole_rows(self.ahead.take(hidden, self.norm))


class FusedBlock(nn.Module):
    """A decoder block of a `structure`, whose branches are called as `forms` do, in few launches.

    following: the norm behind the block. all_reduce: as in `add_norm`. Arguments that the structure does not know go to the
    family's own block. Other attributes are those of that block.
    """

    def __init__(
        self,
        layer: nn.Module,
        structure: Structure,
        forms: Sequence[Form],
        following: Norm | None,
        ahead: _Ahead,
        all_reduce: AllReduce | None,
    ) -> None:
        super().__init__()
        bare = [branch._replace(parts=[]) for branch in structure.branches]  # without tensors of the step that was read
        self.own, self.structure = [layer], structure._replace(branches=bare)  # a list: no child
        self.ahead, self.all_reduce = ahead, all_reduce
        ends = [*(branch.before for branch in structure.branches[1:]), following]
        self.branches = [(form, branch.after, end) for form, branch, end in zip(forms, structure.branches, ends, strict=True)]
        loops = BlockLoops(self.branches, structure.multiplier) if all_reduce is None else None
        self.loops = loops if loops is not None and loops.heads is not None else None

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["own"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        structure = self.structure
        block = {**dict(zip(structure.names, args, strict=False)), **kwargs}
        if new := sorted(name for name, x in block.items() if x is not None and name not in structure.knows):
            warn_once(f"blocks of {type(self.own[0]).__name__} are not fused, and slower, with {', '.join(new)}")
            return self.own[0](*args, **kwargs)
        hidden = block[structure.x_name]
        if (state := self._by_loops(hidden, block)) is not None:
            self.ahead.held, self.ahead.state = state[:2], state
            return self._result(state.hidden)
        x = self.ahead.take(hidden, structure.branches[0].before)
        for form, after, before in self.branches:
            hidden, x = self._sum(*form(x, block), hidden, after, before)
        self.ahead.held = hidden, x
        return self._result(hidden)

    def _by_loops(self, hidden: torch.Tensor, block: dict[str, Any]) -> State | None:
        """Rows behind the block; None, and nothing has changed, where compiled loops do not run it."""
        if self.loops is None or not runs_loops(hidden):
            return None
        state = self.ahead.take_state(hidden, self.structure.branches[0].before)
        self.ahead.held = state[:2]
        return self.loops(state, block)

    def _result(self, hidden: torch.Tensor) -> Any:
        nones = self.structure.nones
        return hidden if nones is None else (hidden, *(None,) * nones)

    def _sum(
        self, x: torch.Tensor, last: nn.Module | None, hidden: torch.Tensor, after: Norm | None, before: Norm | None
    ) -> tuple[torch.Tensor, Rows]:
        """The sum of the residual and a branch, whose `last` layer is left to do, and that sum normalized."""
        norm: Rows | None
        multiplier = self.structure.multiplier
        if after is None and (quantized := quantized_layer(last)):
            hidden, norm = add_projection(x, quantized.weight, quantized.bias, hidden, before, multiplier=multiplier)
            return hidden, hidden if norm is None else norm
        all_reduce = None
        if self.all_reduce is not None and (partial_sums := partial_layer(last)):
            x, all_reduce = linear(x, partial_sums.weight), self.all_reduce
        elif last is not None:
            x = last(x)
        hidden, norm = add_norm(x, hidden, before, after=after, multiplier=multiplier, all_reduce=all_reduce)
        return hidden, hidden if norm is None else norm

"""What a model consists of: walks over its modules; and the structure of a decoder block, read off one step of it: branches one
after the other, the norms around them, and their sums.

    x = before(hidden);  hidden = hidden + multiplier * after(branch(x))        of each branch; modules of the same x are added up

Forward hooks record which module was given what in a step of the decoder, over random states and a small 16-bit cache. A norm is
where its input or output is a branch's; its kind is the one that gives the same numbers. Nothing goes by the name of a family.
`fused_blocks.py` proposes a fused form of each branch, and takes it where the numbers agree at `SCALES` and at both positions.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from halfbyte.errors import Unsupported
from halfbyte.nn import local_shard
from halfbyte.reference.block import KINDS, Norm, rms_norm

#: Sizes of the inputs of a branch at which its fused form must agree: a clamp acts on large ones only.
SCALES = (1.0, 30.0)
#: How much two results of the same arithmetic may differ, by the bits of the type; another structure is off by more.
_ROUNDING = {16: 0.04, 32: 0.01, 64: 0.01}
#: Attributes that tell layers of one kind from each other.
_NUMBERING = ("layer_idx", "layer_id", "layer_number")


class Call(NamedTuple):
    """A call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def x(self) -> Any:
        """The first tensor that it was given; None where there is none."""
        return next((t for t in chain(self.args, self.kwargs.values()) if isinstance(t, torch.Tensor)), None)

    @property
    def y(self) -> Any:
        """Its result; of several, the first."""
        return self.out[0] if isinstance(self.out, tuple) else self.out


class Part(NamedTuple):
    """A module of a branch, and a call of it.

    inner       calls within it
    x_name      what its first tensor is called
    renames     name of an argument -> that of the block's own, from which it comes
    constants   arguments that are always the same
    """

    call: Call
    inner: list[Call]
    x_name: str
    renames: dict[str, str]
    constants: dict[str, Any]

    def block_of(self, call: Call) -> dict[str, Any]:
        """The arguments of the block in a call of the module, as far as they are those of the call."""
        return {own: call.kwargs.get(name) for name, own in self.renames.items()}

    def call_in(self, step: Reading, number: int) -> Call:
        """The call of the module in a step, within layer `number`."""
        return next(call for call in step.blocks[number] if call.module is self.call.module)


class Branch(NamedTuple):
    """A branch of a block: the norms around it, None where there is none, and modules, whose results are added up."""

    before: Norm | None
    after: Norm | None
    parts: list[Part]


class Structure(NamedTuple):
    """A block.

    names           the arguments of its forward, in their order
    x_name          what its first tensor is called
    knows           those of the step that was read
    nones           how many None it returns behind its result, in a tuple; None: it returns its result alone
    """

    branches: list[Branch]
    multiplier: float
    names: tuple[str, ...]
    x_name: str
    knows: frozenset[str]
    nones: int | None


class Reading(NamedTuple):
    """A step of a decoder.

    blocks      calls within each block, that of the block itself at the end
    calls       all of them
    attended    what attention was given within each block: a query, and the options of the call
    cache       `PackedCache` which the step extended; `twin` holds the same tokens before the step
    """

    blocks: list[list[Call]]
    calls: list[Call]
    attended: list[list[Any]]
    cache: Any
    twin: Any


def same(a: Any, b: Any) -> bool:
    """Whether two values are one tensor, by its contents."""
    return a is b or (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape and torch.equal(a, b))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the result of the same arithmetic, but for rounding."""
    if a.shape != b.shape:
        return False
    bits = min(torch.finfo(t.dtype).bits for t in (a, b))
    off = (a.double() - b.double()).norm()
    return bool(off <= _ROUNDING[bits] * b.double().norm())


def signature(module: nn.Module) -> Hashable:
    """What a module has in common with those that do the same with other weights: classes, sizes and plain attributes."""
    parts = []
    for name, m in module.named_modules():
        plain = {key: x for key, x in vars(m).items() if isinstance(x, bool | int | float | str) and key not in _NUMBERING}
        shapes = tuple((key, p.shape, p.dtype) for key, p in m.named_parameters(recurse=False))
        parts.append((name, type(m), tuple(sorted(plain.items())), shapes))
    return tuple(parts)


def norms_of(module: nn.Module) -> dict[int, Norm]:
    """The RMSNorms within a module, by the id of theirs."""
    kinds: dict[Hashable, Norm | None] = {}
    norms = {}
    for m in module.modules():
        if isinstance(weight := getattr(m, "weight", None), torch.Tensor) and weight.ndim == 1:
            key = signature(m)
            kinds[key] = kinds[key] if key in kinds else norm_of(m)
            if (norm := kinds[key]) is not None:
                norms[id(m)] = norm._replace(weight=weight)
    return norms


def norm_of(module: nn.Module) -> Norm | None:
    """The RMSNorm that gives the numbers of a module; None where none does."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    if getattr(module, "bias", None) is not None:
        return None
    rng = torch.Generator().manual_seed(0)
    x, other = (torch.randn(*size, len(weight), generator=rng).to(weight) for size in ((3,), ()))
    twin = copy.copy(module)
    twin._parameters = {**module._parameters, "weight": nn.Parameter(other, requires_grad=False)}
    try:
        out = type(module).forward(twin, x)
    except (AttributeError, TypeError):  # it takes more than x: a gate
        return None
    likely = [kind for kind in KINDS if same(rms_norm(x, Norm(other, eps, kind)), out)]
    near = [kind for kind in KINDS if torch.allclose(rms_norm(x, Norm(other, eps, kind)), out, rtol=torch.finfo(x.dtype).eps)]
    return Norm(weight, eps, (likely or near)[0]) if likely or near else None


def structure_of(calls: Sequence[Call], norms: Mapping[int, Norm]) -> Structure:
    """The structure of a block from the calls of a step. norms: by the id of a module. Raises `Unsupported` with the reason."""
    block = calls[-1]
    children = {id(m) for m in block.module.children()}
    outer = [call for call in calls[:-1] if id(call.module) in children and not same(call.x, call.out)]
    outer_norms = [(call, norms[id(call.module)]) for call in outer if id(call.module) in norms]
    groups: list[list[Call]] = []
    for call in (call for call in outer if id(call.module) not in norms):
        if groups and same(groups[-1][0].x, call.x):
            groups[-1].append(call)
        else:
            groups.append([call])
    arguments = arguments_of(block)
    x_name, hidden = next((name, x) for name, x in arguments.items() if isinstance(x, torch.Tensor))
    own = vars(block.module)
    multiplier, branches = float(own.get("residual_multiplier", own.get("residual_scale", 1.0))), []
    for group in groups:
        x, y = group[0].x, group[0].y if len(group) == 1 else sum(call.y for call in group)
        before = next((pair for pair in outer_norms if same(pair[0].out, x)), None)
        after = next((pair for pair in outer_norms if same(pair[0].x, y)), None)
        start = x if before is None else before[0].x
        if not _sums_up(hidden, start):
            kinds = ", ".join(type(call.module).__name__ for call in outer)
            raise Unsupported(f"its parts ({kinds}) are not branches one after the other, each behind an RMSNorm or none")
        hidden = start + multiplier * (y if after is None else after[0].out)
        parts = [_part(call, calls, arguments) for call in group]
        norm, last = (None if pair is None else pair[1] for pair in (before, after))
        branches.append(Branch(norm, last, parts))
    if not branches or not _sums_up(hidden, block.y):
        raise Unsupported("its result is not the sum of its branches")
    if sum(norm is not None for branch in branches for norm in branch[:2]) != len(outer_norms):
        raise Unsupported("it has norms elsewhere than around its branches")
    rest = block.out[1:] if isinstance(block.out, tuple) else None
    if rest is not None and any(x is not None for x in rest):
        raise Unsupported("it returns more than its result")
    names = tuple(_names(block.module))
    return Structure(branches, multiplier, names, x_name, frozenset(arguments), None if rest is None else len(rest))


def _sums_up(expected: torch.Tensor, found: Any) -> bool:
    return same(expected, found) or (isinstance(found, torch.Tensor) and close(found, expected))


def arguments_of(call: Call) -> dict[str, Any]:
    """The arguments of a call, by name."""
    return {**dict(zip(_names(call.module), call.args, strict=False)), **call.kwargs}


def _names(module: nn.Module) -> list[str]:
    return [*inspect.signature(type(module).forward).parameters][1:]


def _part(call: Call, calls: Sequence[Call], given: dict[str, Any]) -> Part:
    """A module of a branch, and where its arguments come from: the block's own, by identity, or constants."""
    inside = {id(m) for m in call.module.modules()}
    arguments = arguments_of(call)
    parameters = inspect.signature(type(call.module).forward).parameters.values()
    if len(call.args) > 1 and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise Unsupported(f"{type(call.module).__name__} takes more than x without a name")
    x_name = next(name for name, x in arguments.items() if x is call.x)
    renames, constants = {}, {}
    for name, x in arguments.items():
        plain = x is None or isinstance(x, bool | int | float | str)
        sources = [own for own, value in given.items() if value is x and (own == name or not plain)]
        if sources:
            renames[name] = name if name in sources else sources[0]
        elif plain:
            constants[name] = x
        elif name != x_name:
            raise Unsupported(f"its block makes {name} for {type(call.module).__name__}")
    renames.pop(x_name, None)
    return Part(call, [c for c in calls if id(c.module) in inside and c is not call], x_name, renames, constants)


# ----------------------------------------------------------------------------------------------- walks over all of a model

# Several times faster than torch's own: their host time is part of every first token.

#: An argument of blocks that are passed their place.
_PLACE = "layer_idx"
#: What PEFT changes of a layer to turn adapters on and off, without touching a tensor.
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


#: Types of attributes by which modules of one class compute something else.
_PLAIN = {bool, int, float, str, FunctionType, BuiltinFunctionType}
#: How many attributes torch gives every module, first of all.
_OF_TORCH = len(vars(nn.Module()))


def viewed(module: nn.Module, path: list[str], children: dict[str, nn.Module]) -> nn.Module:
    """A copy of `module` that shares everything, but for the `children` of the module at `path`."""
    if path:
        children = {path[0]: viewed(module.get_submodule(path[0]), path[1:], children)}
    view: nn.Module = object.__new__(type(module))
    # Without replaced methods, whose owners (of PEFT, for one call) hold the model: it would never be freed.
    own = {name: x for name, x in vars(module).items() if getattr(x, "model", None) is not module and not isinstance(x, MethodType)}
    vars(view).update({**own, "_modules": {**module._modules, **children}})
    return view


class ConfigOf:
    """The configuration of some blocks: of lists with an entry for each of `count` blocks, those at `numbers`.

    The module around blocks looks up what each one takes, such as a mask, by its place among those that it calls.
    """

    def __init__(self, whole: Any, numbers: Sequence[int], count: int) -> None:
        self.whole, self.numbers, self.count = whole, numbers, count

    def __getattr__(self, name: str) -> Any:
        x = getattr(self.whole, name)
        return [x[number] for number in self.numbers] if isinstance(x, list | tuple) and len(x) == self.count else x


def placed(block: nn.Module, number: int) -> nn.Module:
    """A block among fewer: a copy that shares everything, for which `number` is its place in the whole model.

    The module around blocks of some families (Zamba) counts them, and passes each its place; other blocks know theirs.
    """
    if _PLACE not in _names(block):
        return block
    view, kind = viewed(block, [], {}), type(block)
    view.__class__ = _placed_class(kind)  # type: ignore[arg-type]
    vars(view)["place"] = {_PLACE: number}
    return view


@functools.cache
def _placed_class(kind: Any) -> Any:
    own = kind.forward

    @functools.wraps(own)  # whose arguments are read
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, **{**dict(zip(_names(self), args, strict=False)), **kwargs, **self.place})

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "forward": forward})


class Survey(NamedTuple):
    """What one walk over a model finds.

    addresses   of its weights, its modules and what these keep in plain attributes, and which adapters are on: others once it was
                moved, cast, quantized or adapted, or a module was replaced or set
    devices     where its weights lie
    has_hooks   whether a module's calls are watched
    by_length   whether a rotary embedding depends on the length of the text
    """

    addresses: tuple[Hashable, ...]
    devices: set[torch.device]
    has_hooks: bool
    by_length: bool


def survey(model: nn.Module) -> Survey:
    """Look at every module of a model once."""
    addresses: list[Hashable] = []
    adapters, rotations, devices, any_hooks = [], [], set(), False
    for module in modules_of(model):
        own = vars(module)
        any_hooks = any_hooks or has_hooks(module)
        addresses.append(ref(module))  # unlike an id, never that of another
        addresses += [x for x in islice(own.values(), _OF_TORCH, None) if type(x) in _PLAIN]
        adapters += [str(own[name]) for name in _OF_ADAPTERS if name in own]
        rotations += [own["rope_type"]] if "rope_type" in own else []
        for t in (*own["_parameters"].values(), *own["_buffers"].values()):
            if t is not None:
                addresses.append(local_shard(t).data_ptr())
                devices.add(t.device)
    return Survey((*addresses, *adapters), devices, any_hooks, any(map(depends_on_length, rotations)))


def rotations_by_length(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings that depend on the length of the text: they change where it is longer than another length."""
    return [m for m in modules_of(model) if depends_on_length(vars(m).get("rope_type", ""))]


def depends_on_length(rope_type: object) -> bool:
    """Whether a rotary embedding of this type does."""
    return "dynamic" in str(rope_type) or "longrope" in str(rope_type)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, each once."""
    modules, stack = {id(model): model}, [model]
    while stack:
        children = [m for m in vars(stack.pop())["_modules"].values() if m is not None and id(m) not in modules]
        modules.update((id(m), m) for m in children)
        stack.extend(children)
    return list(modules.values())


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of a model, shared ones as often as they are there."""
    stack: list[nn.Module | None] = [model]
    while stack:
        if (module := stack.pop()) is not None:
            own = vars(module)
            stack.extend(own["_modules"].values())
            yield from (t for kind in ("_parameters", "_buffers") for t in own[kind].values() if t is not None)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of others. transformers' own, which collect outputs, stay and do nothing in between; halfbyte's,
    which record a step, look at calls of their own thread.
    """
    own = ("transformers.utils.output_capturing", "halfbyte.hf.fused_blocks")
    hooks = list(module._forward_hooks.values())  # another thread may add some meanwhile
    return bool(module._forward_pre_hooks) or any(getattr(h, "__module__", "") not in own for h in hooks)

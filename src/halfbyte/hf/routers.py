"""Routers of mixtures of experts in two launches, logits and `route`, where that gives what the family's own router gave.

A router is a module of a branch that gives (logits [T, E], gates [T, top_k], ids [T, top_k]). Its `Routing` is read off a copy with
random weights and biases, in fp32 on a CPU, at the numbers that the module keeps: the one by which all of `_PROBES` agree. Which
logits it takes, rounded to 16 bits or not, is what agrees with its own in the recorded step. The branch then runs the family's own
forward, over a copy of it with other routers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from halfbyte.hf.structure import Call, Part, arguments_of, signature, viewed
from halfbyte.ops.route import route
from halfbyte.reference.route import SCORES, Routing, choice, gates_of, scores_of

#: Sizes of logits, what is added to them, and to biases: scores near 0 show what is added to their sum, and biases below 0 whether
#: groups that are left out count as 0.
_PROBES = ((1.5, 0.0, 0.0), (6.0, 0.0, -2.0), (1.5, -12.0, -2.0))
_TOKENS = 64
#: What routers add to the sum of the gates besides numbers that they keep, and how close copies in fp32 come.
_EPS, _CLOSE = (1e-20, 1e-6), 1e-4
_Logits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Sources(NamedTuple):
    """The tensors of a router, by the names of its own or of its arguments: weight [E, K], bias [E] of logits and of the choice."""

    weight: str
    bias: str | None
    for_choice: str | None

    def bias_of(self, tensors: Mapping[str | None, torch.Tensor]) -> torch.Tensor | None:
        """That of the choice, [E]."""
        return None if self.for_choice is None else tensors[self.for_choice].flatten()


class _Probe(NamedTuple):
    """What a router with random numbers gave: ids ascending, and gates in their order; for_choice [E] or None."""

    logits: torch.Tensor
    for_choice: torch.Tensor | None
    gates: torch.Tensor
    ids: torch.Tensor


class FusedRouter(nn.Module):
    """A router whose logits and whose `route` are a launch each. Other attributes are those of the family's own.

    types: of logits and gates, as the family's own router gives them.
    """

    def __init__(
        self, own: nn.Module, sources: Sources, routing: Routing, logits: _Logits, types: tuple[torch.dtype, torch.dtype]
    ) -> None:
        super().__init__()
        self.own, self.sources, self.routing, self.logits, self.types = [own], sources, routing, logits, types  # a list: no child

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["own"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        call = Call(self.own[0], args, kwargs, None)
        tensors, sources, x = tensors_of(call), self.sources, call.x
        logits = self.logits(x.reshape(-1, x.shape[-1]), tensors[sources.weight], tensors.get(sources.bias))
        ids, gates = route(logits, self.routing, sources.bias_of(tensors), dtype=self.types[1])
        return logits.to(self.types[0]), gates, ids


class Routers:
    """The routers of a model, each kind of which is read once. repeats: gets comparisons that a router passed."""

    def __init__(self, repeats: list[Callable[[], object]]) -> None:
        self._kinds: dict[Hashable, tuple[Sources, Routing] | None] = {}
        self._repeats = repeats

    def fused(self, part: Part) -> Part:
        """A module of a branch over a view of it with fused routers, where they give what its own gave."""
        module = part.call.module
        names = {id(m): name for name, m in module.named_modules()}
        for call in filter(_is_router, part.inner):
            if (router := self._router(call)) is not None:
                *path, name = names[id(call.module)].split(".")
                module = viewed(module, path, {name: router})
        return part._replace(call=part.call._replace(module=module))

    def _router(self, call: Call) -> FusedRouter | None:
        key = signature(call.module)
        if key not in self._kinds:
            self._kinds[key] = _read(call)
        if (kind := self._kinds[key]) is None:
            return None
        types = call.out[0].dtype, call.out[1].dtype
        for logits in (_unrounded, _own, _wide):
            agrees = partial(_routes_alike, router := FusedRouter(call.module, *kind, logits, types), call)
            if agrees():
                self._repeats.append(agrees)
                return router
        return None


def _is_router(call: Call) -> bool:
    out = call.out
    if not (isinstance(out, tuple) and len(out) == 3 and all(isinstance(t, torch.Tensor) and t.ndim == 2 for t in out)):
        return False
    logits, gates, ids = out
    return gates.shape == ids.shape and len(logits) == len(ids) and ids.dtype is torch.int64 and gates.is_floating_point()


def tensors_of(call: Call) -> dict[str | None, torch.Tensor]:
    """The tensors of a module and of a call of it, by name, but for x."""
    own = itertools.chain(call.module.named_parameters(), call.module.named_buffers(), arguments_of(call).items())
    return {name: t for name, t in own if isinstance(t, torch.Tensor) and t is not call.x}


# ------------------------------------------------------------------------------------------------------------------- logits


def _unrounded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In fp32 of 16 bits, without copies in fp32: on a GPU."""
    if not x.is_cuda or bias is not None or x.dtype is not weight.dtype or x.element_size() > 2:
        raise NotImplementedError
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def _own(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x, weight, bias)


def _wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float())


def _routes_alike(router: FusedRouter, call: Call) -> bool:
    """Whether a router gives what the family's own gave in the step: its logits, and one of the choices that these allow."""
    logits, gates, ids = call.out
    try:
        own = router(*call.args, **call.kwargs)
    except (RuntimeError, ValueError):  # types that do not belong together
        return False
    if own[0].shape != logits.shape or not _near(own[0], logits, _CLOSE):
        return False
    wide, bias = own[0].float(), router.sources.bias_of(tensors_of(call))
    scores = scores_of(wide, router.routing)
    keys = scores if bias is None else scores + bias.float()
    rounding = max(_CLOSE, *(2 * torch.finfo(t.dtype).eps for t in (logits, gates)))
    own_keys, best = (keys.gather(1, one).sort().values for one in (own[2], ids))
    weights = [(gates_of(scores, one[2], router.routing), one[1]) for one in (own, call.out)]
    return all(_near(a, b, rounding) for a, b in [(own_keys, best), *weights])


def _near(a: torch.Tensor, b: torch.Tensor, rounding: float) -> bool:
    a, b = a.float(), b.float()
    return bool(torch.allclose(a, b, rtol=rounding, atol=rounding * float(b.abs().max())))


# ---------------------------------------------------------------------------------------------------------------- what it does


def _read(call: Call) -> tuple[Sources, Routing] | None:
    """What a router computes; None where it is none of `Routing`."""
    if (sources := _sources(call)) is None:
        return None
    try:
        probes = [_probe(call, sources, *sizes) for sizes in _PROBES]
    except Exception:  # of the family's own code, which may want other inputs
        return None
    for source in dict.fromkeys((sources.for_choice, None)):
        biases = [probe.for_choice if source else None for probe in probes]
        if (routing := _routing(call, probes, biases)) is not None:
            return sources._replace(for_choice=source), routing
    return None


def _sources(call: Call) -> Sources | None:
    tensors, (experts, width) = tensors_of(call), (call.out[0].shape[1], call.x.shape[-1])
    weights = [str(name) for name, t in tensors.items() if t.shape == (experts, width)]
    if len(weights) != 1:
        return None
    bias = weights[0].removesuffix("weight") + "bias"
    others = [str(name) for name, t in tensors.items() if t.numel() == experts and name not in (bias, *weights)]
    return Sources(weights[0], bias if bias in tensors else None, others[0] if others else None) if len(others) < 2 else None


def _probe(call: Call, sources: Sources, size: float, offset: float, bias_offset: float) -> _Probe:
    """A call of a copy of the router that has random numbers."""
    rng = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(call.module).cpu().float()
    arguments, width = arguments_of(call), call.x.shape[-1]
    x = 1 + torch.randn(_TOKENS, width, generator=rng)
    for argument, t in arguments.items():
        if t is call.x:
            arguments[argument] = x if t.ndim == 2 else x.unflatten(0, (4, -1))
        elif isinstance(t, torch.Tensor):
            arguments[argument] = torch.empty(t.shape)
    tensors = tensors_of(Call(twin, (), arguments, None))
    for name, t in tensors.items():
        noise = torch.randn(t.shape, generator=rng)
        t.copy_(noise * size * (2 * width) ** -0.5 + offset / width if name == sources.weight else noise + bias_offset)
    logits, gates, ids = twin(**arguments)
    order = ids.sort(-1)
    return _Probe(logits.float(), sources.bias_of(tensors), gates.gather(1, order.indices), order.values)


def _routing(call: Call, probes: Sequence[_Probe], biases: Sequence[torch.Tensor | None]) -> Routing | None:
    """The routing by which all probes agree."""
    experts, top_k = call.out[0].shape[1], call.out[2].shape[1]
    plain = vars(call.module).values()
    numbers = [float(n) for n in plain if isinstance(n, int | float) and not isinstance(n, bool) and 0 < n < 1e6]
    for score, groups in itertools.product(SCORES, _groups(numbers, experts, top_k)):
        form = Routing(top_k, score, None, 1.0, *groups)  # type: ignore[arg-type]
        scores = [scores_of(probe.logits, form) for probe in probes]
        ids = [choice(probe.logits, s, form, bias) for probe, s, bias in zip(probes, scores, biases, strict=True)]
        if not all(torch.equal(one.sort(-1).values, probe.ids) for one, probe in zip(ids, probes, strict=True)):
            continue
        small = [n for n in numbers if n < 1e-3]
        for eps, scale in itertools.product((*small, *_EPS, None), (1.0, *numbers, 1 / top_k)):
            whole = form._replace(eps=eps, scale=scale)
            gates = [gates_of(s, probe.ids, whole) for s, probe in zip(scores, probes, strict=True)]
            if all(torch.allclose(one, probe.gates, rtol=_CLOSE, atol=0) for one, probe in zip(gates, probes, strict=True)):
                return whole
    return None


def _groups(numbers: Sequence[float], experts: int, top_k: int) -> Iterator[tuple[int, int, int]]:
    """What may be (groups, top_groups, best)."""
    yield 1, 1, 1
    counts = {int(n) for n in numbers if n == int(n)}
    for groups, top_groups, best in itertools.product(sorted(counts), sorted(counts), (2, 1)):
        width = experts // groups
        if experts % groups == 0 and 1 <= top_groups < groups and best <= width and top_k <= top_groups * width:
            yield groups, top_groups, best

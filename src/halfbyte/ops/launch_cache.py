"""The launch cache: a call with the signature of an earlier one is launched without checks and without a plan.

Checks, plans and the compiler depend only on these facts of a tensor: dtype, shape, strides, device, and its address modulo 16. A
call's *signature* is the facts of its tensors, its formats, its options and the environment. Calls of one signature are the same
launch except for addresses and numbers. `launch` makes the launches of a plan and stores a function that repeats them; later calls
replay it (`replay`). It keeps no tensor alive: layers and steps share it.

Where addresses and numbers go is not written down a second time: the launches are made once more of a twin of the call, whose
tensors are on the meta device, each with a storage of its own. What they pass on tells which is which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from halfbyte.formats import Format
from halfbyte.ops import compiling
from halfbyte.ops.workspace import counters, floats, shared

if TYPE_CHECKING:
    from halfbyte.ops.declare import Op

Key = tuple[Any, ...]
#: Shape and strides of a result.
Layout = tuple[tuple[int, ...], tuple[int, ...]]

#: Types that are described by their facts; another subclass may override the call (__torch_function__).
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
_data_ptr = torch.Tensor.data_ptr
#: Launches that are kept; the cache is cleared when there are more.
_CAPACITY = 1024

#: By signature: the function that repeats the launch, and the formats, kept alive so that no other format gets their ids.
_launches: dict[Key, tuple[Callable[..., Any], tuple[Format, ...]]] = {}


class Signature(NamedTuple):
    """The key of a call, and the addresses of its tensors. Nothing in it has been checked.

    tensors    of the call that there are, in the order of its fields; the first is on the device that launches
    addresses  of the tensors
    """

    key: Key
    tensors: Sequence[Any]
    addresses: Sequence[int]
    formats: tuple[Format, ...]

    @property
    def known(self) -> bool:
        """Whether a launch is stored, so that this call would pass every check of shapes, types and devices."""
        return self.key in _launches

    def covers(self, used: Iterable[torch.Tensor | None]) -> bool:
        """Whether a launch `used` the memory of these tensors, none of them converted on the way, and all on one device.

        Compared one by one: two may be the same tensor now, and not in the next call.
        """
        device, some = self.tensors[0].device, [t for t in used if t is not None]
        return len(some) == len(self.addresses) and all(
            address == t.data_ptr() and t.device == device for address, t in zip(self.addresses, some, strict=True)
        )


def replay(s: Signature, numbers: tuple[Any, ...] = (), into: torch.Tensor | None = None) -> Any:
    """The results of the launches stored for this signature, made again on the tensors' GPU with these `numbers` (`Call.numbers`).

    into: memory for the first result, which is taken if it is laid out alike. None: nothing is stored, or it cannot be launched now
    (during capture, or with too small a workspace).
    """
    entry = _launches.get(s.key)
    if entry is None:
        return None
    first = s.tensors[0]
    if first.get_device() == torch.cuda.current_device():
        return entry[0](s, numbers, into)
    with torch.cuda.device_of(first):
        return entry[0](s, numbers, into)


class Number(float):
    """A number of a twin: stands for the number of each call, and is known by its identity."""

    @staticmethod
    def of(value: float | None) -> Number | None:
        return None if value is None else Number(1.0)


class Plan(Protocol):
    """A plan of launches, with the workspace that they share: fp32 numbers, and int32 counters."""

    @property
    def floats(self) -> int: ...
    @property
    def counters(self) -> int: ...


#: (call, plan, results, workspace) -> the launches, in order (`kernels.common.launch.Launch`).
Launches = Callable[[Any, Any, Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence[Any]]


def launch(
    op: Op[Any],
    call: Any,
    plan: Plan,
    launches: Launches,
    results: Sequence[torch.Tensor],
    *,
    signature: Signature | None = None,
    own: bool = False,
    key: Key | None = None,
) -> None:
    """Launch a call as planned on the current stream, compiling if need be, and store that under `signature`.

    own: with a workspace of its own, see `workspace.floats`. key: see `with_compiled`.
    """
    device = results[0].device if results else call[0].device
    workspace = (floats(device, plan.floats, own), counters(device, plan.counters, own)) if plan.floats else ()
    some = launches(call, plan, results, workspace)
    if key is None:
        kernels = [one() for one in some]
    else:
        kernels = with_compiled(
            key, lambda known: [one(kernel) for one, kernel in zip(some, known or [None] * len(some), strict=True)]
        )
    if signature is None or signature.known or compiling.active() or not signature.covers(op.tensors(call)):
        return
    if len(_launches) >= _CAPACITY:
        _launches.clear()
    _launches[signature.key] = _repeated(op, call, plan, launches, kernels, results), signature.formats


def _repeated(
    op: Op[Any], call: Any, plan: Plan, launches: Launches, kernels: Sequence[Any], results: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """A function that repeats the launches of `kernels` for another call of the same signature. It holds no tensor."""
    from halfbyte.kernels.common.compat import launcher

    twin = op.twin(call)
    twins, sizes = twin.new_results(), (plan.floats, plan.counters)
    workspace = [torch.empty(n, device="meta") for n in sizes] if plan.floats else []
    places = _Places(getattr(twin, "numbers", tuple)(), len(twins))
    sources = [t for t in op.tensors(twin) if t is not None]
    for name, tensors in (("a", sources), ("r", twins), ("w", workspace)):
        places.add(name, tensors)
    runs = [
        (launcher(kernel, (*one.grid, 1, 1)[:3]), places.function(one.arguments))
        for one, kernel in zip(launches(twin, plan, twins, workspace), kernels, strict=True)
    ]
    layouts, count = [(*layout(t), t.dtype) for t in (*results, *places.scratch)], len(results)

    def again(s: Signature, numbers: tuple[Any, ...], into: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
        first = s.tensors[0]
        memory = shared(first.device, *sizes)
        if memory is None:
            return None
        stream, buffers = memory
        tensors = []
        if into is not None and layout(into) == layouts[0][:2] and into.data_ptr() % 16 == 0:
            tensors.append(into)
        for shape, strides, dtype in layouts[len(tensors) :]:
            tensors.append(first.new_empty_strided(shape, strides, dtype=dtype))
        r, w = [*map(_data_ptr, tensors)], [*map(_data_ptr, buffers)]
        for address in (*r, *w):
            if address % 16:
                return None  # no allocator of torch does that, and the kernel may have been compiled for it
        for run, arguments in runs:
            run(stream, *arguments(s.addresses, r, w, numbers))
        return tuple(tensors[:count])

    return again


class _Places:
    """Where the arguments of a twin's launches come from, as Python: `a[0]` of addresses, `r`esults, `w`orkspace, `n`umbers."""

    def __init__(self, numbers: Sequence[Any], results: int) -> None:
        """results: how many there are. scratch: memory between two launches, allocated behind them."""
        self.scratch: list[torch.Tensor] = []
        self._results = results
        self._constants: dict[str, Any] = {}
        self._numbers = {id(number): f"n[{i}]" for i, number in enumerate(numbers) if isinstance(number, Number)}
        self._storages: dict[int, str] = {}

    def add(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._storages |= {_storage(t): f"{name}[{i}]" for i, t in enumerate(tensors)}

    def function(self, arguments: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
        """(addresses, those of results, of the workspace, numbers) -> arguments like these, as plain tuples."""
        function: Callable[..., tuple[Any, ...]] = eval(f"lambda a, r, w, n: {self._text(arguments)}", self._constants)
        return function

    def _text(self, value: Any) -> str:
        if isinstance(value, tuple):
            return f"({''.join(f'{self._text(one)},' for one in value)})"
        if isinstance(value, torch.Tensor):
            if _storage(value) not in self._storages:  # memory between two launches
                self.scratch.append(value)
                self._storages[_storage(value)] = f"r[{self._results + len(self.scratch) - 1}]"
            offset = value.storage_offset() * value.element_size()
            return self._storages[_storage(value)] + (f" + {offset}" if offset else "")
        if isinstance(value, Number):
            return self._numbers[id(value)]
        if value is None or type(value) in (int, bool):
            return repr(value)
        name, base = f"k{len(self._constants)}", getattr(value, "base", None)
        descriptor = isinstance(base, torch.Tensor)
        self._constants[name] = _descriptor_like(value) if descriptor else value
        return f"{name}({self._text(base)})" if descriptor else name


class _Address(int):
    """An address that Triton's launcher takes in place of a tensor."""

    def data_ptr(self) -> int:
        return self


def _descriptor_like(described: Any) -> Callable[[int], Any]:
    """Address -> a TMA descriptor of a tensor there, otherwise like this one. The function holds no tensor."""
    template = copy.copy(described)
    template.base = None

    def descriptor(address: int) -> Any:
        new = copy.copy(template)
        new.base = _Address(address)
        return new

    return descriptor


def _storage(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def layout(t: torch.Tensor) -> Layout:
    """Shape and strides, to make another like it."""
    return tuple(t.shape), t.stride()


#: Compiled kernels by everything that the JIT specializes on: its own lookup takes longer than a short kernel.
_compiled: dict[Key, Any] = {}


def with_compiled(key: Key, launch: Callable[[Any], Any]) -> Any:
    """launch(compiled kernel of this key; None the first time): bypasses the JIT for calls without a signature."""
    before = _compiled.get(key)
    kernel = launch(before)
    if before is None and not compiling.active():
        if len(_compiled) >= _CAPACITY:
            _compiled.clear()
        _compiled[key] = kernel
    return kernel

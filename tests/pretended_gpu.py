"""A CPU that stands in for a GPU: eager calls run up to their launches, and no kernel is compiled or run."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from halfbyte import KVCache, ops
from halfbyte.device import H200
from halfbyte.ops import _fused, _library, _linear_on_gpu, launch_cache
from halfbyte.ops import append as append_op
from halfbyte.ops import decode_attention as attention_op
from halfbyte.ops import experts_linear as experts_op
from halfbyte.ops import experts_mlp as mlp_op
from halfbyte.ops import linear as linear_op
from halfbyte.ops import unpack_pages as unpack_op
from halfbyte.ops.compiling import active
from halfbyte.plans import plan as level_plan
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.settings import runs_torch_code

#: Where portable kernels are launched.
PORTABLE: dict[Any, str] = {attention_op: "_launch_portable", _linear_on_gpu: "_run_portable"}


class Launches(dict[Any, Any]):
    """A launch cache that records the results of replays."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __setitem__(self, key: Any, entry: Any) -> None:
        launch, formats = entry
        super().__setitem__(key, (lambda *args: self.results.append(launch(*args)) or self.results[-1], formats))


def watch_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """An empty launch cache from now on, to look into."""
    launches = Launches()
    monkeypatch.setattr(launch_cache, "_launches", launches)
    monkeypatch.setattr(launch_cache, "_compiled", {})
    return launches


def forget_launches() -> None:
    """From now on every call is the first of its signature."""
    launch_cache._launches.clear()
    launch_cache._compiled.clear()


@dataclass
class Compiled:
    """A compiled kernel as Triton hands it out. `replayed`: arguments of `run`; `hooked`: of launches that call hooks."""

    replayed: list[tuple[Any, ...]] = field(default_factory=list)
    hooked: list[tuple[Any, ...]] = field(default_factory=list)
    function: int = 11
    packed_metadata: tuple[int, ...] = (4, 1, 100)

    def run(self, *args: Any) -> None:
        self.replayed.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, stream=None: self.hooked.append((grid, stream, args))


@dataclass
class Gpu:
    """The launches of an H200. `first`: arguments and grids of those that passed every check, a plan and the JIT."""

    kernel: Compiled = field(default_factory=Compiled)
    first: list[tuple[Any, Any]] = field(default_factory=list)
    floats: torch.Tensor = field(default_factory=lambda: torch.zeros(1 << 18))
    counters: torch.Tensor = field(default_factory=lambda: torch.zeros(1 << 12, dtype=torch.int32))
    recording: bool = False

    @property
    def replayed(self) -> list[tuple[Any, ...]]:
        return self.kernel.replayed

    @property
    def unreplayed(self) -> int:
        """Launches that the launch cache did not make, or made by way of hooks."""
        return len(self.first) + len(self.kernel.hooked)

    def shared(self, device: torch.device, floats: int, counters: int) -> Any:
        if not floats:
            return 7, ()
        assert floats <= self.floats.numel()
        assert counters <= self.counters.numel()
        return None if self.recording else (7, (self.floats, self.counters))

    def jit(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
        constants = [kwargs[name] for name in ("C", "BLOCK") if name in kwargs]
        self.first.append(((*args, *constants), (*grid, 1, 1)[:3]))
        return self.kernel


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Tensors of the CPU say that they are on a GPU from now on, whose launches are written down."""
    from triton.runtime.jit import JITFunction  # which the GPU's tests, run in small, do without

    gpu = Gpu()

    def plan(problem: GemmProblem, device: Any, use_pdl: bool) -> Any:
        return tuned_gemm(problem, H200, use_pdl)

    watch_launches(monkeypatch)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: gpu.jit(kernel, *args, **kwargs))
    for module, portable in PORTABLE.items():
        monkeypatch.setattr(module, portable, lambda *_: gpu.first.append(((), ())))
    for name, value in (("shared", gpu.shared), ("floats", lambda *_: gpu.floats), ("counters", lambda *_: gpu.counters)):
        monkeypatch.setattr(launch_cache, name, value)
    monkeypatch.setattr(_linear_on_gpu, "_plan", plan)
    monkeypatch.setattr(experts_op, "gpu", lambda index: H200)
    for op in (attention_op, linear_op, mlp_op):
        monkeypatch.setattr(op, "kernel_level", lambda op, impl, x, name="x": impl)
    for op in (append_op, unpack_op):
        monkeypatch.setattr(op, "level", lambda op, impl, device: "triton")
    monkeypatch.setattr(_library, "_supports_pdl", lambda device: True)
    monkeypatch.setattr(_fused, "cpu_has_bf16", lambda: False)  # torch's own kernel of a CPU would take prompts
    monkeypatch.setattr(KVCache, "_capturing", lambda self: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # which is the index of a CPU's tensors
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.device.type == "cpu"))
    return gpu


@dataclass
class Variants:
    """What the JIT would compile, by its own key."""

    keys: set[tuple[str, str, str]] = field(default_factory=set)
    binders: dict[Any, Any] = field(default_factory=dict)

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        if kernel not in self.binders:
            backend = make_backend(GPUTarget("cuda", 90, 32))
            self.binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, rest = self.binders[kernel](*args, **options)
        self.keys.add((kernel.__name__, str(specialization), str(rest)))
        return Compiled()


def pretend_compiler(monkeypatch: pytest.MonkeyPatch) -> Variants:
    """`pretend_gpu` of an H200 whose JIT writes down what it would compile, of ops, and of portable kernels too."""
    from triton.runtime.jit import JITFunction

    portable = {module: getattr(module, name) for module, name in PORTABLE.items()}
    pretend_gpu(monkeypatch)
    for module, name in PORTABLE.items():
        monkeypatch.setattr(module, name, portable[module])
    for name, dtype in (("floats", torch.float32), ("counters", torch.int32)):
        monkeypatch.setattr(launch_cache, name, lambda _, size, own=False, dtype=dtype: torch.zeros(size, dtype=dtype))
    monkeypatch.setattr(launch_cache, "shared", lambda *_: None)  # nothing is replayed
    recorded = Variants()
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: recorded.run(kernel, *args, **options))
    _in_every_op(monkeypatch, gpu=lambda index: H200)
    monkeypatch.setattr(attention_op, "_index", lambda q: 0)
    return recorded


def _in_every_op(monkeypatch: pytest.MonkeyPatch, **replacements: Any) -> None:
    """Wherever a module of an op has a function of one of these names."""
    modules = [importlib.import_module(info.name) for info in pkgutil.iter_modules(ops.__path__, "halfbyte.ops.")]
    for module in modules:
        for name in () if module is _library else replacements.keys() & vars(module).keys():
            if callable(getattr(module, name)):
                monkeypatch.setattr(module, name, replacements[name])


def pretend_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op takes the level that it has on a GPU, but in `torch_code`; torch's fused attention is there, and nothing waits."""
    from halfbyte.kernels.block import route as route_kernel  # which imports Triton

    own = _library.level

    def level(op: str, impl: str, device: torch.device) -> str:
        return own(op, impl, device) if runs_torch_code() else level_plan(op, impl, "cuda").level

    def kernel_level(op: str, impl: str, x: torch.Tensor, name: str = "x") -> str:
        best = level(op, impl, x.device)
        return "auto" if impl == "auto" and best == "gluon" else best

    _in_every_op(monkeypatch, level=level, kernel_level=kernel_level, pairs_launches=lambda device: True)

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: Any) -> Any:
        out = q.new_zeros(*q.shape[:3], v.shape[-1])
        return (out, q.new_zeros(q.shape[:3], dtype=torch.float32)) if _fused._suits(q, k, v, o) else None

    own_route = route_kernel.launch

    def route(call: Any, ids: torch.Tensor, *args: Any) -> None:
        own_route(call, ids, *args)
        if not active():  # a launch would have run: its ids are experts
            ids.zero_()

    monkeypatch.setattr(route_kernel, "launch", route)
    monkeypatch.setattr(_fused, "causal", causal)
    monkeypatch.setattr(_linear_on_gpu, "at_hand", lambda *_: True)
    monkeypatch.setattr("halfbyte.cache.prepare", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@contextmanager
def cuda_tensors(are: bool) -> Iterator[None]:
    """What tensors say of themselves for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", are)
        yield

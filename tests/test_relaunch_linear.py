"""Products that are launched like an earlier one: what makes them alike, and that no other call is taken for one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from halfbyte import WEIGHT_FORMATS, QuantTensor, linear, qkv_projection
from halfbyte.errors import InvalidArgument
from halfbyte.ops import _launch_cache, _linear_on_gpu
from halfbyte.ops import linear as public
from halfbyte.ops._linear_call import LinearCall
from halfbyte.plans.linear_wgmma import tuned_linear
from halfbyte.tensors import expected_parts
from relaunching import ENVIRONMENT, WAYS, Compiled, Gpu, Watched, misaligned, watch_launches

Change = Callable[["Asked"], "Asked"]


def weight(fmt: str, n: int = 64, k: int = 1024) -> QuantTensor:
    """Any numbers, at addresses of their own."""
    parts = expected_parts(WEIGHT_FORMATS[fmt], (n, k))
    return QuantTensor(WEIGHT_FORMATS[fmt], (n, k), **{name: torch.zeros(*of, dtype=d) for name, (of, d) in parts.items()})


@dataclass(frozen=True)
class Asked:
    """Everything that a request is made of."""

    x: torch.Tensor
    weights: tuple[QuantTensor, ...]
    biases: tuple[torch.Tensor | None, ...]
    row_invariant: bool = False
    impl: str = "auto"

    def signature(self) -> _launch_cache.Signature | None:
        return LinearCall(self.x, self.weights, self.biases, self.impl, self.row_invariant).signature()

    @property
    def key(self) -> Any:
        found = self.signature()
        assert found is not None
        return found.key


def full() -> Asked:
    """A call with every tensor that a tuned kernel takes."""
    weights = weight("int4_g64"), weight("nvfp4"), weight("nf4")
    return Asked(torch.zeros(4, 1024).bfloat16(), weights, tuple(torch.zeros(64).bfloat16() for _ in weights))


def patched(t: QuantTensor, **parts: Any) -> QuantTensor:
    """With other parts, unchecked."""
    made = object.__new__(QuantTensor)
    made.__dict__.update({**{f.name: getattr(t, f.name) for f in fields(QuantTensor)}, **parts})
    return made


def part(number: int, name: str, change: Callable[[Any], Any]) -> Change:
    """One tensor of the call changed: x (number -1), a bias, or a part of a weight."""

    def changed(asked: Asked) -> Asked:
        if number < 0:
            return replace(asked, x=change(asked.x))
        if name == "bias":
            found = list(asked.biases)
            found[number] = change(found[number])
            return replace(asked, biases=tuple(found))
        weights = list(asked.weights)
        weights[number] = patched(weights[number], **{name: change(getattr(weights[number], name))})
        return replace(asked, weights=tuple(weights))

    return changed


TENSORS = [
    (-1, "x"),
    *((0, name) for name in ("codes", "scales", "offsets", "bias")),
    *((1, name) for name in ("codes", "scales", "tensor_scale")),
    *((2, name) for name in ("codes", "scales", "bias")),
]
CHANGES: dict[str, Change] = {
    **{f"{name} of {number}: {way}": part(number, name, WAYS[way]) for number, name in TENSORS for way in WAYS},
    **{f"no {name} of {n}": part(n, name, lambda _: None) for n, name in TENSORS if name in ("offsets", "bias", "tensor_scale")},
    "another format": part(2, "format", lambda _: WEIGHT_FORMATS["fp4_bnb"]),
    "a format of the same name": part(0, "format", lambda fmt: replace(fmt)),
    "two weights swapped": lambda a: replace(a, weights=(a.weights[1], a.weights[0], a.weights[2])),
    "impl": lambda a: replace(a, impl="gluon"),
}


def test_other_addresses_are_the_same_call() -> None:
    first, second = full(), full()
    assert first.key == second.key
    assert hash(first.key) == hash(second.key)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_fact_makes_another_call(change: Change) -> None:
    asked = full()
    assert change(asked).key != asked.key


@pytest.mark.parametrize(("variable", "value"), ENVIRONMENT)
def test_the_environment_makes_another_call(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = full()
    monkeypatch.delenv(variable, raising=False)
    before = asked.key
    monkeypatch.setenv(variable, value)
    assert asked.key != before


@pytest.mark.parametrize(
    "change",
    [
        lambda a: replace(a, row_invariant=True),
        lambda a: replace(a, impl="triton"),
        lambda a: replace(a, impl=["auto"]),
        lambda a: replace(a, biases=a.biases[:2]),
        lambda a: replace(a, weights=(a.weights[0], {}, a.weights[2])),
        part(0, "perm", lambda _: torch.arange(1024).int()),
        part(2, "nested", lambda _: torch.zeros(3)),
        part(0, "bias", lambda _: [0.0] * 64),
        *(part(number, name, lambda t: t.as_subclass(Watched)) for number, name in TENSORS),
    ],
)
def test_what_is_never_like_another(change: Change) -> None:
    assert change(full()).signature() is None


# ------------------------------------------------------------------------------------------------------------- launches


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """An H200, as far as plans go."""
    made = Gpu(Compiled())

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
        constants = [kwargs[name] for name in ("C", "BLOCK") if name in kwargs]
        made.first.append(((*args, *constants), (*grid, 1, 1)[:3]))
        return made.kernel

    def plan(weights: Any, m: int, width: int, dtype: str, device: Any, use_pdl: bool) -> Any:
        return tuned_linear(weights, m=m, width=width, dtype=dtype, use_pdl=use_pdl, num_sms=132, capability=(9, 0))

    monkeypatch.setattr(JITFunction, "run", run)
    watch_launches(monkeypatch)
    monkeypatch.setattr(_launch_cache, "_compiled", {})
    monkeypatch.setattr(_linear_on_gpu, "shared", made.shared)
    monkeypatch.setattr(_linear_on_gpu, "_plan", plan)
    monkeypatch.setattr(_linear_on_gpu, "_run_portable", lambda *_: None)
    monkeypatch.setattr(public, "_level", lambda op, impl, x: impl)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # which is the index of a CPU's tensors
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.device.type == "cpu"))
    return made


def addresses(arguments: Any) -> Any:
    """Tensors as their addresses, in tuples, too."""
    if isinstance(arguments, torch.Tensor):
        return arguments.data_ptr()
    return tuple(map(addresses, arguments)) if isinstance(arguments, tuple | list) else arguments


def forget() -> None:
    _launch_cache._launches.clear()
    _launch_cache._compiled.clear()


CALLS: dict[str, tuple[str, tuple[int, ...], bool]] = {
    "one row": ("int4_sym_g128", (1, 1024), False),
    "a batch of rows, zero points and a bias": ("int4_g64", (2, 4, 1024), True),
    "a tensor scale": ("nvfp4", (16, 1024), False),
    "warp groups": ("int4_sym_g128", (2, 20, 1024), True),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("fmt", "shape", "biased"), CALLS.values(), ids=CALLS.keys())
def test_the_same_arguments_at_other_addresses(fmt: str, shape: tuple[int, ...], biased: bool, fused: bool, gpu: Gpu) -> None:
    """Another layer with another x: launched as the long way would have launched it."""

    def call() -> tuple[Any, Any]:
        x, sizes = torch.randn(shape).bfloat16(), (96, 32, 32) if fused else (96,)
        weights = tuple(weight(fmt, n) for n in sizes)
        biases = tuple(torch.zeros(n).bfloat16() if biased else None for n in sizes)
        return (x, weights, biases), lambda: qkv_projection(x, weights, biases) if fused else (linear(x, weights[0], biases[0]),)

    call()[1]()
    launches = len(gpu.first)
    assert launches == (2 if shape[-2] == 20 else 1)
    kept, run = call()
    outs = run()
    assert len(gpu.first) == len(gpu.kernel.launched) == launches
    forget()
    run()
    for (expected, grid), launched in zip(gpu.first[launches:], gpu.kernel.launched, strict=True):
        assert launched[:9] == (*grid, 7, 11, (4, 1, 100), None, None, None)
        got, wanted = launched[9:], addresses(expected)
        assert [a for i, a in enumerate(got) if i not in made_anew(got)] == [
            a for i, a in enumerate(wanted) if i not in made_anew(got)
        ]
        assert len(got) == len(wanted)
    gemm = gpu.kernel.launched[-1][9:]
    (at,) = made_anew(gemm) & {i for i, a in enumerate(gemm) if isinstance(a, tuple)}
    (*tensors, out_addresses, features), expected = gemm[at], addresses(gpu.first[-1][0][at])
    assert (*tensors, features) == (*expected[:5], expected[6])
    assert out_addresses == tuple(out.data_ptr() for out in outs)
    assert gemm[1:3] == (gpu.floats.data_ptr(), gpu.counters.data_ptr())
    for out, w in zip(outs, kept[1], strict=True):
        assert out.shape == (*shape[:-1], w.shape[0])
        assert out.dtype is torch.bfloat16
        assert out.is_contiguous()


def made_anew(arguments: Sequence[Any]) -> set[int]:
    """Positions of what a launch makes itself.

    y of `order`; of a GEMM partials, semaphores and, among the tensors of its weights, y, and x where `order` made it.
    """
    if not any(isinstance(a, tuple) for a in arguments):
        return {1}
    return {1, 2, 6} if len(arguments) > 7 else {0, 1, 2, 5}


def test_what_was_converted_on_the_way_is_not_remembered(gpu: Gpu) -> None:
    w = weight("int4_g64"), weight("int4_g64"), weight("int4_g64")
    biases = torch.zeros(64).bfloat16(), None, torch.zeros(64).bfloat16()
    for _ in range(2):
        linear(torch.zeros(1024, 4).bfloat16().T, w[0])
        linear(misaligned(torch.zeros(4, 1024).bfloat16()), w[0])
        qkv_projection(torch.zeros(4, 1024).bfloat16(), w, biases)
        linear(torch.zeros(4, 1024).bfloat16(), w[0], torch.zeros(128).bfloat16()[::2])
    assert not _launch_cache._launches


def test_what_other_kernels_compute_is_not_remembered(gpu: Gpu) -> None:
    mixed = weight("int4_g64"), weight("nf4"), weight("int4_g64")
    for _ in range(2):
        qkv_projection(torch.zeros(4, 1024).bfloat16(), mixed)
        linear(torch.zeros(4, 1024).bfloat16(), mixed[0], row_invariant=True)
    assert not _launch_cache._launches
    assert not gpu.kernel.launched


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "x of another width": (lambda: {"x": torch.zeros(4, 512).bfloat16()}, "x has shape"),
    "x of integers": (lambda: {"x": torch.zeros(4, 1024).to(torch.int16)}, "x is"),
    "x a list": (lambda: {"x": [1.0]}, "x is a list"),
    "no weight": (lambda: {"weight": torch.zeros(64, 1024)}, "weight is Tensor"),
    "a bias too long": (lambda: {"bias": torch.zeros(65).bfloat16()}, "bias has shape"),
    "a bias of integers": (lambda: {"bias": torch.zeros(64).int()}, "bias is"),
    "a bias in a list": (lambda: {"bias": [0.0] * 64}, "bias is a list"),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD.keys())
def test_wrong_arguments_raise_after_a_right_call(bad: Callable[[], dict[str, Any]], message: str, gpu: Gpu) -> None:
    right: dict[str, Any] = {
        "x": torch.zeros(4, 1024).bfloat16(),
        "weight": weight("int4_g64"),
        "bias": torch.zeros(64).bfloat16(),
    }
    for _ in range(2):
        linear(**right)
    assert len(gpu.kernel.launched) == 1
    with pytest.raises(InvalidArgument, match=message):
        linear(**right | bad())
    assert len(gpu.kernel.launched) == 1


def test_while_a_graph_is_recorded_calls_take_the_long_way(gpu: Gpu) -> None:
    x, w = torch.zeros(4, 1024).bfloat16(), weight("int4_g64")
    linear(x, w)
    gpu.recording = True
    linear(x, w)
    assert len(gpu.kernel.hooked) == 1  # of what was compiled, but with everything looked at
    assert not gpu.kernel.launched
    gpu.recording = False
    linear(x, w)
    assert len(gpu.kernel.launched) == 1


def test_another_device_is_made_the_current_one(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.zeros(4, 1024).bfloat16(), weight("int4_g64")
    linear(x, w)
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "device_of", lambda t: asked.append(t) or nullcontext())
    linear(x, w)
    assert [t is x for t in asked] == [True]
    assert len(gpu.kernel.launched) == 1


def test_gradients_and_subclasses_take_the_long_way(gpu: Gpu) -> None:
    x, w, b = torch.zeros(4, 1024).bfloat16(), weight("int4_g64"), torch.zeros(64).bfloat16()
    linear(x, w, b)
    for number, (x_wanting, b_wanting) in enumerate(((x.clone().requires_grad_(), b), (x, torch.nn.Parameter(b))), 1):
        linear(x_wanting, w, b_wanting)
        assert len(gpu.kernel.launched) == number - 1
        with torch.no_grad():
            linear(x_wanting, w, b_wanting)
        assert len(gpu.kernel.launched) == number
    linear(x.as_subclass(Watched), w, b)
    assert len(gpu.kernel.launched) == 2


def test_compiled_code_does_not_look_for_earlier_calls(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.zeros(4, 1024).bfloat16(), weight("int4_g64")
    linear(x, w)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    linear(x, w)
    assert not gpu.kernel.launched
    assert not gpu.kernel.hooked
    assert len(gpu.first) == 2


def test_nothing_keeps_a_weight_alive(gpu: Gpu) -> None:
    x, w = torch.zeros(4, 1024).bfloat16(), weight("int4_g64")
    for _ in range(2):
        linear(x, w)
    codes = weakref.ref(w.codes)
    gpu.first.clear()
    del w
    gc.collect()
    assert codes() is None
    assert len(_launch_cache._launches) == 1

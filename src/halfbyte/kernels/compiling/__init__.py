"""Kernels compiled ahead of their first launch, on any machine: no GPU is needed.

A variant of a kernel is data, a `Configuration`. `build` turns one into what a GPU would load, and says what that costs: registers,
spills, shared memory, and whether it adds floating-point numbers atomically.

How: the JIT compiles a kernel from three things, the types of its arguments (`signature`), the values of its constexpr arguments,
and what it knows of the run-time ones (`attrs`: which pointers and integers are divisible by 16). At a launch it derives them from
what it is given. Here they are written down, or `recorded` lets the JIT derive them from a launch on tensors without memory and
stops there. Triton's wheel carries NVIDIA's assembler and `cuobjdump`, which reads the result.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from halfbyte.device import block_shared_memory

#: An argument: its name, or where it is, as (position,) or inside of a tuple as (position, position in the tuple).
Argument = str | tuple[int, ...]
#: Where a variant says that an argument is divisible by 16, as the run time does for aligned pointers and such integers.
Attributes = Mapping[Argument, list[list[Any]]]


@dataclass(frozen=True)
class Configuration:
    """One variant of a kernel that is shipped.

    name        unlike every other of its module; it is what reports and errors say
    kernel      the function that `triton.jit` or `gluon.jit` made
    signature   type of each run-time argument: "*fp16", "*u8", "i32", "fp32", a tuple of them; constexpr ones need not be listed
    constexprs  value of each constexpr argument. The run time makes one of every integer that is 1 and of None: list them here
    options     num_warps, num_stages, maxnreg: what a launch is given by keyword
    attrs       `divisible_by_16("q", "k_codes", ...)`, the arguments for which the run time finds it so
    targets     the architectures it is launched on: not sm_80 with programmatic dependent launch, say
    may_spill   why registers may spill to memory here; "" means that they must not
    """

    name: str
    kernel: Any
    signature: Mapping[str, Any]
    constexprs: Mapping[Any, Any]  # by Argument
    options: Mapping[str, Any] = field(default_factory=dict)
    attrs: Attributes = field(default_factory=dict)
    targets: tuple[int, ...] = (80, 90, 100)
    may_spill: str = ""


@dataclass(frozen=True)
class Target:
    """A GPU architecture."""

    capability: int

    @property
    def shared_limit(self) -> int:
        """The most bytes of shared memory that one block can allocate."""
        return block_shared_memory(divmod(self.capability, 10))

    @property
    def name(self) -> str:
        """As the assembler calls it."""
        return f"sm_{self.capability}"


#: What tuned kernels are compiled for, each with the plans of its own: Ampere, Ada, Hopper and Blackwell, large and small (8.6, 8.9
#: and 12.0, SMs with 100 KB of shared memory). Portable kernels, for the large ones.
CAPABILITIES = ((8, 0), (9, 0), (10, 0), (8, 6), (8, 9), (12, 0))
TARGETS = tuple(Target(10 * major + minor) for major, minor in CAPABILITIES)


def of_capability(capability: tuple[int, int]) -> str:
    """How a variant's name ends that only GPUs of one capability run."""
    major, minor = capability
    return f"{major}{minor or 'x'}"


@dataclass(frozen=True)
class Binary:
    """A compiled variant: what its machine code needs. Bytes are per thread for spills, per block for shared memory.

    float_atomics  the instructions, in PTX, that add (or compare) floating-point numbers in memory in no fixed order
    serialised     why the assembler lets asynchronous products wait for each other, in its words; Hopper only
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    float_atomics: tuple[str, ...]
    serialised: tuple[str, ...]
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)


def divisible_by_16(*arguments: str) -> dict[Argument, list[list[Any]]]:
    """`attrs` for these arguments. For a pointer it is the address in bytes; torch's own allocations are."""
    return {name: [["tt.divisibility", 16]] for name in arguments}


def build(configuration: Configuration, target: Target) -> Binary:
    """Compile one variant for one architecture. What the compiler raises comes out as it is."""
    made = compiled(configuration, target)
    cubin, ptx = made.asm["cubin"], made.asm["ptx"]
    registers, spilled = resource_usage(cubin)
    waits = serialised(ptx) if "wgmma.mma_async" in ptx else ()
    return Binary(registers, spilled, made.metadata.shared, float_atomics(ptx), waits, cubin, ptx)


def compiled(configuration: Configuration, target: Target) -> Any:
    """What Triton makes of one variant: `asm`, texts and machine code by stage, and `metadata`."""
    import triton
    from triton.backends.compiler import GPUTarget

    gpu = GPUTarget("cuda", target.capability, 32)
    return triton.compile(source(configuration), target=gpu, options=dict(configuration.options))


def source(configuration: Configuration) -> Any:
    """What the compiler is given: the kernel and everything that is fixed about its arguments."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = configuration.kernel
    check_arguments(configuration, kernel.arg_names)
    constants = {name for name in configuration.constexprs if isinstance(name, str)}
    signature = {name: "constexpr" if name in constants else configuration.signature[name] for name in kernel.arg_names}
    constexprs, attrs = (
        {(kernel.arg_names.index(name),) if isinstance(name, str) else name: found for name, found in given.items()}
        for given in (configuration.constexprs, configuration.attrs)
    )
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return source(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)


def check_arguments(configuration: Configuration, arguments: Iterable[str]) -> None:
    """Every argument of the kernel must be described, and nothing else: the compiler's own message for it is a KeyError."""
    wanted, name = set(arguments), configuration.name
    given = {*configuration.signature, *(found for found in configuration.constexprs if isinstance(found, str))}
    if missing := sorted(wanted - given):
        raise ValueError(f"configuration {name}: arguments without a type or a value: {', '.join(missing)}")
    if unknown := sorted((given | {found for found in configuration.attrs if isinstance(found, str)}) - wanted):
        raise ValueError(f"configuration {name}: the kernel has no arguments called {', '.join(unknown)}")


def recorded(name: str, launch: Callable[[], object], **more: Any) -> list[Configuration]:
    """What `launch` would have compiled: one configuration for each kernel that it launches, none of which runs.

    Called with tensors on the meta device, which have types and strides but no memory (and count as aligned). The JIT's own code
    derives the rest, so a configuration cannot drift from what is launched. `more`: further fields of the configurations.
    """
    from triton.runtime.jit import JITFunction

    found: list[Configuration] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(specialised(f"{name} {kernel.__name__}", kernel, args, kwargs, more))

    with mock.patch.object(JITFunction, "run", record):
        launch()
    return found


def specialised(name: str, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], more: dict[str, Any]) -> Configuration:
    """One launch as the JIT specialises it. The same for every architecture."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    bound, specialization, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(*args, **kwargs)
    _, signature, constexprs, attrs = kernel._pack_args(backend, kwargs, bound, specialization, None)
    options = {key: value for key, value in kwargs.items() if key not in kernel.arg_names}
    return Configuration(name, kernel, signature, constexprs, options, attrs, **more)


def empty(*shape: int, dtype: Any = None) -> Any:
    """A tensor without memory, int32 unless said otherwise: enough to compile a launch."""
    import torch

    return torch.empty(shape, dtype=dtype or torch.int32, device="meta")


def half_type(name: str) -> Any:
    """The dtype of "fp16" or "bf16"."""
    import torch

    return torch.float16 if name == "fp16" else torch.bfloat16


def kv_buffer(fmt: Any, shape: tuple[int, ...], batch: int, dtype: Any, window: tuple[int, int] = (0, 0)) -> Any:
    """A KV buffer [B or pages, H, T, D] without memory; `batch` and `dtype` are those of a tail. `window`: sink, recent tokens."""
    import torch

    from halfbyte.kv_buffer import KVBuffer

    scaled, rows = fmt.scale is not None, fmt.token_block or sum(window)
    return KVBuffer(
        fmt,
        empty(*fmt.codes_shape(shape), dtype=fmt.storage),
        empty(*fmt.scale_shape(shape), dtype=torch.float16) if scaled else None,
        empty(*fmt.scale_shape(shape), dtype=torch.float16) if fmt.offset_dtype is not None else None,
        empty(batch, shape[1], rows, shape[3], dtype=dtype) if rows else None,
        empty(1, dtype=torch.int64) if fmt.granularity == "tensor" else None,
        sink_tokens=window[0],
    )


def empty_weight(fmt: Any, shape: tuple[int, ...], act_order: bool = False) -> Any:
    """A weight, or a stack, without memory."""
    from halfbyte.tensors import QuantTensor, expected_parts

    parts = expected_parts(fmt, shape, act_order=act_order)
    return QuantTensor(fmt, shape, **{name: empty(*size, dtype=dtype) for name, (size, dtype) in parts.items()})


def operands(p: Any, has_bias: bool = False) -> tuple[Any, Any]:
    """x and weights of a `GemmProblem`, without memory."""
    from halfbyte.kernels.linear.ring import weights_of

    dtype = half_type(p.half)
    weights = weights_of(
        [empty_weight(fmt, (n, p.width)) for fmt, n in p.weights],
        [empty(n, dtype=dtype) if has_bias else None for n in p.features],
        [empty(p.rows, n, dtype=dtype) for n in p.features],
    )
    return empty(p.rows, p.width, dtype=dtype), weights


def gemm_launches(p: Any, plan: Any, has_bias: bool = False) -> list[Any]:
    """The launches of a `GemmPlan` without routing."""
    import torch

    from halfbyte.kernels.linear import kernel_of

    launches: list[Any] = kernel_of(plan).launches(*operands(p, has_bias), plan, empty(1, dtype=torch.float32), empty(1))
    return launches


def attention_launches(call: Any, plan: Any) -> list[Any]:
    """The launches of a `DecodePlan`."""
    import torch

    from halfbyte.kernels.decode.launch import launches

    results = (empty(*call.q.shape[:3], call.values.dim, dtype=call.q.dtype), empty(*call.q.shape[:3], dtype=torch.float32))
    return launches(call, plan, results, (empty(plan.floats, dtype=torch.float32), empty(plan.counters)))


def float_atomics(ptx: str) -> tuple[str, ...]:
    """Instructions that reduce floating-point numbers in memory: their order, and so the last bits, differ from run to run.

    Atomics on integers (counters) are fine, `redux` works on registers in a fixed order, and both are left out.
    """
    found = re.findall(r"^[^/\n]*?\b((?:atom|red|multimem\.red|cp\.reduce)\.[\w.:]+)", ptx, re.MULTILINE)
    floating = re.compile(r"\.(?:f16|bf16|f32|f64|f16x2|bf16x2)\b")
    return tuple(sorted({name for name in found if floating.search(name)}))


def serialised(ptx: str) -> tuple[str, ...]:
    """What the assembler says of asynchronous products (`wgmma`) that it makes wait where the source does not; () if nothing.

    Such a kernel is right and slow, and nothing else tells: Triton does not pass these messages on.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [get_ptxas(90).path, "-arch=sm_90a", "-v", file, "-o", Path(folder) / "kernel.cubin"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return tuple(sorted(set(re.findall(r"\(C75\d\d\).*?(?=\n|$)", text))))


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes that a thread keeps in memory instead) of a kernel's machine code.

    The stack and local memory are where registers spill to. Functions that are not inlined count with the kernel. The shared memory
    printed here is not what a block allocates: that is decided at the launch, and Hopper's driver adds 1 KB of its own.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    used = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if not used:
        raise RuntimeError(f"{tool.name} of Triton {triton.__version__} printed no resource usage:\n{text}")
    return max(int(registers) for registers, _, _ in used), sum(int(stack) + int(local) for _, stack, local in used)

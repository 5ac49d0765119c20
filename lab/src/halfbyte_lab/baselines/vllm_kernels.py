"""vLLM's Triton kernels over its own pages: 16 bits, int8_per_token_head and int4_per_token_head.

They are an installed vLLM's, or files of one, read where they lie: `VLLM_SOURCES` names the folder of the package `vllm`, of which
`FILES` are enough. What these import of vLLM are then the stand-ins below. Without vLLM's CUDA extension its Hadamard transform is
a Triton kernel, too. Run with files of vLLM 0.32.
"""

from __future__ import annotations

import enum
import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte_lab.cases.engine_step import Pair, Step

#: Where the kernels are in the package, in the order in which they import each other.
_OPS = "vllm.v1.attention.ops"
FILES = ("triton_attention_helpers", "triton_unified_attention", "int4_per_token_head", "triton_reshape_and_cache_flash")
#: As vLLM's TritonAttention launches a decode step: so many parts of a sequence, up to a number of programs without parts.
_PARTS, _PROGRAMS = 16, 128
#: Format of our records -> vLLM's name, bytes a token and head of vectors of D, dtype of the pages (None: that of keys).
MODES: dict[str, tuple[str, Callable[[int], int], torch.dtype | None]] = {
    "bf16": ("NONE", lambda dim: 4 * dim, None),
    "int8": ("INT8_PER_TOKEN_HEAD", lambda dim: 2 * (dim + 4), torch.int8),
    "int4": ("INT4_PER_TOKEN_HEAD", lambda dim: 2 * (dim // 2 + 4), torch.uint8),
}


def missing() -> str:
    """Why the kernels cannot be had here; "" when they can."""
    if os.environ.get("VLLM_SOURCES") or find_spec("vllm"):
        return ""
    return "vLLM is not installed, and VLLM_SOURCES names no folder of its package"


def kernels() -> Any:
    """The functions that launch them, by name. Raises `InvalidArgument` for a folder without them."""
    if folder := os.environ.get("VLLM_SOURCES"):
        _load(Path(folder))
    modules = [importlib.import_module(f"{_OPS}.{file}") for file in FILES]
    modes = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
    return SimpleNamespace(
        attend=modules[1].unified_attention,
        append=modules[3].triton_reshape_and_cache_flash_per_token_head_quant,
        append_16_bits=modules[3].triton_reshape_and_cache_flash,
        rotate=modules[2].single_rht,
        modes=modes,
    )


def _load(folder: Path) -> None:
    """The files as the modules that they are in vLLM, among stand-ins."""
    if f"{_OPS}.{FILES[-1]}" in sys.modules:
        return
    paths = {file: folder / "v1" / "attention" / "ops" / f"{file}.py" for file in FILES}
    if absent := [str(path) for path in paths.values() if not path.is_file()]:
        raise InvalidArgument(f"VLLM_SOURCES={str(folder)!r} lacks {', '.join(absent)}; expected the folder of the package vllm")
    for name, content in _stand_ins().items():
        parents = name.split(".")
        for i in range(1, len(parents) + 1):
            module = sys.modules.setdefault(".".join(parents[:i]), ModuleType(".".join(parents[:i])))
            module.__path__ = []
        vars(module).update(content)
    for file, path in paths.items():
        spec = spec_from_file_location(f"{_OPS}.{file}", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def _stand_ins() -> dict[str, dict[str, Any]]:
    """What the files import of vLLM: module -> its names."""
    import triton
    import triton.language as tl

    def capability() -> tuple[int, int]:
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)

    fp8 = torch.float8_e4m3fn
    platform = SimpleNamespace(
        fp8_dtype=lambda: fp8,
        is_cuda=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        has_device_capability=lambda wanted: capability() >= divmod(wanted, 10),
        is_device_capability_family=lambda wanted: capability()[0] == wanted // 10,
    )
    names = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD")
    modes = enum.IntEnum("KVQuantMode", {name: i for i, name in enumerate(names)})  # type: ignore[misc]
    limits = (torch.finfo(fp8).min, torch.finfo(fp8).max)
    quantized = {"is_quantized_kv_cache": lambda name: name not in ("auto", "bfloat16")}
    return {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.utils.math_utils": {"largest_power_of_2_divisor": lambda n: n & -n},
        "vllm.utils.torch_utils": quantized,  # up to 0.32
        "vllm.model_executor.layers.quantization.utils.quant_utils": {"FP8_DTYPE": fp8, "get_fp8_min_max": lambda: limits},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": modes, **quantized},
        _OPS: {},
    }


class VllmCache:
    """vLLM's pages of one layer, [pages, N, H, content], content being keys, their scale, values, their scale."""

    implementation = "vllm"

    def __init__(self, step: Step, formats: str, memory: torch.Tensor | None = None) -> None:
        if formats not in MODES:
            raise Unsupported(f"formats={formats!r}; vLLM's kernels are compared in {', '.join(MODES)}")
        mode, content, dtype = MODES[formats]
        (_, heads, dim), nbytes = step.k.shape, content(step.k.shape[2])
        shape = (step.pages, step.requests.page, heads, nbytes)
        self.step, self.formats, self.ops = step, formats, kernels()
        self.memory = torch.zeros(shape, dtype=torch.uint8, device=step.k.device) if memory is None else memory
        self.nbytes = sum(step.requests.lengths) * heads * nbytes
        self.mode = self.ops.modes[mode]
        view = self.memory.view(dtype or step.k.dtype)
        self.keys, self.values = view.split(view.shape[-1] // 2, -1)
        self.scales: Pair | tuple[None, None] = (None, None)
        if formats != "bf16":
            k_scales, v_scales = self.memory.view(torch.float32).split(nbytes // 8, -1)
            self.scales = k_scales[..., -1], v_scales[..., -1]
        rows, q_heads = _PROGRAMS // heads, step.q.shape[1]
        sizes = (rows, q_heads, _PARTS)
        self.partial = [torch.empty(*size, device=step.k.device) for size in ((*sizes, dim), sizes, sizes)]
        self.one = torch.ones((), device=step.k.device)

    def append(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        if self.formats == "bf16":
            self.ops.append_16_bits(k, v, self.keys, self.values, slots, "auto", self.one, self.one)
        else:
            self.ops.append(k, v, self.keys, self.values, *self.scales, slots, self.mode)

    def attend(self) -> torch.Tensor:
        step, out = self.step, torch.empty_like(self.step.q)
        k_scales, v_scales = self.scales
        self.ops.attend(
            step.q,
            self.keys,
            self.values,
            out,
            step.cu_seqlens_q,
            max(step.requests.queries),
            step.lengths,
            max(step.requests.lengths),
            step.q.shape[-1] ** -0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=step.page_table,
            softcap=0,
            q_descale=None,
            k_descale=self.one,
            v_descale=self.one,
            seq_threshold_3D=self.partial[0].shape[0],
            num_par_softmax_segments=_PARTS,
            softmax_segm_output=self.partial[0],
            softmax_segm_max=self.partial[1],
            softmax_segm_expsum=self.partial[2],
            kv_quant_mode=self.mode,
            k_scale_cache=k_scales,
            v_scale_cache=v_scales,
        )
        return out

    def held(self, request: int, length: int) -> Pair:
        pages = self.step.page_table[request, : -(-length // self.step.requests.page)].long()
        sides = zip((self.keys, self.values), self.scales, strict=True)
        k, v = (self._values(codes[pages], None if scales is None else scales[pages])[:length] for codes, scales in sides)
        return k.transpose(0, 1)[None], v.transpose(0, 1)[None]

    def _values(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Codes [pages, N, H, ...] as float64 [tokens, H, D]. INT4 keeps its zero point in the lowest bits of the scale."""
        dim = self.step.k.shape[-1]
        if scales is None:
            return codes.flatten(0, 1).double()
        if self.formats == "int8":
            return (codes[..., :dim].double() * scales.double()[..., None]).flatten(0, 1)
        codes, bits = codes[..., : dim // 2].int(), scales.contiguous().view(torch.int32)
        scale, zero = (bits & -16).view(torch.float32).double(), (bits & 15).double()
        numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).double()
        rotated: torch.Tensor = self.ops.rotate((numbers - zero[..., None]) * scale[..., None], inverse=True)
        return (rotated / dim).flatten(0, 1)

    def copied(self) -> VllmCache:
        return VllmCache(self.step, self.formats, self.memory.clone())

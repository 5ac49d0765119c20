"""Triton's own grouped GEMM of MXFP4 experts: `matmul_ogs` of its package `triton_kernels`.

It is installed, or a folder that `TRITON_KERNELS` names and that is read where it lies: python/triton_kernels/triton_kernels of
Triton's repository, or vllm/third_party/triton_kernels of a wheel of vLLM. Weights are in the layouts that it picks for the GPU,
and rows lie as its routing and its own first projection leave them. Written for the package of vLLM 0.32, which is Triton 3.5's.
With Triton 3.6 its routing gave indices out of bounds, so its reference in torch sorts the pairs, outside of the time.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from halfbyte.errors import InvalidArgument
from halfbyte.reference.experts import ExpertsCall

_PACKAGE = "triton_kernels"
#: What is imported of it.
MODULES = ("matmul_ogs", "matmul_ogs_details.opt_flags", "routing", "swiglu", "tensor", "tensor_details.layout")
#: The groups of scales that a step of its kernel reads in K: it masks none of them, and what lies behind the last may be NaN.
_GROUPS = 4


@dataclass(frozen=True)
class Way:
    """How it runs: warps, for which scales are laid out; parts of K, where None is its own choice."""

    warps: int = 8
    splits: int | None = None

    @property
    def name(self) -> str:
        """As records say it."""
        parts = [_PACKAGE, f"{self.warps} warps"] + ["no parts of K"] * (self.splits == 1)
        return ", ".join(parts)


#: Its defaults and what vLLM sets; the fastest counts.
WAYS = (Way(), Way(splits=1), Way(4), Way(4, 1))


def missing() -> str:
    """Why it cannot be had here; "" when it can."""
    if os.environ.get("TRITON_KERNELS") or find_spec(_PACKAGE):
        return ""
    return f"{_PACKAGE} is not installed, and TRITON_KERNELS names no folder of it"


def package() -> Any:
    """Its modules by the last part of their names. Raises `InvalidArgument` for a folder without them."""
    if (path := os.environ.get("TRITON_KERNELS")) and _PACKAGE not in sys.modules:
        folder = Path(path)
        files = [folder / f"{module.replace('.', '/')}.py" for module in MODULES]
        if absent := [str(file) for file in files if not file.is_file()]:
            raise InvalidArgument(
                f"TRITON_KERNELS={path!r} lacks {', '.join(absent)}; expected the folder of the package {_PACKAGE} of Triton 3.5"
            )
        spec = spec_from_file_location(_PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[_PACKAGE] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(f"{_PACKAGE}.{name}") for name in MODULES})


class Experts:
    """One projection: gate and up with the activation of gpt-oss, or down with the weighted sum. bf16 x, MXFP4 weight."""

    def __init__(self, call: ExpertsCall, copies: int) -> None:
        """`copies` of the weight in its layout, in memory of their own."""
        self.call, self.code = call, package()
        self.routing = self._route()
        data, gather, _ = self.routing
        self.rows = call.x if call.x.ndim == 2 else call.x.flatten(0, 1)[gather.src_indx.long()]
        self.bias = None if call.bias is None else call.bias.float()
        self.gates = None if call.gates is None else data.gate_scal
        self.activation = self._activation()
        weight = call.weight
        assert weight.scales is not None
        layout, options = self.code.layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        codes = self.code.tensor.wrap_torch_tensor(weight.codes.mT, dtype=self.code.tensor.FP4)
        self.codes = self._copies(self.code.tensor.convert_layout(codes, layout, **options), copies)
        groups = weight.scales.shape[-1]
        self.scales = F.pad(weight.scales, (0, -groups % _GROUPS)).mT

    def _route(self) -> Any:
        """What its routing makes of the ids, which it is given, and of logits whose softmax over them is the gates."""
        ids, gates, experts = self.call.ids, self.call.gates, self.call.weight.shape[0]
        logits = torch.zeros(len(ids), experts, device=ids.device)
        if gates is not None:
            logits.scatter_(1, ids, gates.float().log())
        return self.code.routing.routing_torch(logits, ids.shape[1], expt_indx=ids)

    def _activation(self) -> Any:
        if self.call.activation is None:
            return None
        kernels, (_, alpha, limit, _) = self.code.matmul_ogs, self.call.activation
        specs = kernels.FnSpecs("swiglu", self.code.swiglu.swiglu_fn, ("alpha", "limit"))
        return kernels.FusedActivation(specs, (alpha, limit), 2)

    def _copies(self, tensor: Any, count: int) -> list[Any]:
        def copied() -> Any:
            return replace(tensor, storage=self.code.tensor.Storage(tensor.storage.data.clone(), tensor.storage.layout))

        return [tensor, *(copied() for _ in range(count - 1))]

    def calls(self, way: Way) -> Sequence[Callable[[], torch.Tensor]]:
        """The rotation."""
        layout, options = self.code.layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=way.warps)
        scales = self.code.tensor.convert_layout(self.code.tensor.wrap_torch_tensor(self.scales), layout, **options)
        pairs = zip(self.codes, self._copies(scales, len(self.codes)), strict=True)
        return [partial(self._run, way, *pair) for pair in pairs]

    def _run(self, way: Way, codes: Any, scales: Any) -> torch.Tensor:
        kernels, flags = self.code.matmul_ogs, self.code.opt_flags
        data, gather, scatter = self.routing
        flags.reset_opt_flags_constraints()
        if way.splits:
            flags.update_opt_flags_constraints({"split_k": way.splits})
        out: torch.Tensor = kernels.matmul_ogs(
            self.rows,
            codes,
            self.bias,
            data,
            gather_indx=gather if self.call.x.ndim == 2 else None,
            scatter_indx=None if self.gates is None else scatter,
            precision_config=kernels.PrecisionConfig(weight_scale=scales),
            gammas=self.gates,
            fused_activation=self.activation,
        )
        return out

    def result(self, out: torch.Tensor) -> torch.Tensor:
        """What a call returned, as `experts_linear` orders it: without gates the rows come sorted by expert."""
        if self.gates is not None:
            return out
        _, gather, _ = self.routing
        return out[gather.dst_indx.long()].view(*self.call.ids.shape, -1)

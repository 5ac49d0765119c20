"""What vLLM asks the quantization method of every process, of which most, and all of engines without halfbyte, load no weights."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.utils.import_utils import resolve_obj_by_qualname

from halfbyte.checkpoints.adapters import OWN
from halfbyte.errors import Unsupported


class Registered(QuantizationConfig):  # type: ignore[misc]
    """`--quantization halfbyte`, without the imports of its layers."""

    @classmethod
    def get_name(cls) -> str:
        return OWN

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take another library's checkpoint where the user gave `--quantization halfbyte`."""
        return OWN if user_quant == OWN else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Registered:
        """The stored weights of `quantization_config` of config.json."""
        method: Registered = resolve_obj_by_qualname("halfbyte.vllm.weights.HalfbyteConfig").from_config(config)
        return method

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Refused: vLLM asks this class itself where config.json has no quantization_config."""
        raise Unsupported(
            "--quantization halfbyte: this model's config.json has no quantization_config; serve the folder that `halfbyte "
            "quantize MODEL -o FOLDER` writes, or leave --quantization out"
        )

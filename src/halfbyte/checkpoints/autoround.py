"""AutoRound's own export: the layout of GPTQ, with the way zero points are stored named by `packing_format`.

auto_round, auto_round:gptqmodel    zero points as they are, as in GPTQ v2
auto_round:auto_gptq                less 1, as in GPTQ v1; symmetric layers only
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfbyte.checkpoints.gptq import Gptq
from halfbyte.checkpoints.layer import only, setting

#: packing_format -> checkpoint_format of GPTQ.
PACKINGS = {"auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2", "auto_round:auto_gptq": "gptq"}


class AutoRound(Gptq):
    """4 bits, and symmetric 8 bits; layers may differ."""

    docs = (
        (
            "`auto-round`",
            "the same in AutoRound's own export; symmetric scales may be negative",
            "`int4_*`, `int4_sym_*`, `int8_*`",
        ),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        name = "an AutoRound checkpoint"
        only(config, "data_type", ("int",), "int", name)
        packing = only(config, "packing_format", tuple(PACKINGS), "auto_round:auto_gptq", name)
        other = setting(config, "extra_config", dict, {})
        super().__init__({**config, "checkpoint_format": PACKINGS[packing], "dynamic": other})

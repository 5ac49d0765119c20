"""AutoRound's own export: the layout of GPTQ, with the way zero points are stored named by `packing_format`.

auto_round, auto_round:gptqmodel    zero points as they are, as in GPTQ v2
auto_round:auto_gptq                less 1, as in GPTQ v1; symmetric layers only

`extra_config` has settings of single layers: {NAME or REGEX: {...}}; a name goes first, an expression is searched for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from halfbyte.checkpoints.gptq import Gptq
from halfbyte.checkpoints.layer import only, setting
from halfbyte.checkpoints.overrides import Overrides, expression, settings

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
        super().__init__({**config, "checkpoint_format": PACKINGS[packing]})
        names = {layer: settings(own, layer) for layer, own in setting(config, "extra_config", dict, {}).items()}
        rules = tuple((expression(rule), own) for rule, own in names.items() if re.search(r"[*+?^$()\[\]{}|\\]", rule))
        self.config, self.overrides = config, Overrides(names, rules) if names else None
        self.uniform = not names

"""One rank of `test_hf_parallel.py`: loads each folder shared out over the ranks, and says what came out, as JSON on one line.

Arguments: a port, the rank, the number of ranks, a file of expected logits by folder.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations import accelerate

import halfbyte.hf  # noqa: F401  (makes the quantization method known)
from halfbyte.errors import HalfbyteError
from halfbyte.nn import fuse_gate_up, fuse_qkv


def main(port: str, rank: str, ranks: str, file: str) -> None:
    """The largest difference to the expected logits per folder, apart and with all fused that can be; or the error."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank}
    accelerate.is_accelerate_available = lambda *a: True  # asked for by the loader, and then not used on a CPU
    dist.init_process_group("gloo")
    expected, found = torch.load(file), {}
    for folder, (ids, logits) in sorted(expected.items()):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=int(ranks))
            )
            with torch.no_grad():
                apart = (model(ids).logits - logits).abs().max().item()
                fused = fuse_qkv(model) + fuse_gate_up(model)
                together = model(ids).logits
                compiled = torch.equal(torch.compile(model, backend="eager")(ids).logits, together)
            off = (together - logits).abs().max().item()
            found[folder] = {"apart": apart, "fused": fused, "together": off, "compiled": compiled}
        except HalfbyteError as error:
            found[folder] = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT", json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

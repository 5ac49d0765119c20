"""One rank of `test_hf_parallel.py`: loads each folder shared out over the ranks, and says what came out, as JSON on one line.

Arguments: a port, the rank, the number of ranks, a file of prompts, expected logits and expected tokens by folder.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.generation.streamers import BaseStreamer
from transformers.integrations import accelerate

from halfbyte.errors import HalfbyteError
from halfbyte.hf import graph_generate
from halfbyte.hf.fused_blocks import fused_view
from halfbyte.hf.recorded_step import kept_steps
from halfbyte.nn import fuse_gate_up, fuse_qkv
from halfbyte.ops import all_reduce


class Streamed(BaseStreamer):
    """Counts what it is given."""

    count = 0

    def put(self, value: torch.Tensor) -> None:
        self.count += value.numel()

    def end(self) -> None:
        pass


def without_memory(rank: str) -> bool:
    """Whether all ranks do without inboxes, and none waits for another, where one has no memory for its own."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if rank == "1":
            raise RuntimeError("out of memory")
        return torch.empty(shape, dtype=dtype, device=device)

    with (
        mock.patch.object(_symmetric_memory, "empty", empty),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(multi_processor_count=1)),
    ):
        made, _ = all_reduce._exchange(64, 1, torch.device("cpu"))
    return made is None and all_reduce.of_all(f"after {rank}", torch.device("cpu")) == ["after 0", "after 1"]


def generated(model: Any, ids: torch.Tensor, words: torch.Tensor, rank: str) -> dict[str, Any]:
    """Whether every way to generate gives the words of one process, and what the ways say of themselves."""
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": words.shape[1] - ids.shape[1]}
    ours: dict[str, Any] = {"fuse_blocks": False}
    found: dict[str, Any] = {"described": fused_view(model) is not None}
    for name, options in {"plain": {"recorded": False}, "graph": ours, "again": ours, "fused": {}}.items():
        found[name] = torch.equal(model.generate(ids, **given, **options), words)
    hook = model.model.layers[0].register_forward_hook(lambda *_: None) if rank == "1" else None
    found["unfused"] = fused_view(model) is None  # all ranks, or none
    if hook is not None:
        hook.remove()
    found["without_memory"] = without_memory(rank)
    found["kept"] = len(kept_steps(model))
    streamer = Streamed() if rank == "0" else None  # ranks that stop looking at different tokens would wait for each other forever
    ended = {"eos_token_id": int(words[0, ids.shape[1] + 2]), "pad_token_id": 0, "streamer": streamer}
    found["ended"] = model.generate(ids[:1], **{**given, "attention_mask": given["attention_mask"][:1]}, **ended, **ours).shape[1]
    return found


def main(port: str, rank: str, ranks: str, file: str) -> None:
    """The largest difference to the expected logits per folder, apart and fused, and whether the tokens are right; or the error."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank}
    accelerate.is_accelerate_available = lambda *a: True  # asked for by the loader, and then not used on a CPU
    dist.init_process_group("gloo")
    graph_generate._of_transformers = lambda *a: sys.exit("it fell back")  # and would be compared with itself
    expected, found = torch.load(file), {}
    for folder, (ids, logits, words) in sorted(expected.items()):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=int(ranks))
            )
            said = {} if words is None else generated(model, ids, words, rank)
            with torch.no_grad():
                apart = (model(ids).logits - logits).abs().max().item()
                fused = fuse_qkv(model) + fuse_gate_up(model)
                together = model(ids).logits
                compiled = torch.equal(torch.compile(model, backend="eager")(ids).logits, together)
            off = (together - logits).abs().max().item()
            found[folder] = {"apart": apart, "fused": fused, "together": off, "compiled": compiled, **said}
        except HalfbyteError as error:
            found[folder] = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT", json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

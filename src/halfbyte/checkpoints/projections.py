"""The query, key and value projections of one attention layer in a folder of .npy files, as `halfbyte extract` writes them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from halfbyte.errors import CheckpointError

#: Names of the files in a folder of an extract, without .npy.
WEIGHTS, BIASES = ("wq", "wk", "wv"), ("bq", "bk", "bv")


@dataclass(frozen=True)
class Metadata:
    """What an extract is of. Weights are [out features, in features] and y = x w^T + b; `bias`: whether the model has biases (zeros
    are written where it has none); `head`: the only query head that was kept, with the KV head that it reads.
    """

    model: str
    layer: int
    head: int | None
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    bias: bool
    layout: str = "[out features, in features]"


@dataclass(frozen=True)
class Projections:
    """weights: q [Hq * D, K], k [H * D, K] and v [H * D, K] in float32; biases [N] each."""

    metadata: Metadata
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def save(self, folder: Path) -> None:
        """wq.npy ... bv.npy, float32, and metadata.json."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, x in zip((*WEIGHTS, *BIASES), (*self.weights, *self.biases), strict=True):
            np.save(folder / f"{name}.npy", x.numpy(), allow_pickle=False)
        (folder / "metadata.json").write_text(json.dumps(asdict(self.metadata), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> Projections:
        """What `save` wrote. Raises `CheckpointError` where a file is missing, damaged or does not fit the others."""
        try:
            metadata = Metadata(**json.loads((folder / "metadata.json").read_text(encoding="utf-8")))
            arrays = [np.load(folder / f"{name}.npy", allow_pickle=False) for name in (*WEIGHTS, *BIASES)]
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder} holds no extract: {error}; `halfbyte extract MODEL -o DIR` writes one") from error
        sizes = [n * metadata.head_dim for n in (metadata.heads, metadata.kv_heads, metadata.kv_heads)]
        shapes = [*((n, metadata.hidden_size) for n in sizes), *((n,) for n in sizes)]
        for name, x, shape in zip((*WEIGHTS, *BIASES), arrays, shapes, strict=True):
            if x.shape != shape or x.dtype != np.float32:
                raise CheckpointError(f"{folder / name}.npy is {x.dtype} {list(x.shape)}; metadata.json says float32 {list(shape)}")
        q, k, v, *biases = (torch.from_numpy(x) for x in arrays)
        return Projections(metadata, (q, k, v), (biases[0], biases[1], biases[2]))

"""Calibrated keys: a center and an invertible matrix for each KV head of a model, with which its keys lose less at few bits.

Attention is unchanged by both: softmax((q k) - (q c)) is softmax(q k), as q c is the same for every key, and (q M^-T) . (k M) is
q . k. The matrix makes keys and queries equally long in every direction, and the Hadamard rotation of the cache, which is such a
matrix, too, spreads what is left: `halfbyte.evals.calibrate_keys` has the mathematics. `lse` is that of centered keys, less by
sm_scale * (q . c); where scores are more than an input of the softmax (softcap, sinks in the denominator) there is no center.

A file is a safetensors file with `layer.N.matrix`, float16 [H, D, D], and `layer.N.center`, float32 [H, D], where there is one, of
every layer. Its metadata name the model: its sizes, and a digest of its norms, which no format of weights changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save

from halfbyte.cache_plan import ModelSizes
from halfbyte.checkpoints.safetensors_files import read_header, read_tensor
from halfbyte.errors import CheckpointError, InvalidArgument, check
from halfbyte.kv_buffer import HeadNorms, Rope
from halfbyte.ops.transform_heads import transform_heads
from halfbyte.paths import write_whole

KIND, VERSION = "halfbyte calibrated keys", "1"


class KeyTransform(NamedTuple):
    """That of one layer, float64 or, for tensors of at most 32 bits, float32.

    keys      M [H, D, D]
    queries   its inverse, transposed
    center    [H, D]; None: nothing is subtracted
    """

    keys: torch.Tensor
    queries: torch.Tensor
    center: torch.Tensor | None

    def like(self, x: torch.Tensor) -> KeyTransform:
        """On the device of `x`, and as wide as `x` needs it."""
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        return KeyTransform(*(None if t is None else t.to(x.device, dtype).contiguous() for t in self))  # type: ignore[arg-type]

    def of_keys(self, k: torch.Tensor, rope: Rope | None = None, norms: HeadNorms | None = None) -> torch.Tensor:
        """k [B, H, L, D] as the cache takes them; rope, norms: of `KVCache.append`, applied before."""
        return transform_heads(k, self.keys, self.center, rope=rope, norms=norms)

    def of_queries(self, q: torch.Tensor, rope: Rope | None = None, norms: HeadNorms | None = None) -> torch.Tensor:
        """q [B, Hq, L, D] as they read such keys."""
        return transform_heads(q, self.queries, rope=rope, norms=norms, queries=True)


def key_transform(matrix: torch.Tensor, center: torch.Tensor | None) -> KeyTransform:
    """That of a matrix [H, D, D] and a center; the inverse is of the numbers as they are given, in float64."""
    keys = matrix.double()
    return KeyTransform(keys, torch.linalg.inv(keys).mT.contiguous(), None if center is None else center.double())


@dataclass(frozen=True, eq=False)
class CalibratedKeys:
    """The transforms of every layer of a model of these sizes, with the digest of its norms ("": unknown)."""

    model: ModelSizes
    digest: str
    layers: tuple[KeyTransform, ...]

    def check_model(self, sizes: ModelSizes, digest: str) -> None:
        """Raise `InvalidArgument` where they are those of another model. An empty digest is not compared."""
        ours, theirs = asdict(self.model), asdict(sizes)
        differences = [f"{name} {ours[name]} (this model: {theirs[name]})" for name in ours if ours[name] != theirs[name]]
        if not differences and digest and self.digest != digest:
            differences = ["other weights of its norms"]
        check(
            not differences,
            f"calibration was made for another model: {', '.join(differences)}; calibrate this one: halfbyte calibrate MODEL",
        )

    def write(self, path: Path) -> Path:
        """Write the file atomically. A matrix that was read from a file is written as it was."""
        tensors = {}
        for number, layer in enumerate(self.layers):
            tensors[f"layer.{number}.matrix"] = layer.keys.half().contiguous()
            if layer.center is not None:
                tensors[f"layer.{number}.center"] = layer.center.float().contiguous()
        sizes = json.dumps(asdict(self.model))
        return write_whole(path, save(tensors, {"format": KIND, "version": VERSION, "model": sizes, "digest": self.digest}))


Calibration = CalibratedKeys | str | os.PathLike[str]


def read_calibration(calibration: Calibration) -> CalibratedKeys:
    """Read and check a file; `CalibratedKeys` are returned unchanged. Raises `InvalidArgument`, naming what is wrong."""
    if isinstance(calibration, CalibratedKeys):
        return calibration
    check(
        isinstance(calibration, str | os.PathLike),
        f"calibration is a {type(calibration).__name__}; pass a file by halfbyte calibrate, or CalibratedKeys",
    )
    path, what = Path(calibration), f"calibration={os.fspath(calibration)!r}"
    try:
        tensors = {name: read_tensor(info) for name, info in read_header(path).items()}
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except CheckpointError as error:
        raise InvalidArgument(f"{what}: {error}; halfbyte calibrate MODEL -o FILE writes one") from error
    kind = metadata.get("format"), metadata.get("version")
    check(kind == (KIND, VERSION), f"{what}: it has format and version {kind}; expected {(KIND, VERSION)}, by halfbyte calibrate")
    try:
        sizes = ModelSizes(**json.loads(metadata["model"]))
        layers = _layers(tensors, sizes)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:  # RuntimeError: a matrix without an inverse
        raise InvalidArgument(f"{what}: it is damaged ({str(error)[:200]}); calibrate again") from error
    return CalibratedKeys(sizes, metadata.get("digest", ""), layers)


def _layers(tensors: dict[str, torch.Tensor], sizes: ModelSizes) -> tuple[KeyTransform, ...]:
    """The layers of a file. Raises ValueError or KeyError for what does not fit the sizes, RuntimeError for a singular matrix."""
    heads, dim = sizes.kv_heads, sizes.head_dim
    layers = []
    for number in range(sizes.layers):
        matrix, center = tensors.pop(f"layer.{number}.matrix"), tensors.pop(f"layer.{number}.center", None)
        for t, shape in ((matrix, (heads, dim, dim)), (center, (heads, dim))):
            if t is not None and (tuple(t.shape) != shape or not t.is_floating_point() or not t.isfinite().all()):
                raise ValueError(f"layer {number}: {t.dtype} {list(t.shape)}; expected finite numbers {list(shape)}")
        layers.append(key_transform(matrix, center))
    if tensors:
        raise ValueError(f"unexpected {min(tensors)}")
    return tuple(layers)


def digest_of_norms(model: torch.nn.Module) -> str:
    """A digest of a model's norms, by name and as bfloat16; "" where one has no numbers yet."""
    digest = hashlib.sha256()
    for name, t in model.named_parameters():
        if t.ndim == 1 and name.endswith("norm.weight"):
            if t.is_meta:
                return ""
            digest.update(name.encode())
            digest.update(t.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]

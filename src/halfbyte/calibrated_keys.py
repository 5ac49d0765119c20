"""Calibrated keys: an invertible matrix and a shift for each KV head of a model, with which its keys lose less at few bits.

Attention is unchanged by both: (q M^-T) . (k M) is q . k, and softmax(q k + q s) is softmax(q k), as q s is the same for every key.
The matrix makes keys and queries equally long in every direction, and a Hadamard matrix, which is part of it, spreads what is left;
the shift takes away the mean: `halfbyte_lab.evals.calibrate_keys` has the mathematics. `lse` is that of shifted keys, more by
sm_scale * (q . s); where scores are more than an input of the softmax (softcap, sinks in the denominator) there is no shift.

A file is a safetensors file with `layer.N.matrix`, bfloat16 [H, D, D], and `layer.N.shift`, float32 [H, D], where there is one, of
every layer. Its metadata name the model: its sizes, and a digest of its norms, which no format of weights changes. Rotations of
OSCAR load as well: pickled files with the key `layers`, the rotation of keys of each, [D, D] or [H, D, D], and nothing of a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from halfbyte.cache_plan import ModelSizes
from halfbyte.checkpoints.safetensors_files import read_folder, read_header, read_tensor
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported, check
from halfbyte.paths import write_whole
from halfbyte.tensors import KeyTransform

KIND, VERSION = "halfbyte calibrated keys", "2"
#: Files of `torch.save`, which OSCAR writes.
_PICKLED = {".pt", ".pth"}


def key_transform(matrix: torch.Tensor, shift: torch.Tensor | None) -> KeyTransform:
    """That of a matrix [H, D, D], rounded to bfloat16, and a shift [H, D]; the inverse is of the rounded numbers, in float64."""
    keys = matrix.bfloat16().double()
    return KeyTransform(keys, torch.linalg.inv(keys).mT.contiguous(), None if shift is None else shift.double())


@dataclass(frozen=True, eq=False)
class CalibratedKeys:
    """The transforms of every layer of a model of these sizes, with the digest of its norms ("": unknown).

    model: None for files that do not name it; a layer may have one matrix for all heads then.
    """

    model: ModelSizes | None
    digest: str
    layers: tuple[KeyTransform, ...]

    def of_model(self, sizes: ModelSizes, digest: str) -> tuple[KeyTransform, ...]:
        """The transforms of each layer. Raise `InvalidArgument` for those of another model. An empty digest is not compared."""
        differences = self._differences(sizes)
        if not differences and digest and self.digest and self.digest != digest:
            differences = ["other weights of its norms"]
        check(
            not differences,
            f"calibration was made for another model: {', '.join(differences)}; calibrate this one: halfbyte calibrate MODEL",
        )
        heads = sizes.kv_heads
        return tuple(t if len(t.keys) == heads else KeyTransform(*(_for_heads(x, heads) for x in t)) for t in self.layers)

    def _differences(self, sizes: ModelSizes) -> list[str]:
        """What of a model is not as it was here, in words."""
        theirs = asdict(sizes)
        if self.model is not None:
            ours = asdict(self.model)
        else:
            heads, dim, _ = self.layers[0].keys.shape
            ours = {"layers": len(self.layers), "head_dim": dim} | ({"kv_heads": heads} if heads > 1 else {})
        return [f"{name} {ours[name]} (this model: {theirs[name]})" for name in ours if ours[name] != theirs[name]]

    def write(self, path: Path) -> Path:
        """Write the file atomically. A matrix that was read from a file is written as it was."""
        check(self.model is not None, "calibration does not name its model; copy the file that it was read from")
        assert self.model is not None
        tensors = {}
        for number, layer in enumerate(self.layers):
            tensors[f"layer.{number}.matrix"] = layer.keys.bfloat16().contiguous()
            if layer.shift is not None:
                tensors[f"layer.{number}.shift"] = layer.shift.float().contiguous()
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
    if path.suffix in _PICKLED:
        return CalibratedKeys(None, "", _rotations(path, what))
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
        matrix, shift = tensors.pop(f"layer.{number}.matrix"), tensors.pop(f"layer.{number}.shift", None)
        for t, shape in ((matrix, (heads, dim, dim)), (shift, (heads, dim))):
            if t is not None and (tuple(t.shape) != shape or not t.is_floating_point() or not t.isfinite().all()):
                raise ValueError(f"layer {number}: {t.dtype} {list(t.shape)}; expected finite numbers {list(shape)}")
        layers.append(key_transform(matrix, shift))
    if tensors:
        raise ValueError(f"unexpected {min(tensors)}")
    return tuple(layers)


def _rotations(path: Path, what: str) -> tuple[KeyTransform, ...]:
    """The rotations of a file by OSCAR, all of one shape. Raises `InvalidArgument`, and `Unsupported` for one of values."""
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
        version, objective, by_layer = content["format_version"], str(content["objective"]), dict(content["layers"])
        matrices = [by_layer[number]["rotation"].double() for number in range(len(by_layer))]
        matrices = [matrix[None] if matrix.ndim == 2 else matrix for matrix in matrices]
        (_, dim, _), *others = {tuple(matrix.shape) for matrix in matrices}
        identity = torch.eye(dim, dtype=torch.float64)
        fits = not others and all(((m @ m.mT - identity).abs() < 1e-2).all() for m in matrices)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InvalidArgument(f"{what}: it holds no rotations by OSCAR ({str(error)[:200]})") from error
    check(
        version in (1, 2) and fits,
        f"{what}: expected orthogonal matrices of one shape, [D, D] or [H, D, D], in format_version 1 or 2",
    )
    if objective.startswith("sst"):
        raise Unsupported(f"{what}: its objective is {objective}, a rotation of values; pass the file of keys, k_rotation_*.pt")
    return tuple(key_transform(matrix, None) for matrix in matrices)


def _for_heads(t: torch.Tensor | None, heads: int) -> Any:
    return None if t is None else t.expand(heads, *t.shape[1:]).contiguous()


def digest_of_norms(model: torch.nn.Module) -> str:
    """A digest of the norms of a decoder's blocks, by name and as bfloat16; "" where one has no numbers yet."""
    return _digest({name: t.detach() for name, t in model.named_parameters() if t.ndim == 1 and _NORM.search(name)})


def digest_of_folder(folder: Path) -> str:
    """The same from the safetensors files of a model; "" where there are none."""
    try:
        infos = read_folder(folder)
    except CheckpointError:
        return ""
    return _digest({name: read_tensor(info) for name, info in infos.items() if len(info.shape) == 1 and _NORM.search(name)})


#: A norm of a decoder, inside of whatever holds the decoder.
_NORM = re.compile(r"^(?:(?:model|language_model)\.)*((?:layers\.\d+\..*)?norm\.weight)$")


def _digest(norms: dict[str, torch.Tensor]) -> str:
    if not norms or any(t.is_meta for t in norms.values()):
        return ""
    digest = hashlib.sha256()
    for name, t in sorted((_NORM.sub(r"\1", name), t) for name, t in norms.items()):
        digest.update(name.encode())
        digest.update(t.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]

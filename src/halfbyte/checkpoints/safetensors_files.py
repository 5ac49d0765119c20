"""safetensors files and folders of them, checked against their real size before a byte is allocated.

A safetensors file is 8 bytes (the length N of the header, little endian), N bytes of JSON, then the data. The format's own library
accepts duplicate keys, shapes of rank 1000, names with ../ and more; here a damaged or hostile file gives `CheckpointError` and
nothing else. Files are described, not loaded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from halfbyte.errors import CheckpointError, warn_once
from halfbyte.formats import Format, Shape
from halfbyte.tensors import expected_parts

#: The format's own limit on a header. In memory a header takes about 20 times its size, so one beyond `SMALL_HEADER` may be an
#: eighth of its file at most.
MAX_HEADER, SMALL_HEADER = 100_000_000, 4_000_000
#: Real models have a few axes; torch stops at 64.
MAX_RANK = 16
MAX_INDEX = 64_000_000

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

#: The dtype names of the format that torch has (sub-byte types are not supported).
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}

#: Names under which pickled weights come. Loading one can run code.
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `file`, its dtype and shape, and the bytes [start, end) from the beginning of the file."""

    file: Path
    dtype: torch.dtype
    shape: Shape
    start: int
    end: int


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Name -> place of every tensor in one file, after every check. Raises only `CheckpointError`."""
    file = Path(path)
    try:
        size = os.path.getsize(file)
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                _damaged(file, f"its header claims {length} bytes, the file has {size}; download it again")
            if length > max(SMALL_HEADER, size // 8):
                _damaged(file, f"its header takes {length} of its {size} bytes, which no model's does")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error})") from error
    entries = json_object(file, raw, "header")
    _check_text(file, entries, entries.pop("__metadata__", None))
    infos = {name: _entry(file, name, entry, 8 + length, size) for name, entry in entries.items()}
    _check_layout(file, infos, 8 + length, size)
    return infos


def read_folder(folder: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Every tensor of a model folder: of its one file, or of the shards its index names. Raises only `CheckpointError`."""
    return read_overlay(folder)[0]


def read_overlay(folder: str | os.PathLike[str]) -> tuple[dict[str, TensorInfo], bool]:
    """(the tensors of `read_folder`, whether the shards hold others, too): where a new shard replaces a part of an older one.

    The index decides. Where there is one file as well, it goes first, as in transformers: what is checked must be what is loaded.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"{root}: not a folder; pass a model folder with config.json and safetensors files")
    if (root / SINGLE).exists():
        if (root / INDEX).exists() and {*_read_index(root).values()} != {SINGLE}:
            warn_once(f"{root} has {SINGLE} and {INDEX}; {SINGLE} is read, as transformers does: remove the other one")
        return read_header(_inside(root, SINGLE)), False
    if (root / INDEX).exists():
        return _read_shards(root)
    pickles = sorted(p.name for p in root.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(f"{root}: its weights are pickled ({pickles[0]}), which can run code; convert them to safetensors")
    raise CheckpointError(f"{root}: no {SINGLE} and no {INDEX}; pass a folder with safetensors weights")


def read_files(files: list[str]) -> dict[str, TensorInfo]:
    """Every tensor of several safetensors files; a name in two of them is an error."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        if Path(file).suffix in _PICKLES:
            raise CheckpointError(f"{file}: pickled weights can run code; convert them to safetensors")
        for name, info in read_header(file).items():
            if name in tensors:
                _damaged(info.file, f"{name!r} is in {tensors[name].file.name} too")
            tensors[name] = info
    return tensors


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """One tensor of a file whose header was read, in memory of its own. Raises only `CheckpointError`."""
    try:
        with open(info.file, "rb") as stream:
            stream.seek(info.start)
            raw = bytearray(stream.read(info.end - info.start))
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read ({error.strerror or error})") from error
    if len(raw) != info.end - info.start:
        _damaged(info.file, "it became shorter while it was read")
    if not raw:
        return torch.empty(info.shape, dtype=info.dtype, device="cpu")
    return torch.frombuffer(raw, dtype=torch.uint8).view(info.dtype).view(info.shape)


def _read_index(root: Path) -> dict[str, str]:
    """Name of a tensor -> name of its shard."""
    index = root / INDEX
    try:
        if index.stat().st_size > MAX_INDEX:
            _damaged(index, f"it is {index.stat().st_size} bytes long")
        raw = index.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read ({error.strerror or error})") from error
    weight_map = json_object(index, raw, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        _damaged(index, 'it has no "weight_map" from tensor names to file names')
    return weight_map


def _read_shards(root: Path) -> tuple[dict[str, TensorInfo], bool]:
    weight_map = _read_index(root)
    headers = {shard: read_header(_inside(root, shard)) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            _damaged(root / INDEX, f"it places {name!r} in {shard!r}, which does not hold it")
    infos = {name: headers[shard][name] for name, shard in weight_map.items()}
    return infos, len(infos) < sum(map(len, headers.values()))


def _inside(root: Path, name: str) -> Path:
    """The file of this plain name in the folder; a name with a path in it, or one that is no safetensors file, is refused."""
    plain = name and name not in (".", "..") and not set(name) & {"/", "\\", "\0", ":"} and len(name) < 256
    if not plain or not name.isprintable():
        raise CheckpointError(f"{root / INDEX}: the shard name {name!r} is not a plain file name inside the folder")
    if not name.endswith(".safetensors"):
        raise CheckpointError(f"{root / INDEX}: the shard {name!r} is not a safetensors file; pickled weights can run code")
    path = root / name
    if not path.is_file():
        raise CheckpointError(f"{path}: the shard is missing; download the folder again")
    return path


def json_object(file: Path | str, raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object; duplicate keys, NaN and depth bombs are errors."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{file}: its {what} is damaged ({str(error)[:200]}); download it again") from error
    if not isinstance(value, dict):
        _damaged(file, f"its {what} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key appears twice")
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _entry(file: Path, name: str, entry: object, data: int, size: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _damaged(file, f"{_short(name)} is not described by dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _damaged(file, f"{_short(name)} has the dtype {str(dtype)[:40]!r}; known are {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _counts(shape) or len(shape) > MAX_RANK or not _counts(offsets) or len(offsets) != 2:
        _damaged(file, f"{_short(name)} has a shape or offsets that are no lists of sizes")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if not 0 <= begin <= end <= size - data or end - begin != nbytes:
        _damaged(file, f"{_short(name)} needs {nbytes} bytes for its shape and lies at {begin} to {end} of {size - data}")
    return TensorInfo(file, DTYPES[dtype], tuple(shape), data + begin, data + end)


def _check_text(file: Path, names: Iterable[str], metadata: object) -> None:
    """Names and metadata as the format's own library takes them: valid Unicode, and strings by strings."""
    if metadata is not None and not isinstance(metadata, dict):
        _damaged(file, "its __metadata__ is no object of strings")
    texts = [] if metadata is None else [*metadata, *metadata.values()]
    if not all(isinstance(text, str) for text in texts):
        _damaged(file, "its __metadata__ is no object of strings")
    for text in (*names, *texts):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            _damaged(file, "a name or its __metadata__ holds half of a surrogate pair, which is no Unicode")


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**62 for v in values)


def _check_layout(file: Path, infos: dict[str, TensorInfo], data: int, size: int) -> None:
    """The tensors must tile the data: no overlap, no gap, nothing behind."""
    at, last = data, "the header"
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != at:
            kind = "overlaps" if info.start < at else "leaves a gap behind"
            _damaged(file, f"{_short(name)} {kind} {_short(last)}")
        at, last = info.end, name
    if at != size:
        _damaged(file, f"{size - at} bytes follow the last tensor")


def _short(name: str) -> str:
    return repr(name if len(name) <= 120 else name[:117] + "...")


def _damaged(file: Path | str, why: str) -> NoReturn:
    raise CheckpointError(f"{file}: {why}")


# ---------------------------------------------------------------------------------------------------- quantized weights


def check_parts(name: str, fmt: Format, shape: Shape, infos: Mapping[str, TensorInfo], *, act_order: bool = False) -> None:
    """The tensors `name.weight_codes`, ... must be those that `fmt` stores for a weight of this shape."""
    expected = {f"{name}.weight_{part}": spec for part, spec in expected_parts(fmt, shape, act_order=act_order).items()}
    for tensor, (size, dtype) in expected.items():
        info = infos.get(tensor)
        if info is None:
            raise CheckpointError(f"{tensor} is missing; {fmt.name} of shape {list(shape)} stores {', '.join(expected)}")
        if info.shape != size or info.dtype is not dtype:
            raise CheckpointError(
                f"{tensor} is {info.dtype} {list(info.shape)} in {info.file.name}; {fmt.name} of shape {list(shape)} stores "
                f"{dtype} {list(size)}"
            )


def check_perm(tensor: str, perm: torch.Tensor) -> None:
    """An act-order must hold every column once; the error names the tensor."""
    columns = torch.arange(perm.shape[-1], dtype=perm.dtype, device=perm.device)
    if not torch.equal(perm.sort().values, columns.expand_as(perm)):
        raise CheckpointError(f"{tensor} is no permutation of the {len(columns)} in features; the file is damaged")


def check_scales(name: str, fmt: Format, parts: Mapping[str, torch.Tensor]) -> None:
    """No scale may make a weight NaN or infinite; the error names the tensor. Of a stack, one expert is decoded at a time."""
    from halfbyte.reference.dequantize import block_scales, expert_scales
    from halfbyte.tensors import QuantTensor

    scales = parts.get("scales")
    if scales is None:
        return
    *rows, width = parts["codes"].shape
    for part in ("tensor_scale", "nested"):
        if part in parts and not bool(torch.isfinite(parts[part]).all()):
            raise CheckpointError(f"{name}.weight_{part} holds NaN or infinity; the file is damaged")
    q = QuantTensor(fmt, (*rows, width * fmt.code.per_byte), **parts)
    each = (expert_scales(q, i, torch.float32) for i in range(rows[0])) if len(rows) == 2 else iter((block_scales(q),))
    for plain in each:
        if why := scale_fault(plain, reach_of(fmt)):
            raise CheckpointError(f"{name}.weight_scales {why}")


def reach_of(fmt: Format) -> float:
    """The largest magnitude of a code of a format, less its zero point."""
    return float(fmt.code.codebook().abs().max()) + (255 if fmt.offset == "int" else 0)


def scale_fault(scales: torch.Tensor, reach: float) -> str:
    """Why scales of codes up to `reach` are damaged; "" for those that give finite weights: zero, subnormal and negative ones too.

    A row of zeros (padding, pruning) has the scale 0. AutoRound writes negative scales, to reach 8 steps on either side.
    """
    if not scales.numel():
        return ""
    largest = max(abs(bound.item()) for bound in torch.stack(scales.aminmax()))  # one pass: models have 10^8 scales
    if largest * reach <= torch.finfo(torch.float32).max:
        return ""
    if count := int((~torch.isfinite(scales)).sum()):
        return f"holds {count} scales of {scales.numel()} that are not finite; the file is damaged"
    return "holds scales so large that weights would be infinite; the file is damaged"

"""Saving models and loading them, bit for bit, with every file checked before transformers sees it."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from halfbyte.calibrated_keys import read_calibration
from halfbyte.checkpoints.adapters import open_checkpoint
from halfbyte.checkpoints.folder_guard import check_folder, check_layers
from halfbyte.checkpoints.layer import Expanded
from halfbyte.checkpoints.safetensors_files import SINGLE, TensorInfo, read_tensor
from halfbyte.errors import CheckpointError, HalfbyteError, InvalidArgument, Unsupported, check
from halfbyte.formats import weight_format
from halfbyte.hf.default_cache import CALIBRATION, cache_settings
from halfbyte.hf.external import DRAFTS, ExternalCheckpoint, from_state
from halfbyte.hf.model_support import model_class, read_config
from halfbyte.hf.quantization_config import mark_as_it_is
from halfbyte.hf.quantize_model import check_options, quantize, reports_footprint
from halfbyte.hf.weights import of_adapters, select
from halfbyte.paths import is_gguf, new_folder
from halfbyte.reference.quantize import check_clip

#: What a parameter that is not quantized may be stored in.
WEIGHT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Bytes of tables that no file holds (positions, masks) which any model may have.
TABLES = 1 << 27
#: Parameters that may be missing here; loading then names them.
SPARE = 1 << 20


def save(model: Any, folder: str | os.PathLike[str], *, tokenizer: str | os.PathLike[str] | None = None) -> Path:
    """Write a model, quantized or not, as safetensors with its configuration; `load` restores it bit for bit.

    tokenizer: a folder or Hub id whose tokenizer is saved, too.
    Saving is atomic: it writes a temporary folder next to `folder` and renames it. An existing folder is refused. Leftovers of a
    killed process, `.NAME.*.partial`, are removed by the next save to the same name.
    """
    target = Path(folder)
    is_model = isinstance(model, nn.Module) and hasattr(model, "save_pretrained")
    check(is_model, f"model is a {type(model).__name__}; pass a transformers model")
    here = hasattr(model, "hf_device_map") or not any(p.is_meta for p in model.parameters())  # transformers fetches what that names
    check(
        here, "model has weights on the meta device; load them, or take accelerate's hooks off first (remove_hook_from_submodules)"
    )
    check(
        not of_adapters(model),
        "model has adapters, without which it is another model; merge them before you quantize (merge_and_unload)",
    )
    if target.exists() or target.is_symlink():
        raise InvalidArgument(f"folder={str(target)!r} exists; pass a new name, or remove it first")
    mark_as_it_is(model)
    if not target.absolute().parent.is_dir():
        raise InvalidArgument(f"folder={str(target)!r}: the folder it would lie in does not exist")
    source = None if tokenizer is None else local_folder(tokenizer)
    size, free = (
        sum(t.nbytes for t in {id(t): t for t in model.state_dict().values()}.values()),
        shutil.disk_usage(target.absolute().parent).free,
    )
    if size > free:
        raise OSError(errno.ENOSPC, f"the model takes {size:,} bytes, and {free:,} are free", str(target))
    with new_folder(target) as temporary:
        try:
            model.save_pretrained(temporary, safe_serialization=True)
        except SafetensorError as error:  # which has no number of the system's error
            full = "No space left" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
        settings = cache_settings(model)
        if settings is not None and settings.calibration is not None:
            read_calibration(settings.calibration).write(temporary / CALIBRATION)
        if source is not None:
            _copy_tokenizer(source, temporary)
    return target


#: How names of a tokenizer's files begin and end: Marian has source.spm, target.spm and target_vocab.json, Whisper a normalizer.
_TOKENIZERS = (
    *("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template", "spiece"),
    *("sentencepiece", "source", "target", "normalizer", "tekken"),
)
_OF_TOKENIZERS = (".json", ".txt", ".model", ".jinja", ".spm")
#: A folder of more chat templates.
_TEMPLATES = "additional_chat_templates"


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer, but no code and no weights."""
    files = [file for file in source.iterdir() if file.stem.startswith(_TOKENIZERS) and file.suffix in _OF_TOKENIZERS]
    for file in (*files, *(source / _TEMPLATES).glob("*.jinja")):
        if file.is_file():
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


@reports_footprint
def load(
    folder_or_id: str | os.PathLike[str],
    weights: str | None = None,
    keys: str | None = None,
    values: str | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    **options: Any,
) -> Any:
    """Load a language model from a folder or a Hub id, after checking its files, and quantize it if formats are given.

    The model has the class that wrote the folder: a decoder, an encoder-decoder, or one with images.
    weights, keys, values and options are those of `halfbyte.hf.quantize`; weights=None loads weights as saved: in 16 bits,
    quantized by halfbyte, or by another library (GPTQ, AWQ, bitsandbytes, compressed-tensors, modelopt, quark), which need not be
    installed: docs/guides/checkpoints.md. FP8 files need weights=, the format that they are rounded to.
    Without keys, values or plan the cache has the formats that were saved with the model.
    dtype is that of everything that is not quantized. Only safetensors are read, and no code from the folder runs.
    """
    check_options(options)
    if not isinstance(skips := options.get("skip_modules", ""), str):  # which quantize refuses
        options["skip_modules"] = tuple(skips)  # read more than once
    valid = dtype == "auto" or isinstance(getattr(torch, dtype, None) if isinstance(dtype, str) else dtype, torch.dtype)
    check(valid, f"dtype={dtype!r}; expected 'auto', or a type such as torch.bfloat16")
    folder = local_folder(folder_or_id)
    check_folder(folder)
    if (folder / "adapter_config.json").exists():  # transformers would load another model, which it names, and files not looked at
        raise CheckpointError(
            f"{folder}: it holds an adapter (adapter_config.json); pass the folder of its base model, or of the model that the "
            f"adapter was merged into (merge_and_unload of PEFT)"
        )
    checkpoint = open_checkpoint(folder)
    check_layers(folder / "config.json", len(checkpoint.infos))
    adapter, skips = checkpoint.adapter, options.get("skip_modules", ())
    if isinstance(adapter, Expanded):
        _ask(adapter, folder, weights, options)
    elif checkpoint.quantized and weights is not None:
        raise InvalidArgument(
            f"weights={weights!r}: the weights of {folder} are quantized already; leave weights out, or on the command line of "
            f"halfbyte quantize write --from in place of MODEL"
        )
    empty = _build_empty(folder, checkpoint.infos)
    try:
        external = None if adapter is None else ExternalCheckpoint(checkpoint, adapter, empty, skips)
        _check_tensors(folder, empty, checkpoint.infos if external is None else external.plain)
        if external is not None:
            model, report = external.load(dtype)
        elif checkpoint.overlay:  # of which transformers would take what it reads last
            state = {name: _Stored(info) for name, info in checkpoint.infos.items()}
            model, report = from_state(type(empty), folder, read_config(folder), state, dtype)
        else:
            model, report = type(empty).from_pretrained(
                folder, config=read_config(folder), dtype=dtype, use_safetensors=True, output_loading_info=True
            )
    except (HalfbyteError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # transformers meets a damaged folder with whatever its code runs into
        raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from error
    _check_complete(folder, report)
    rest, options = weights, dict(options)
    if isinstance(adapter, Expanded) and not select(model, skips):  # no linear layer was in 16 bits in the files
        rest = None
        options = {name: x for name, x in options.items() if options.get("lm_head") or name not in ("clip", "skip_modules")}
    has_cache = any(x is not None for x in (keys, values, options.get("plan")))
    if rest is not None or has_cache or any(options.get(name) for name in ("lm_head", "rotate_values", "fuse_qkv", "fuse_gate_up")):
        quantize(model, rest, keys, values, **options)
    elif options and weights is None:
        raise InvalidArgument(f"{', '.join(options)}: these options belong to weights=, keys= or values=, none of which was given")
    return model


class _Stored:
    """A tensor of a file that transformers reads when it is needed, as it reads slices of safetensors."""

    def __init__(self, info: TensorInfo) -> None:
        self._info = info

    def __getitem__(self, everything: Any) -> torch.Tensor:
        return read_tensor(self._info)

    def is_floating_point(self) -> bool:
        return self._info.dtype.is_floating_point

    @property
    def dtype(self) -> torch.dtype:
        return self._info.dtype


def _ask(adapter: Expanded, folder: Path, weights: str | None, options: dict[str, Any]) -> None:
    """Set the format to which an adapter rounds its layers."""
    if weights is None:
        raise InvalidArgument(
            f"no weight format has the codes of {folder} ({type(adapter).__name__}); name the one that its weights are rounded to, "
            f"such as weights='int8_g128' (halfbyte quantize {folder} --weights int8_g128)"
        )
    if options.get("rotate_values"):
        raise Unsupported("rotate_values changes weights before they are quantized, and these are quantized while they are read")
    if options.get("calibrate") is not None:
        raise Unsupported(f"calibrate needs a model in 16 bits, and the weights of {folder} are quantized while they are read")
    adapter.into, adapter.clip = weight_format(weights), options.get("clip")
    check_clip(adapter.clip, adapter.into)


#: Numbers that one element of these types may hold: 4-bit codes are packed.
_PACKED = {torch.uint8: 2, torch.int32: 8}


def _build_empty(folder: Path, infos: dict[str, TensorInfo]) -> Any:
    """The empty model of config.json, no larger than the files: missing parameters would be allocated and filled at random."""
    try:
        config = read_config(folder)
        layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0) or 0
        if layers > len(infos):
            raise CheckpointError(f"{folder}: config.json describes {layers} layers, the files hold {len(infos)} tensors")
        if (other := getattr(config, "transformers_weights", None)) is not None:
            raise CheckpointError(
                f"{folder}: config.json names the file of its weights (transformers_weights={str(other)[:80]!r}); call it {SINGLE} "
                f"and leave that entry out"
            )
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model: Any = model_class(config)._from_config(config)
    except (CheckpointError, Unsupported):
        raise
    except Exception as error:  # transformers meets a damaged configuration with whatever its arithmetic runs into
        raise CheckpointError(f"{folder}: transformers cannot build the model that config.json describes: {error}") from error
    count = sum(p.numel() for p in model.parameters())
    names = {name for name, _ in model.named_parameters()}
    room = sum(math.prod(i.shape) * _PACKED.get(i.dtype, 1) for i in infos.values())
    if count > 2 * room:  # less than that is found and named while loading
        raise CheckpointError(
            f"{folder}: config.json describes {count:,} parameters, the files hold at most {room:,}: missing keys"
        )
    missing = sum(p.numel() for name, p in model.named_parameters() if name not in infos)
    spare = sum(math.prod(i.shape) * _PACKED.get(i.dtype, 1) for name, i in infos.items() if name not in names)
    if missing > spare + SPARE:
        raise CheckpointError(
            f"{folder}: config.json describes {missing:,} parameters under names that the files lack, whose other tensors hold at "
            f"most {spare:,}: missing keys"
        )
    tables, read = sum(b.nbytes for b in model.buffers()), sum(i.end - i.start for i in infos.values())
    if tables > max(2 * read, TABLES):
        raise CheckpointError(
            f"{folder}: config.json describes {tables:,} bytes of tables (positions, masks) for {read:,} bytes of files"
        )
    return model


def _check_tensors(folder: Path, model: nn.Module, infos: dict[str, TensorInfo]) -> None:
    """A tensor of the files must have the shape of the parameter of its name, and a dtype that weights are stored in."""
    for name, parameter in model.state_dict().items():
        if (info := infos.get(name)) is None:
            continue  # a quantized weight, or one that transformers stores under another name
        if tuple(info.shape) != tuple(parameter.shape):
            raise CheckpointError(
                f"{folder}: {name} is mismatched: {list(info.shape)} in the file, {list(parameter.shape)} in config.json's model"
            )
        if parameter.is_floating_point() and info.dtype not in WEIGHT_TYPES:
            raise CheckpointError(f"{folder}: {name} is stored as {info.dtype}; expected float16, bfloat16, float32 or float64")


def _check_complete(folder: Path, report: dict[str, Any]) -> None:
    """Raise for missing tensors: transformers only warns, and fills them at random."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "conversion_errors", "error_msgs"):
        if names := sorted(str(n) for n in report.get(kind) or () if kind != "unexpected_keys" or not DRAFTS.search(str(n))):
            raise CheckpointError(f"{folder}: {kind.replace('_', ' ')}: {', '.join(names[:5])}{', ...' if names[5:] else ''}")


def local_folder(folder_or_id: str | os.PathLike[str]) -> Path:
    """The folder itself, or that of a Hub model after downloading its safetensors and JSON files."""
    check(isinstance(folder_or_id, str | os.PathLike), f"folder_or_id={folder_or_id!r}; expected a model folder or a Hub id")
    path = Path(folder_or_id)
    if path.is_dir():
        if (files := sorted(path.glob("*.gguf"))) and not any(path.glob("*.safetensors")):
            raise is_gguf(path, files[0].name)
        return path
    if path.suffix == ".gguf":
        raise is_gguf(path.parent, path.name)
    if path.exists() or str(folder_or_id).startswith((".", "/", "~")) or str(folder_or_id).count("/") > 1:
        raise CheckpointError(f"{folder_or_id}: no such folder; pass a model folder, or a Hub id like 'Qwen/Qwen3-0.6B'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.spm"]
    try:
        path = Path(snapshot_download(str(folder_or_id), allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise CheckpointError(f"{folder_or_id}: no such folder, and it cannot be had from the Hub: {_one_line(error)}") from error
    if "gguf" in str(folder_or_id).lower() and not any(path.glob("*.safetensors")):
        raise is_gguf(folder_or_id, "FILE.gguf")
    return path


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

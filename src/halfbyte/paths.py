"""Where models (shipped, in folders, on the Hugging Face Hub) and measured plans of a GPU are, and files written whole."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from halfbyte.errors import CheckpointError, InvalidArgument, MissingPackage, Unsupported

#: Words that name the demo model.
SHIPPED = ("demo", "tiny")
#: Temporary folders are .NAME.*.partial next to what they become.
_SUFFIX = ".partial"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def shipped_model() -> Path:
    """The folder of the small trained model: of this checkout, or of the distribution halfbyte-demo. Raises `MissingPackage`."""
    folder = Path(__file__).parent / "data" / "tiny"
    if not folder.is_dir():
        spec = find_spec("halfbyte_demo")
        if spec is None or spec.origin is None:
            raise MissingPackage("the demo model is not installed; in a checkout of halfbyte: pip install ./demo")
        folder = Path(spec.origin).parent / "tiny"
    return folder


def is_hub_id(name: str) -> bool:
    """Whether a name can only be a Hub id: neither the shipped model, nor anything here, nor written like a path."""
    path = Path(name).expanduser()
    return name not in SHIPPED and not path.exists() and not _looks_like_path(name) and _HUB_ID.fullmatch(name) is not None


def resolve_model(name: str) -> str:
    """What to hand to transformers for `name`: a folder that holds config.json, or a Hub id as it is.

    `demo` (or `tiny`) is the shipped model; a folder of that name is meant by ./demo. Whatever exists here, or is written like a
    path, must be a folder with a config.json; only the rest can be a Hub id.
    """
    if name in SHIPPED:
        return str(_model_folder(shipped_model(), "the shipped model"))
    path = Path(name).expanduser()
    if name and (path.exists() or _looks_like_path(name)):
        return str(_model_folder(path, f"model={name!r}"))
    if not _HUB_ID.fullmatch(name):
        raise InvalidArgument(f"model={name!r} is neither a folder here, nor a Hub id (owner/name), nor 'demo'")
    return name


def local_folder(name: str) -> str:
    """The folder of a model on this machine, if need be in the cache of the Hub; "" where there is none."""
    if Path(name).is_dir():
        return name
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(name, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not there, or no name of a repository
        return ""


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1


def _model_folder(path: Path, what: str) -> Path:
    if not path.exists():
        raise CheckpointError(f"{what}: there is no folder {path}")
    if path.suffix == ".gguf":
        raise is_gguf(path.parent, path.name)
    if path.is_dir() and not (path / "config.json").is_file() and (files := sorted(path.glob("*.gguf"))):
        raise is_gguf(path, files[0].name)
    if not path.is_dir():
        raise CheckpointError(f"{what}: {path} is a file; give the folder that holds config.json and the weights")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{what}: the folder {path} holds no config.json, so it is no model folder of transformers")
    return path


def own_plans(gpu: str) -> Path:
    """Where measured plans of GPUs of this name are stored."""
    return _own_file("plans", gpu, ".json")


def own_checks(gpu: str) -> Path:
    """Where it is stored how kernels did when they checked themselves on GPUs of this name."""
    return _own_file("checks", gpu, ".jsonl")


def _own_file(kind: str, gpu: str, suffix: str) -> Path:
    """A file about GPUs of this name: below XDG_CACHE_HOME, which is ~/.cache unless set."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"))
    return folder / "halfbyte" / kind / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + suffix)


def is_gguf(folder: str | os.PathLike[str], file: str) -> Unsupported:
    """The error about a model in a GGUF file: how transformers expands it, with which packages."""
    return Unsupported(
        f"{folder}: GGUF is not read here; let transformers expand it, and quantize again (pip install gguf accelerate): model = "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, gguf_file={file!r}, dtype=torch.bfloat16, "
        "quantization_config=transformers.GgufConfig(dequantize=True)), then halfbyte.hf.quantize(model, weights='int4_g32')"
    )


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write `content` (text as UTF-8) to `path`, its folder made if it is missing; a reader sees the old file or all of the new."""
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_folder(path) as folder:
            file = folder / path.name
            file.write_bytes(content.encode() if isinstance(content, str) else content)
            _sync(file)
            os.replace(file, path)
    return path


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, whole and on the disk, or not at all: what a full disk cut is removed again."""
    with _naming(path), path.open("ab", buffering=0) as file:
        ordinary = path.is_file()  # a pipe has no place to go back to
        size = file.tell() if ordinary else 0
        try:
            rest = memoryview(f"{line}\n".encode())
            while rest:
                rest = rest[file.write(rest) :]
            if ordinary:
                os.fsync(file.fileno())
        except BaseException:
            if ordinary:
                file.truncate(size)
            raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `path` when the block ends; nothing is left of it when the block raises."""
    with _naming(path), _temporary_folder(path) as temporary:
        folder = temporary / path.name
        folder.mkdir()
        yield folder
        for file in folder.rglob("*"):
            if file.is_file():
                _sync(file)
        os.rename(folder, path)  # fails if someone made the folder meanwhile and put something in it


@contextlib.contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """A private, locked folder next to `path`, gone at the end. What killed processes left of earlier writes goes first."""
    parent, prefix = path.absolute().parent, f".{path.name}."
    for left in parent.glob(f"{glob.escape(prefix)}*{_SUFFIX}"):
        if (lock := _lock(left, wait=False)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    while True:
        folder = Path(tempfile.mkdtemp(_SUFFIX, prefix, parent))
        lock = _lock(folder, wait=True)
        if folder.exists():  # else another process found it before it was locked
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the lock of a folder; None if another process holds it, or if the system has no such locks."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        return None
    return handle


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error of the system names what was to be written: a full disk names nothing, and the temporary name helps no reader."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror or error}", str(path)) from error

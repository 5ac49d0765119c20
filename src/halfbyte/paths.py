"""Where models (shipped, in folders, on the Hugging Face Hub) and measured plans of a GPU are, and files written whole."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from halfbyte.errors import CheckpointError, InvalidArgument

#: Words that name the model that comes with the library.
SHIPPED = ("demo", "tiny")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def shipped_model() -> Path:
    """The folder of the small trained model that comes with the library."""
    return Path(__file__).parent / "data" / "tiny"


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


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1


def _model_folder(path: Path, what: str) -> Path:
    if not path.exists():
        raise CheckpointError(f"{what}: there is no folder {path}")
    if not path.is_dir():
        raise CheckpointError(f"{what}: {path} is a file; give the folder that holds config.json and the weights")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{what}: the folder {path} holds no config.json, so it is no model folder of transformers")
    return path


def shipped_plans(gpu: str) -> Path:
    """The file of measured plans that comes with the library for GPUs of this name, if there is one."""
    return Path(__file__).parent / "data" / "plans" / _plans_name(gpu)


def own_plans(gpu: str) -> Path:
    """Where measured plans of GPUs of this name are stored: below XDG_CACHE_HOME, which is ~/.cache unless set."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"))
    return folder / "halfbyte" / "plans" / _plans_name(gpu)


def _plans_name(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def write_whole(path: Path, text: str) -> Path:
    """Write `text` to `path`, its folder made if it is missing; a reader sees the old file or the whole new one, never a part."""
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp makes it private; these files are to be shown
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
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
    with _naming(path):
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.absolute().parent))
        try:
            yield temporary
            os.chmod(temporary, 0o755)
            for file in temporary.iterdir():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
            os.rename(temporary, path)  # fails if someone made the folder meanwhile and put something in it
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error of the system names what was to be written: a full disk names nothing, and the temporary name helps no reader."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror or error}", str(path)) from error

"""What reads untrusted bytes, fuzzed by coverage: `python tests/trust/guided.py TARGET COUNT SEED FOLDER`.

atheris (`pip install atheris`) instruments halfbyte and keeps inputs that reach new code; without it hypothesis draws. A target
fails if anything but `CheckpointError` comes out, or if halfbyte accepts a file that safetensors refuses or reads otherwise. An
input may take 10 s and 1 GB. What fails lies in FOLDER as crash-*.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

from halfbyte.errors import CheckpointError

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["halfbyte.checkpoints"]) if atheris else contextlib.nullcontext():
    from halfbyte.checkpoints import folder_guard, safetensors_files


def header(data: bytes, file: Path) -> None:
    """The JSON of a header, without its length; the first byte says how many bytes of tensors follow it."""
    raw = struct.pack("<Q", len(data[1:])) + data[1:] + bytes(data[:1] and data[0])
    file.write_bytes(raw)
    ours = {name: (list(info.shape), info.end - info.start) for name, info in safetensors_files.read_header(file).items()}
    assert sum(size for _, size in ours.values()) == len(raw) - 8 - len(data[1:])
    theirs = {name: (part["shape"], len(part["data"])) for name, part in safetensors.deserialize(raw)}
    assert ours == theirs, f"safetensors reads {theirs}, halfbyte {ours}"


def whole_file(data: bytes, file: Path) -> None:
    """A safetensors file, length and all."""
    file.write_bytes(data)
    for info in safetensors_files.read_header(file).values():
        assert safetensors_files.read_tensor(info).shape == info.shape


def index(data: bytes, file: Path) -> None:
    """The index of two shards."""
    for name in ("a", "b"):
        shard = file.with_name(f"{name}.safetensors")
        if not shard.exists():
            save_file({name: torch.zeros(1)}, shard)
    file.with_name(safetensors_files.INDEX).write_bytes(data)
    found = safetensors_files.read_folder(file.parent)
    assert {name: info.file.parent for name, info in found.items()} == dict.fromkeys("ab", file.parent)


def configuration(data: bytes, file: Path) -> None:
    """config.json, as it is checked before transformers sees it."""
    file.write_bytes(data)
    folder_guard.check_configuration(file)
    folder_guard.check_layers(file, 4)


_TENSOR = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}
_HEADER = json.dumps({"__metadata__": {"format": "pt"}, "a": _TENSOR}).encode()
_CONFIG = {"model_type": "qwen2", "num_hidden_layers": 2, "text_config": {"layer_types": ["full_attention"], "hidden_size": 64}}
#: A target and good inputs to begin with.
TARGETS: dict[str, tuple[Callable[[bytes, Path], None], list[bytes]]] = {
    "header": (header, [b"\x08" + _HEADER, b"\0{}"]),
    "file": (whole_file, [struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(8)]),
    "index": (index, [json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}).encode()]),
    "configuration": (configuration, [json.dumps(_CONFIG).encode()]),
}
#: What libFuzzer would have to find letter by letter.
_WORDS = (
    "dtype",
    "shape",
    "data_offsets",
    "BF16",
    "F8_E4M3",
    "__metadata__",
    "weight_map",
    "../",
    "num_labels",
    "\\ud800",
    "1e400",
)


def attempt(name: str, data: bytes, folder: Path) -> None:
    with contextlib.suppress(CheckpointError):
        TARGETS[name][0](data, folder / "x.safetensors")


def by_coverage(name: str, count: int, seed: int, folder: Path) -> None:
    """Ends the process."""
    corpus, words = folder / "corpus", folder / "words"
    corpus.mkdir()
    for number, good in enumerate(TARGETS[name][1]):
        (corpus / str(number)).write_bytes(good)
    words.write_text("".join(f'"{word.replace(chr(92), chr(92) * 2)}"\n' for word in _WORDS))
    bounds = {"runs": count, "seed": 1 + seed, "timeout": 10, "rss_limit_mb": 1024, "malloc_limit_mb": 512, "max_len": 4096}
    options = [f"-{name}={value}" for name, value in bounds.items()]
    options += [f"-dict={words}", f"-artifact_prefix={folder}/", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda data: attempt(name, data, folder))
    atheris.Fuzz()


def by_drawing(name: str, count: int, seed: int, folder: Path) -> None:
    import hypothesis
    from hypothesis import strategies as st

    from fuzz import mutate

    damaged = st.builds(mutate, st.sampled_from(TARGETS[name][1]), st.integers().map(random.Random))

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count, database=None, deadline=10_000)
    @hypothesis.given(st.binary() | damaged)
    def draw(data: bytes) -> None:
        attempt(name, data, folder)

    draw()


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen, many, first, where = sys.argv[1:]
    (by_coverage if atheris else by_drawing)(chosen, int(many), int(first), Path(where))

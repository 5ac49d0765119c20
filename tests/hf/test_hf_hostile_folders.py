"""Folders made to hurt: bounded time and memory before transformers sees anything, and only the library's own errors."""

from __future__ import annotations

import json
import os
import resource
import struct
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import halfbyte.hf as hf
from halfbyte.checkpoints import folder_guard
from halfbyte.checkpoints.safetensors_files import check_scales, reach_of, read_folder, read_header, scale_fault
from halfbyte.errors import CheckpointError
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.hf.model_support import read_config
from halfbyte.reference.dequantize import block_scales
from halfbyte.reference.quantize import quantize
from saved_folders import edit, store


@pytest.fixture
def folder(build, tmp_path):
    return hf.save(build("llama"), tmp_path / "model")


def configured(folder: Path, name: str = "config.json", **changes: object) -> None:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refused(folder: Path, match: str = "") -> None:
    """Quickly, and in little memory: the peak of the process may grow by so much. `read_config` does not look at headers."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for read in (hf.load, read_config)[: 1 if "header" in match else 2]:
        with pytest.raises(CheckpointError, match=match):
            read(folder)
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB


@pytest.mark.parametrize("count", [10**6, 2**62, -(10**12), 10**400])
@pytest.mark.parametrize("name", ["num_labels", "num_hidden_layers", "n_layer", "encoder_layers", "hidden_size"])
def test_numbers_that_count(folder, name, count):
    if name == "hidden_size" and abs(count) < 2**40:
        return  # a size; what it makes is held against the files
    configured(folder, **{name: count}) if count < 10**300 else (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", name: 0}).replace(": 0", ": " + "1" * 401)
    )
    refused(folder, "at most")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma2", "gpt_oss", "smollm3"])
def test_layers_that_never_end(folder, kind):
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 10**12}))
    refused(folder, "num_hidden_layers.*at most")


def test_more_layers_than_tensors_anywhere(folder):
    configured(folder, vision_config={"depth": 60_000})
    with pytest.raises(CheckpointError, match="'depth' describes 60000 layers"):
        hf.load(folder)


def test_nested_objects(folder):
    (folder / "config.json").write_text('{"model_type": "llama", "a": [' + ",".join(['{"a":{}}'] * 600_000) + "]}")
    refused(folder, "objects and lists")
    (folder / "config.json").write_text('{"model_type": "llama", "a": ' + "[" * 100 + "]" * 100 + "}")
    refused(folder, "24 levels")
    (folder / "config.json").write_text('{"model_type": "llama", "a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    refused(folder, "objects and lists")
    (folder / "config.json").write_text('{"model_type": "llama", "a": ' + "[" * 30_000 + "]" * 30_000 + "}")
    refused(folder, "no valid JSON|24 levels")  # from Python 3.14 on the parser goes as deep
    (folder / "config.json").write_text(" " * (folder_guard.MAX_BYTES + 1))
    refused(folder, "more than")


def test_long_lists_of_numbers(folder):
    (folder / "config.json").write_text('{"model_type": "llama", "a": [' + ",".join(["1"] * 3_500_000) + "]}")
    refused(folder, "300000 values")


def test_a_header_that_is_most_of_its_file(folder):
    """Small objects take 20 times their text."""
    raw = ("{" + ",".join(f'"{i:x}":{{}}' for i in range(2_000_000)) + "}").encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    refused(folder, "its header takes")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_only_regular_files_in_the_folder(folder, name, tmp_path, tmp_path_factory, monkeypatch):
    file = folder / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    refused(folder, "not a regular file")
    file.unlink()
    file.symlink_to("/dev/zero")
    refused(folder, "a link to /dev/zero, which is neither below")
    file.unlink()
    outside = tmp_path_factory.mktemp("elsewhere") / "other"
    outside.write_text("{}")
    file.symlink_to(outside)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(outside).st_uid + 1)
    refused(folder, "a link to .*other, which is neither below")
    file.unlink()
    file.symlink_to(name)
    refused(folder, "cannot be read|a link to")
    file.unlink()
    file.mkdir()
    refused(folder, "not a regular file")


def test_links_to_files_of_the_user_and_below_the_same_folder_are_followed(folder, tmp_path, tmp_path_factory, monkeypatch):
    for place, user in ((tmp_path / "blobs", 0), (tmp_path_factory.mktemp("elsewhere"), os.stat(folder).st_uid + 1)):
        place.mkdir(exist_ok=True)
        links = tmp_path / f"links {user}"
        links.mkdir()
        for file in folder.iterdir():
            (place / file.name).write_bytes(file.read_bytes())
            (links / file.name).symlink_to(place / file.name)
            if user:
                os.chown(place / file.name, user, -1)
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        assert hf.load(links).config.model_type == "llama"


def test_links_of_the_hubs_cache_are_followed(folder, tmp_path):
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (blobs / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert hf.load(snapshot).config.model_type == "llama"


def test_links_to_blobs_beyond_the_nearest_snapshots_are_refused(tmp_path: Path) -> None:
    """A cache that lies in another's snapshots."""
    outer, inner = tmp_path / "hub", tmp_path / "hub" / "snapshots" / "0123"
    folder = inner / "snapshots" / "4567"
    folder.mkdir(parents=True)
    for cache, refusal in ((inner, nullcontext()), (outer, pytest.raises(CheckpointError, match="a link to"))):
        (cache / "blobs").mkdir()
        (cache / "blobs" / "config.json").write_text("{}")
        (folder / "config.json").unlink(missing_ok=True)
        (folder / "config.json").symlink_to(cache / "blobs" / "config.json")
        with refusal:
            folder_guard.check_folder(folder)


def test_a_junk_tensor_does_not_pay_for_larger_layers(folder):
    tensors = load_file(folder / "model.safetensors")
    store(folder, {**tensors, "junk": torch.zeros(16 << 20, dtype=torch.float16)})
    configured(folder, intermediate_size=100_000)
    with pytest.raises(CheckpointError, match=r"mismatched|missing keys"):
        hf.load(folder)
    gone = {name: t for name, t in tensors.items() if ".mlp." not in name}
    store(folder, {**gone, "junk": torch.zeros(1 << 20, dtype=torch.float16)})
    with pytest.raises(CheckpointError, match="missing keys"):
        hf.load(folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("generation_config.json", {"dtype": [1]}),
        ("generation_config.json", {"max_length": {}}),
        ("config.json", {"transformers_weights": 0}),
        ("config.json", {"model_type": "rwkv"}),
        ("config.json", {"num_attention_heads": 0}),
        ("config.json", {"dtype": [1]}),
    ],
)
def test_no_foreign_exceptions(folder, name, change):
    if not (folder / name).exists():
        (folder / name).write_text("{}")
    configured(folder, name, **change)
    try:
        hf.load(folder)
    except CheckpointError:
        return
    assert name == "generation_config.json"  # transformers may pass over what it does not know


def header(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    entries = change(json.loads(raw[8 : 8 + length]))
    made = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(made)) + made + raw[8 + length :])


@pytest.mark.parametrize("metadata", [1, [], "x", {"a": 1}, {"a": None}, {"a": {}}, {"\ud800": "x"}, {"a": "\udfff"}])
def test_metadata_of_another_type(folder, metadata):
    header(folder, lambda entries: {**entries, "__metadata__": metadata})
    with pytest.raises(CheckpointError, match="__metadata__"):
        read_header(folder / "model.safetensors")
    with pytest.raises(CheckpointError):
        hf.load(folder)


def test_half_a_surrogate_pair_in_a_name(folder):
    header(folder, lambda entries: {name.replace("layers.0", "layers.\ud800"): entry for name, entry in entries.items()})
    with pytest.raises(CheckpointError, match="surrogate"):
        hf.load(folder)


def test_scales_that_overflow(build, tmp_path):
    folder = hf.save(hf.quantize(build("llama"), "int4_g32_fp32"), tmp_path / "quantized")
    edit(folder, lambda t: t["model.layers.0.mlp.up_proj.weight_scales"].view(-1)[3].fill_(3e38))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scales.*infinite"):
        hf.load(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_offset", 262_272),
        ("encoder_hash_byte_group_vocab", 500_002),
        ("log_scaling_n_floor", 128_000),
        ("hashing_key", 15_485_863),
    ],
)
def test_large_numbers_of_real_configurations_pass(name: str, value: int, tmp_path: Path) -> None:
    """Of Gemma 3n, BLT, Inkling and watermarks; the same number of layers is refused."""
    from halfbyte.checkpoints.folder_guard import check_configuration

    file = tmp_path / "config.json"
    file.write_text(json.dumps({name: value}))
    check_configuration(file)
    file.write_text(json.dumps({"num_hidden_layers": value}))
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        check_configuration(file)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (folder_guard.MAX_BYTES, lambda n: "{}" + " " * (n - 2)),
        (folder_guard.MAX_DEPTH, lambda n: '{"a":' + "[" * (n - 1) + "]" * (n - 1) + "}"),
        (folder_guard.MAX_CONTAINERS, lambda n: json.dumps({"a": [{}] * (n - 2)})),
        (folder_guard.MAX_VALUES, lambda n: json.dumps({"a": [0] * (n - 2)})),
        (4 * folder_guard.MAX_CONTAINERS, lambda n: json.dumps({"a": "[" * (n - 1)})),
        (folder_guard.MAX_VALUES, lambda n: json.dumps({"a": "," * n})),
        (folder_guard.MAX_COUNT, lambda n: json.dumps({"num_layers": n})),
        (folder_guard.MAX_COUNT, lambda n: json.dumps({"num_layers": -n})),
        (folder_guard.MAX_SIZE, lambda n: json.dumps({"hidden_size": n})),
    ],
    ids=["bytes", "depth", "containers", "values", "brackets", "commas", "count", "negative count", "size"],
)
def test_a_budget_can_be_spent_and_no_more(budget: int, text: Callable[[int], str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text(budget))
    folder_guard.check_configuration(file)
    file.write_text(text(budget + 1))
    with pytest.raises(CheckpointError, match=r"at most|more than"):
        folder_guard.check_configuration(file)


@pytest.mark.parametrize(("tensors", "most"), [(0, 256), (256, 256), (300, 300)])
def test_as_many_layers_as_tensors(tensors: int, most: int, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for layers in (most, most + 1):
        file.write_text(json.dumps({"parts": [{"num_layers": layers}]}))
        with nullcontext() if layers == most else pytest.raises(CheckpointError, match=f"describes {layers} layers"):
            folder_guard.check_layers(file, tensors)


def test_integers_are_shown_unless_they_are_long(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for value, shown in ((2**64 - 1, str(2**64 - 1)), (2**64, "an integer of 65 bits")):
        file.write_text(json.dumps({"hidden_size": value}))
        with pytest.raises(CheckpointError, match=f"is {shown}; at most"):
            folder_guard.check_configuration(file)


def one_tensor(name: str = "a", shape: list[int] | None = None, size: int = 1, header: int = 0) -> bytes:
    """The beginning of a file with one tensor of bytes, whose header is filled up with spaces."""
    entry = {"dtype": "U8", "shape": [size] if shape is None else shape, "data_offsets": [0, size]}
    text = json.dumps({name: entry}).ljust(header).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("inside", "beyond", "size"),
    [
        (one_tensor(shape=[1] * 16), one_tensor(shape=[1] * 17), 1),
        (one_tensor(shape=[0, 2**62 - 1], size=0), one_tensor(shape=[0, 2**62], size=0), 0),
        (one_tensor(header=4_000_000), one_tensor(header=4_000_001), 1),
        # A header of 5,000,000 bytes is an eighth of its file.
        (one_tensor(size=34_999_992, header=5_000_000), one_tensor(size=34_999_992, header=5_000_001), 34_999_992),
    ],
    ids=["rank", "size", "small header", "share of a header"],
)
def test_a_header_can_be_as_large_as_allowed(inside: bytes, beyond: bytes, size: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for raw in (inside, beyond):
        file.write_bytes(raw)
        os.truncate(file, len(raw) + size)
        with nullcontext() if raw is inside else pytest.raises(CheckpointError, match=r"no lists of sizes|its header takes"):
            (info,) = read_header(file).values()
            assert (info.start, info.end) == (len(raw), len(raw) + size)


def test_a_file_without_tensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2) + b"{}")
    assert read_header(file) == {}
    file.write_bytes(struct.pack("<Q", 3) + b"{}")
    with pytest.raises(CheckpointError, match="claims 3 bytes"):
        read_header(file)


def test_long_names_are_cut_in_what_is_said(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for name, shown in (("n" * 120, "n" * 120), ("n" * 121, "n" * 117 + "...")):
        file.write_bytes(one_tensor(name, size=2) + b"x")
        with pytest.raises(CheckpointError) as refusal:
            read_header(file)
        assert f" {shown!r} needs 2 bytes" in str(refusal.value)


def test_a_shard_has_a_name_that_a_file_can_have(tmp_path: Path) -> None:
    for length in (255, 256):
        name = "n" * (length - 12) + ".safetensors"
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match="the shard is missing" if length == 255 else "not a plain file name"):
            read_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        *((name, scale, "") for name in ("int4_sym_g32", "int8_g128", "int4_g32") for scale in (0.0, 6e-8, 1.0, -1.0)),
        *(("int4_g32", scale, "1 scales of .* that are not finite") for scale in (torch.nan, torch.inf, -torch.inf)),
        ("int4_sym_g32", torch.nan, "1 scales of .* that are not finite"),
    ],
)
def test_scales_that_are_believed(name: str, scale: float, message: str) -> None:
    parts = quantize(torch.ones(3, 128), name).parts()
    parts["scales"].view(-1)[1] = scale
    with pytest.raises(CheckpointError, match=message) if message else nullcontext():
        check_scales("layer", WEIGHT_FORMATS[name], parts)


def test_a_nested_scale_may_be_rounded_below_zero() -> None:
    x = torch.ones(64, 64)
    x[0], x[1] = 0, 3
    made = quantize(x, "nf4_dq")
    assert block_scales(made).min() < 0
    check_scales("layer", made.format, made.parts())


def test_the_largest_code_must_be_finite() -> None:
    """-128 of INT8."""
    most = torch.tensor(torch.finfo(torch.float32).max / 128)
    assert torch.isfinite(-128 * most)
    reach = reach_of(WEIGHT_FORMATS["int8_g128"])
    assert not scale_fault(most, reach)
    assert "infinite" in scale_fault(most.nextafter(torch.tensor(torch.inf)), reach)

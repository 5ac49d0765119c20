"""The file of a cache plan: what is written is read again, and everything else is refused in words that name the place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfbyte.cache_plan import CachePlan, LayerFormats, ModelSizes, read_plan
from halfbyte.errors import InvalidArgument

SIZES = ModelSizes("llama", 3, 2, 64, 64, 256)
PLAN = CachePlan(
    SIZES,
    (LayerFormats("int8", "int4_g32"), LayerFormats("int4", "int4", True), LayerFormats("int4_channel", "bf16")),
    6.5,
    measured={"kl": 0.001},
)
#: Sink and recent tokens, in layers that are quantized on both sides or on none.
EXACT = CachePlan(SIZES, (*PLAN.layers[:2], LayerFormats("bf16", "fp16")), 9.0, 4, 64)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = PLAN.write(tmp_path / "plan.json")
    assert read_plan(path) == read_plan(str(path)) == read_plan(PLAN) == PLAN
    assert read_plan(path).keys == ("int8", "int4", "int4_channel")
    assert read_plan(path).values == ("int4_g32", "int4", "bf16")
    assert read_plan(path).rotate_keys == (False, True, False)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert hash(PLAN) == hash(read_plan(path))


def test_sink_and_recent_tokens(tmp_path: Path) -> None:
    assert read_plan(EXACT.write(tmp_path / "plan.json")) == EXACT
    data = json.loads((tmp_path / "plan.json").read_text())
    assert (data.pop("sink_tokens"), data.pop("recent_tokens")) == (4, 64)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert read_plan(tmp_path / "plan.json") == replace(EXACT, sink_tokens=0, recent_tokens=0)  # as earlier files are
    assert EXACT.exact_tokens((0, 0)) == (4, 64)
    assert PLAN.exact_tokens((2, 8)) == (2, 8)
    with pytest.raises(InvalidArgument, match="plan has sink_tokens=4 and recent_tokens=64 itself"):
        EXACT.exact_tokens((0, 8))


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = PLAN.write(tmp_path / "plan.json")
    with pytest.raises(TypeError):
        replace(PLAN, measured={"kl": object()}).write(path)
    assert read_plan(path) == PLAN
    assert len(list(tmp_path.iterdir())) == 1


def test_another_model_is_named_by_every_difference() -> None:
    PLAN.check_model(SIZES)
    with pytest.raises(InvalidArgument, match=r"another model: layers 3 \(this model: 32\), head_dim 64 \(this model: 128\); "):
        PLAN.check_model(replace(SIZES, layers=32, head_dim=128))


def edited(**changes: Any) -> Any:
    data = json.loads(
        json.dumps({"format": "halfbyte cache plan", "version": 1, "model": vars(SIZES), "bits": 6.5, "measured": {}})
    )
    data["layers"] = [vars(layer) for layer in PLAN.layers]
    return {**data, **changes}


def layers(*numbers: int, **changes: Any) -> list[Any]:
    return [{**vars(layer), **(changes if i in numbers else {})} for i, layer in enumerate(PLAN.layers)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "it is no plan"),
        ({"format": "gguf"}, "it is no plan"),
        (edited(version=2), "version 2; this halfbyte reads 1"),
        (edited(model={"layers": 3}), "expected model_type, layers"),
        (edited(model={**vars(SIZES), "layers": True}), "model="),
        (edited(model={**vars(SIZES), "layers": 5}), "5 layers, and layers has 3 entries: missing layers 3 and 4"),
        *((edited(model={**vars(SIZES), "layers": n}), "sizes of 0 to 2") for n in (10**12, 2**70, 10**300, -1)),
        (edited(model={**vars(SIZES), "layers": 2**31 - 1}), "missing layers 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 and more"),
        (edited(model={**vars(SIZES), "layers": 2}), "2 layers, and layers has 3 entries: unknown layer 2"),
        (edited(layers={"0": {}}), "layers is a dict"),
        (edited(layers=layers(1, rotate_keys=1)), "layer 1 of layers must have exactly"),
        (edited(layers=layers(0, 2, bits=4)), "layers 0 and 2 of layers must have exactly"),
        (edited(layers=layers(0, 2, keys="int3")), r"unknown formats: keys 'int3' \(layers 0 and 2\)"),
        (edited(layers=layers(1, values="int4_channel")), r"values 'int4_channel' \(layer 1\).*per-channel ones for keys only"),
        (edited(layers=layers(1, keys=["int4"])), "unknown formats"),
        (edited(bits="many"), "bits='many'"),
        (edited(bits=float("nan")), "bits=nan"),
        (edited(measured=3), "measured=int"),
        (edited(layers=layers(2, keys="int8", values="int8"), sink_tokens=-1), "sink_tokens=-1.*layers 0, 1 and 2"),
        (edited(layers=layers(2, keys="int8", values="int8"), recent_tokens="64"), "recent_tokens='64'"),
        (edited(layers=layers(2, keys="int8", values="int8"), recent_tokens=True), "recent_tokens=True"),
        (edited(layers=layers(2, keys="int8", values="int8"), recent_tokens=2**31), "recent_tokens=2147483648"),
        (edited(layers=layers(2, values="int8"), recent_tokens=64), r"keys='int4_channel' quantizes 32 tokens.*\(layer 2\)"),
        (edited(layers=layers(0, 2, keys="int8", values="bf16"), sink_tokens=4), r"values='bf16' is a 16.*\(layers 0 and 2\)"),
        (edited(layers=layers(0, 1, 2, keys="bf16", values="bf16"), sink_tokens=4), "keys='bf16' is a 16-bit format"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, data: Any, message: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(data))
    with pytest.raises(InvalidArgument, match=message) as error:
        read_plan(file)
    assert "x.json" in str(error.value)


def test_files_that_hold_no_json(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for raw, message in (
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 200_000, "no JSON"),
        (b" " * 2_000_000, "longer than"),
    ):
        file.write_bytes(raw)
        with pytest.raises(InvalidArgument, match=message):
            read_plan(file)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(InvalidArgument, match="plan is a int"):
        read_plan(3)  # type: ignore[arg-type]

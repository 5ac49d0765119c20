"""Calibrated keys: the same attention in float64, fewer errors at few bits, kept in files that fit one model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import halfbyte.hf as hf
from halfbyte.calibrated_keys import CalibratedKeys, KeyTransform, key_transform, read_calibration
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.formats import key_format, value_format
from halfbyte.hf.attention import Attended, attention
from halfbyte.hf.cache_layers import LayerOptions, PackedLayer
from halfbyte.hf.recorded_step import _key
from halfbyte.kv_buffer import HeadNorms, Rope
from halfbyte.reference.block import Norm, rms_norm
from halfbyte.reference.rope import apply_rope
from halfbyte_lab.evals.calibrate_keys import Moments, calibrate_keys, geometric_mean, sensitivity


def calibrated(model, ids) -> CalibratedKeys:
    hf.quantize(model, keys="bf16", values="bf16")
    return calibrate_keys(model, ids.repeat(1, 200 // ids.shape[1]), 32)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_attention_is_the_same_in_float64(build, prompt, family):
    """A prompt reads its own keys unquantized, transformed or not. Norms of Qwen3, a window of Mistral, a softcap of Gemma 2 and
    sinks of gpt-oss; the last two have no shift, and gpt-oss computes in float32."""
    model, ids = build(family), prompt(2, 40)
    keys = calibrated(model, ids)
    assert all((layer.shift is None) == (family in ("gemma2", "gpt_oss")) for layer in keys.layers)
    wide = family != "gpt_oss"
    model = model.double() if wide else model
    expected, actual = (_prompt_logits(model, ids, calibration) for calibration in (None, keys))
    torch.testing.assert_close(actual, expected, **({"rtol": 1e-9, "atol": 1e-9} if wide else {"rtol": 1e-4, "atol": 1e-4}))


def _prompt_logits(model, ids, calibration):
    cache = hf.PackedCache(model, 64, keys="int8", values="int8", calibration=calibration)
    assert all(("calibrated" in layer.kinds) == (calibration is not None) for layer in cache.packed)
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True).logits


def test_fewer_errors_at_four_bits(build, prompt):
    """Keys with a large mean and directions that queries hardly read."""
    model, ids = build("qwen2"), prompt(2, 40)
    with torch.no_grad():
        for layer in model.model.layers:
            attn, size = layer.self_attn, torch.logspace(-1, 1, model.config.hidden_size // model.config.num_attention_heads)
            groups = model.config.num_attention_heads // model.config.num_key_value_heads
            heads = len(attn.k_proj.bias) // len(size)
            attn.k_proj.weight *= size.repeat(heads)[:, None]
            attn.k_proj.bias.copy_(10 * torch.randn(attn.k_proj.bias.shape, generator=torch.Generator().manual_seed(0)))
            attn.q_proj.weight /= size.repeat(heads * groups)[:, None]
    keys = calibrated(model, ids)
    other = prompt(2, 48, seed=1)
    losses = []
    for calibration in (None, keys):
        runs = []
        for fmt in ("bf16", "int4"):
            cache = hf.PackedCache(model, 64, keys=fmt, values="bf16", calibration=calibration)
            cache.expect_steps(8)
            with torch.no_grad():
                runs.append(torch.cat([model(x, past_key_values=cache, use_cache=True).logits for x in other.split(8, 1)], 1))
        losses.append((runs[1] - runs[0]).norm())
    assert losses[1] < 0.75 * losses[0]


def test_the_geometric_mean_is_the_best_matrix():
    """Noise of scores, tr(M^-1 Sq M^-T) tr(M^T Sk M), against other matrices near it; and keys become as queries."""
    torch.manual_seed(0)
    sq, sk = (x @ x.mT for x in torch.randn(2, 3, 8, 32, dtype=torch.float64))
    root = torch.linalg.cholesky(geometric_mean(sq, sk))

    def noise(m):
        inverse = torch.linalg.inv(m)
        return (inverse @ sq @ inverse.mT).diagonal(dim1=1, dim2=2).sum(1) * (m.mT @ sk @ m).diagonal(dim1=1, dim2=2).sum(1)

    for _ in range(20):
        assert bool((noise(root) <= noise(root + 0.01 * torch.randn(3, 8, 8)) * (1 + 1e-9)).all())
    inverse = torch.linalg.inv(root)
    torch.testing.assert_close(inverse @ sq @ inverse.mT, root.mT @ sk @ root, rtol=1e-8, atol=1e-8)


def test_moments_of_a_window_in_chunks_and_without_its_first_tokens():
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 60, 8), torch.randn(1, 2, 60, 8)
    options = {"softcap": None, "s_aux": None, "scaling": None, "sliding_window": 20}
    sums, same = Moments(), Moments()
    for part in (slice(0, 3), slice(3, 10), slice(10, 60)):
        sums.append(Attended(nn.Module(), q[:, :, part], k[:, :, part], k[:, :, part], options))
    same.append(Attended(nn.Module(), q, k, k, options))
    for name in ("k", "kk", "qq", "by_key", "by_query"):
        torch.testing.assert_close(getattr(sums, name), getattr(same, name), rtol=1e-4, atol=1e-5)
    assert sums.tokens == same.tokens == 60
    first = torch.cat([torch.full((1, 2, 4, 8), 1e4), k[:, :, 4:]], 2)
    sums.begin()
    sums.append(Attended(nn.Module(), q, first, k, options))
    assert bool((sums.kk.abs() < 1e4).all())
    short = Moments()
    short.append(Attended(nn.Module(), q[:, :, :20], k[:, :, :20], k[:, :, :20], options))
    with pytest.raises(InvalidArgument, match="text has 20 tokens"):
        short.transform()


def test_pairs_count_as_their_scores_change_the_output():
    """Against derivatives of attention by scores, with a softcap, a window and sinks, and queries behind other tokens."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 5, 8).double(), torch.randn(1, 2, 12, 8).double(), torch.randn(1, 2, 12, 8).double()
    options = {"softcap": 3.0, "s_aux": torch.randn(4), "scaling": 0.7, "sliding_window": 6}
    actual = sensitivity(Attended(nn.Module(), q, k[:, :, 7:], v[:, :, 7:], options), k.float(), v.float())
    scores = 3 * (0.7 / 3 * q.unflatten(1, (2, 2)) @ k[:, :, None].mT).tanh()
    back = torch.arange(7, 12)[:, None] - torch.arange(12)
    scores = scores.masked_fill((back < 0) | (back >= 6), -torch.inf)

    def out(s):
        sinks = options["s_aux"].double().view(1, 2, 2, 1, 1).expand(*s.shape[:-1], 1)
        return torch.cat([s, sinks], -1).softmax(-1)[..., :-1] @ v[:, :, None]

    for at in ((0, 0, 1, 2, 5), (0, 1, 0, 4, 11), (0, 1, 1, 0, 3)):
        step = torch.zeros_like(scores)
        step[at] = 1e-6
        slope = (out(scores + step) - out(scores - step))[at[:4]] / 2e-6
        torch.testing.assert_close(actual[at].double(), slope.square().sum(), rtol=1e-4, atol=1e-6)


def test_what_a_step_rotates_by_position_is_transformed_in_the_same_place():
    """`update` with q, rope and norms gives attention what the family's own norms and rotation give it."""
    torch.manual_seed(0)
    transform = key_transform(torch.eye(16) + torch.randn(2, 16, 16) / 8, torch.randn(2, 16))
    q, k, v = (torch.randn(1, heads, 3, 16) for heads in (4, 2, 2))
    norms, table = HeadNorms(torch.rand(16), torch.rand(16), 1e-6, "rounded"), torch.rand(2, 3, 8)

    def handles(k, **of_positions):
        layer = PackedLayer(64, LayerOptions(key_format("int8"), value_format("int8"), True, torch.bfloat16, transform=transform))
        return layer.update(k, v, **of_positions)

    fused = handles(k, q=q, rope=Rope(*table), norms=norms)
    q, k = (apply_rope(rms_norm(x, Norm(w, 1e-6, "rounded")), *table) for x, w in ((q, norms.q), (k, norms.k)))
    own = handles(k)
    assert own[0].rotated is None
    for pair in (fused, own):
        pair[0].layer.longest_step = 3  # which reads what is stored
    results = [attention(nn.Module(), x, *pair, None)[0] for x, pair in ((fused[0].rotated, fused), (q, own))]
    torch.testing.assert_close(*results)


def test_shifted_keys_are_refused_where_scores_are_capped():
    transform = key_transform(torch.eye(16).expand(1, 16, 16), torch.zeros(1, 16))
    layer = PackedLayer(64, LayerOptions(key_format("int8"), value_format("int8"), True, torch.bfloat16, transform=transform))
    x = torch.randn(1, 1, 2, 16)
    handles = layer.update(x, x)
    for option in ({"softcap": 30.0}, {"s_aux": torch.zeros(1)}):
        with pytest.raises(Unsupported, match="softcap or sinks"):
            attention(nn.Module(), x, *handles, None, **option)


def test_rotations_by_oscar_are_read(build, prompt, greedy, tmp_path):
    """One rotation for all heads, and one for each: attention in float64 is as without; other files and models are refused."""
    model, ids = build("llama").double(), prompt(2, 40)
    layers, heads, dim = 2, 2, model.model.layers[0].self_attn.head_dim
    expected = _prompt_logits(hf.quantize(model, keys="int8", values="int8"), ids, None)
    for version, shape in ((1, (dim, dim)), (2, (heads, dim, dim))):
        rotations = {i: {"layer_id": i, "rotation": torch.linalg.qr(torch.randn(shape))[0]} for i in range(layers)}
        stored = {"format_version": version, "objective": "qqt_r_h_pbr", "source_grouping": "layer", "layers": rotations}
        file = tmp_path / "k_rotation.pt"
        torch.save(stored, file)
        torch.testing.assert_close(_prompt_logits(model, ids, file), expected, rtol=1e-9, atol=1e-9)
    for change, error, says in (
        ({"objective": "sst_r_h_pbr"}, Unsupported, "a rotation of values"),
        ({"format_version": 3}, InvalidArgument, "format_version 1 or 2"),
        ({"layers": {0: {"rotation": torch.ones(dim, dim)}}}, InvalidArgument, "expected orthogonal matrices"),
        ({"layers": {0: {"rotation": torch.eye(dim)}}}, InvalidArgument, r"layers 1 \(this model: 2\)"),
        ({"layers": {i: {"rotation": torch.eye(2 * dim)} for i in range(layers)}}, InvalidArgument, "another model: head_dim"),
        ({"layers": [partial]}, InvalidArgument, "no rotations by OSCAR"),
    ):
        torch.save({**stored, **change}, file)
        with pytest.raises(error, match=says):
            hf.PackedCache(model, 64, calibration=file)


@pytest.fixture
def model_and_keys(build, prompt, tmp_path):
    model = build("llama")
    return model, calibrated(model, prompt(2, 40)).write(tmp_path / "keys.safetensors")


def test_it_is_saved_with_the_model_and_with_no_other_file(model_and_keys, greedy, prompt, tmp_path):
    model, file = model_and_keys
    hf.quantize(model, keys="int4", values="int4", calibration=file, sink_tokens=4)
    again = hf.load(hf.save(model, tmp_path / "saved"))
    for ours, theirs in zip(model.generate.settings.calibration.layers, again.generate.settings.calibration.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(greedy(again, prompt()), greedy(model, prompt()), strict=True))
    assert {p.name for p in (tmp_path / "saved").glob("*.safetensors")} == {"model.safetensors"}
    model.save_pretrained(tmp_path / "without")
    with pytest.raises(CheckpointError, match=r"halfbyte\.hf\.save"):
        hf.load(tmp_path / "without")


def test_keys_of_another_model_are_refused(model_and_keys, build):
    model, file = model_and_keys
    with pytest.raises(InvalidArgument, match=r"model_type llama \(this model: qwen3"):
        hf.quantize(build("qwen3"), keys="int4", values="int4", calibration=file)
    with torch.no_grad():
        model.model.norm.weight[0] += 0.5
    for use in (partial(hf.quantize, model, keys="int4"), partial(hf.PackedCache, model, 64)):
        with pytest.raises(InvalidArgument, match="another model: other weights of its norms"):
            use(calibration=file)
    with pytest.raises(InvalidArgument, match="calibration"):
        hf.quantize(model, weights="int8_col", calibration=file)


def test_a_damaged_file_is_refused(model_and_keys, tmp_path):
    _, file = model_and_keys
    tensors = load_file(file)
    with safe_open(file, "pt") as stream:
        metadata = stream.metadata()
    first = "layer.0.matrix"
    cases = {
        "format and version": (tensors, {"version": "1"}),
        "damaged": (tensors, {**metadata, "model": "{}"}),
        "layer.1.matrix": ({name: t for name, t in tensors.items() if name != "layer.1.matrix"}, metadata),
        "expected finite": ({**tensors, first: tensors[first] * float("nan")}, metadata),
        "layer 0": ({**tensors, first: tensors[first][:1].clone()}, metadata),
        "singular": ({**tensors, first: tensors[first] * 0}, metadata),
        "unexpected": ({**tensors, "more": torch.zeros(1)}, metadata),
    }
    for message, case in cases.items():
        save_file(*case[:1], tmp_path / "bad.safetensors", case[1])
        with pytest.raises(InvalidArgument, match=message):
            read_calibration(tmp_path / "bad.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-5])
    for path in ("cut.safetensors", "missing.safetensors"):
        with pytest.raises(InvalidArgument, match="halfbyte calibrate"):
            read_calibration(tmp_path / path)
    with pytest.raises(InvalidArgument, match="calibration is a int"):
        read_calibration(3)  # type: ignore[arg-type]


def test_a_recorded_step_belongs_to_its_calibration(model_and_keys):
    model, file = model_and_keys
    keys, again = read_calibration(file), read_calibration(file)
    caches = [hf.PackedCache(model, 64, keys="int4", calibration=x) for x in (keys, keys, again, None)]
    steps = [_key(model, cache, torch.zeros(1, 1)) for cache in caches]
    assert steps[0] == steps[1]
    assert len(set(steps)) == 3


def test_layers_in_16_bits_have_no_transform(model_and_keys):
    model, file = model_and_keys
    cache = hf.PackedCache(model, 64, keys="int4", values="int4", skip_layers=(0,), calibration=file)
    assert [isinstance(layer.transform, KeyTransform) for layer in cache.packed] == [False, True]

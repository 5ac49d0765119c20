"""The published split-K kernel as a peer, in Triton's interpreter: its layout and its numbers, however it is cut."""

from __future__ import annotations

import pytest
import torch

import halfbyte
from halfbyte.device import Device
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.tensors import QuantTensor
from halfbyte_lab.cases import linear_baselines
from halfbyte_lab.cases.decompositions import DATA_PARALLEL, EVERY, KERNELS
from halfbyte_lab.cases.linear_targets import INT4, PUBLISHED
from halfbyte_lab.cases.published_split_k import SPLITS, GptqWeight, programs, published

FAKE = Device("cpu", "fake", memory_bytes=2**30, cache_bytes=0, cores=1, threads=1)


def weight(n: int, k: int) -> QuantTensor:
    return halfbyte.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(0)) / 16, INT4)


def test_the_layout_is_that_of_gptq() -> None:
    w = weight(32, 256)
    stored = GptqWeight.of(w)
    assert (stored.qweight.shape, stored.qzeros.shape, stored.scales.shape) == ((32, 32), (2, 4), (2, 32))
    for k, n in ((0, 0), (9, 3), (255, 31)):
        code = (int(stored.qweight[k // 8, n]) >> (4 * (k % 8))) & 15
        zero = ((int(stored.qzeros[k // 128, n // 8]) >> (4 * (n % 8))) & 15) + 1
        assert (code - zero) * float(stored.scales[k // 128, n]) == pytest.approx(float(w.dequantize()[n, k]), abs=1e-7)


@pytest.mark.parametrize("split", [1, *SPLITS])
def test_the_product_however_it_is_split(split: int) -> None:
    w, x = weight(32, 512), torch.randn(19, 512, generator=torch.Generator().manual_seed(1)).half()
    ref = x.double() @ w.dequantize(torch.float64).T
    y = published(x, GptqWeight.of(w), split)
    assert float((y.double() - ref).norm() / ref.norm()) < 2e-3
    assert programs(19, 32, split) == 2 * split


def test_as_a_peer_and_in_the_study() -> None:
    w, x = weight(32, 256), torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    names = {peer.name: peer for peer in linear_baselines.low_bit(w, lambda n: 2)}
    peer = names[PUBLISHED]
    judge = linear_baselines.judged_loosely(peer.values, x)
    assert all(judge(call(peer.before(x))).ok for call in peer.calls)
    kernel = KERNELS["published"]
    stored = kernel.store([w, w])
    form = kernel.form(x, stored, DATA_PARALLEL, FAKE)
    assert (form.programs, form.waves(FAKE), len(form.calls)) == (1, 1.0, 2)
    assert judge(kernel.form(x, stored, EVERY[1], FAKE).calls[1]()).ok
    with pytest.raises(Unsupported, match="no stream-K form"):
        kernel.form(x, stored, EVERY[-1], FAKE)


def test_other_weights_are_refused() -> None:
    for w in (
        weight(40, 256),
        halfbyte.quantize(torch.randn(32, 256), "int4_g128"),
        halfbyte.quantize(torch.randn(32, 256), "nf4"),
    ):
        with pytest.raises(InvalidArgument, match="the published kernel takes int4_sym_g128"):
            GptqWeight.of(w)

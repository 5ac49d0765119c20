"""The decode step of one rank, in small: what is timed, what is refused, what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from benches import CPU, GPU, quick

from halfbyte_lab.cases.rank import LLAMA_2_70B, ONE_OF_EIGHT, Entry, Model, Product, Rank, Step, entries
from halfbyte_lab.measure import caches, decode
from halfbyte_lab.measure.caches import DecodeCase
from halfbyte_lab.measure.checks import BenchmarkRefused
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.studies import capacity, decode_70b

SMALL = Rank(hidden=128, q_heads=4, kv_heads=1, dim=32, ffn=64, layers=6, vocabulary=48)


def job(batch: int = 2, context: int = 64) -> decode_70b.StepJob:
    return decode_70b.StepJob(Model(SMALL, CPU, 2, 3), batch, context)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_are_shares_of_the_model(ranks: int) -> None:
    rank = LLAMA_2_70B.shared(ranks)
    weights = ranks * (80 * rank.layer_bytes(fp8=False) + 2 * rank.head_bytes)
    # every KV head is on one rank, so nothing is held twice; the norms' weights are left out
    assert weights / 2 == pytest.approx(68.98e9, rel=1e-3)
    assert ranks * rank.cache_bytes(1, 1, "bf16") == 2 * 8 * 2 * 128
    with pytest.raises(BenchmarkRefused, match="16 ranks cannot share kv_heads=8"):
        LLAMA_2_70B.shared(16)


def test_a_rank_of_eight() -> None:
    rank = ONE_OF_EIGHT
    assert (rank.q_heads, rank.kv_heads, rank.ffn, rank.vocabulary) == (8, 1, 3584, 4000)
    assert rank.cache_bytes(1, 1, "bf16") == 2 * 2 * 128
    # As the published kernel's rows.
    assert (rank.cache_bytes(1, 1, "int4"), rank.cache_bytes(1, 1, "int4_g32")) == (2 * 68, 2 * 80)
    assert rank.layer_bytes(fp8=True) == 2 * 8192 * (1280 + 1024) + 3 * 8192 * 3584


def test_a_step_is_what_a_decoder_layer_does() -> None:
    model = Model(SMALL, CPU, 2)
    inputs = caches.Inputs.random(DecodeCase("p", SMALL.shape(2, 8)), torch.device("cpu"))
    rotation = caches.Rotation(caches.fill(inputs, "bf16"), inputs, 2)
    rotation.restore_short()
    step = Step(model, rotation.caches, 8, lambda q, cache: decode.attend(q, cache, "auto"))
    with torch.no_grad():
        (q, out), _ = step.layer(0), step.layer(1)
        logits = step.logits(0)
    assert rotation.caches[0].lengths.tolist() == [8, 8]
    k, v = rotation.caches[0].dequantized()
    assert not torch.equal(k[:, :, -1], inputs.spans[0][0][:, :, -1].float())  # its own token was appended
    exact = torch.softmax(q.float() @ k.mT * 32**-0.5, -1) @ v
    assert (out.float() - exact).abs().max() < 0.02
    assert logits.shape == (2, 48)
    first = step.logits(0)
    rotation.restore_short()
    with torch.no_grad():
        step.layer(0), step.layer(1)
    assert torch.equal(step.logits(0), first)  # from the start again, and not on from where the last pass ended


def test_a_product_in_fp8() -> None:
    w, x = torch.randn(32, 64), torch.randn(3, 64)
    scales = (torch.tensor(1.0), torch.tensor(0.125))
    y = Product(w.to(torch.float8_e4m3fn), scales)(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert F.cosine_similarity(y.float().flatten(), (x @ w.T).flatten(), 0) > 0.99
    assert float(y.float().norm() / (x @ w.T).norm()) == pytest.approx(0.125, rel=0.05)


def test_every_way_is_timed_and_scaled_to_all_layers() -> None:
    measured = quick().run([job()])
    timed = [r for r in measured if r.op == decode_70b.OP]
    assert [r.formats for r in timed] == ["bf16", "bf16", "int4", "int4_g32"]
    for r in timed:
        assert r.seconds
        assert r.p10
        assert r.p10 <= r.seconds
        assert r.error is not None
        assert r.error_allowed is not None
        assert r.error <= r.error_allowed
        assert "2 layers timed, times 3" in r.method
        assert "bf16" in r.method
        assert r.nbytes == SMALL.step_bytes(2, 64, r.formats, False)
    far = {r.formats: r.error for r in measured if r.op == decode_70b.LOGITS}
    assert 0 < (far["int4_g32"] or 0) <= 1.5 * (far["int4"] or 0) < 1
    headers, rows = decode_70b.table(measured)
    assert len(rows) == 1
    assert len(rows[0]) == len(headers)
    assert "" not in rows[0]
    assert len(decode_70b.drawn(measured)) == 1
    assert "batch 2 x 64" in decode_70b.says(measured)[0]


def test_logits_must_be_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "logits", lambda self, i: torch.tensor([0.0, torch.nan]))
    assert all("not finite" in r.refused for r in quick().run([job()]))


def test_what_does_not_fit_is_marked_and_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    one = decode_70b.StepJob(Model(ONE_OF_EIGHT, GPU, 4), 256, 16384)._case
    where = Session(Options(), GPU)
    bf16, int4 = (one.blank(where, Entry("it", f, lambda q, cache: q)) for f in ("bf16", "int4"))
    assert "does not fit: 80 layers take 182." in bf16.refused
    assert "of 141.0" in bf16.refused
    assert not int4.refused
    timed = replace(int4, seconds=1e-2)
    row = decode_70b.table([bf16, timed])[1][0]
    assert row[4:6] == ("does not fit", "10.00")
    assert decode_70b.says([bf16, replace(timed, formats="int4_g32")])[0].startswith("1 of 1 cases do not fit")
    assert one.refused(int4, torch.OutOfMemoryError("x")).refused.endswith("does not fit: out of memory")


def test_jobs_by_device_and_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    *found, two_ranks = decode_70b.jobs(quick())
    assert (len(found), two_ranks.name) == (2, "on 2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    full = decode_70b.jobs(Session(Options(), GPU))
    assert [job.name for job in full[-2:]] == ["on 2", "on 4"]
    full = [job for job in full if isinstance(job, decode_70b.StepJob)]
    assert {(j.batch, j.context) for j in full} >= {(1, 2048), (256, 16384)}
    assert len({id(j.model) for j in full}) == 1
    assert full[0].model.fp8
    assert [e.implementation for e in entries("cuda")][:2] == ["torch sdpa cudnn", "torch sdpa flash"]
    assert quick(pattern="nothing").run([job()]) == []


# -------------------------------------------------------------------------------------------------------------------- capacity


def test_the_largest_batch_fits_and_eight_more_do_not() -> None:
    rank, memory = ONE_OF_EIGHT, 141 * 10**9
    for formats in capacity.FORMATS:
        batch = capacity.largest(rank, 8192, formats, True, memory)
        assert batch % 8 == 0
        assert rank.held_bytes(batch, 8192, formats, True) <= 0.9 * memory < rank.held_bytes(batch + 8, 8192, formats, True)
    assert capacity.largest(rank, 8192, "bf16", True, 10**9) == 0


def test_capacity_is_measured_where_it_fits() -> None:
    model = Model(SMALL, CPU, 2, 3)
    memory = int((SMALL.held_bytes(8, 64, "bf16", False) + 1) / 0.9)
    jobs = [capacity.CapacityJob(model, 64, formats, memory) for formats in ("bf16", "int4")]
    plain, packed = quick().run(jobs)
    assert (plain.shape["B"], plain.shape["fits"], plain.implementation[:10]) == (8, 8, "torch sdpa")
    assert packed.shape["B"] > 16
    assert packed.seconds
    headers, rows = capacity.table([plain, packed])
    assert [row[-1] for row in rows] == ["measured"] * 2
    assert all(len(row) == len(headers) for row in rows)
    assert float(rows[1][6]) == pytest.approx(capacity.tokens_per_second(packed) / capacity.tokens_per_second(plain), abs=0.01)
    assert capacity.gpu_hours(plain) == pytest.approx(8e6 * (plain.seconds or 0) / 8 / 3600)
    assert quick().run([capacity.CapacityJob(model, 64, "bf16", 10)]) == []


def test_capacity_is_derived_from_recorded_steps_and_says_so() -> None:
    def step(batch: int, formats: str, seconds: float) -> Record:
        shape = {"B": batch, "Hq": 8, "H": 1, "D": 128, "T": 8192}
        return Record(decode_70b.OP, shape, formats, "it", 1, quick().environment, seconds=seconds, case=f"batch {batch}")

    recorded = [step(b, f, 0.006 + b * t) for f, t in (("bf16", 8e-5), ("int4", 2e-5)) for b in (64, 128, 256)]
    plain, packed = capacity.derived([*recorded, replace(recorded[0], implementation="slower", seconds=1.0)])
    assert plain.shape["B"] == plain.shape["fits"] == capacity.largest(ONE_OF_EIGHT, 8192, "bf16", True, capacity.MEMORY) > 256
    assert plain.seconds == pytest.approx(0.006 + plain.shape["B"] * 8e-5)
    assert (packed.shape["B"], packed.shape["fits"] > 512) == (512, True)
    assert packed.method == "derived: a line through recorded steps of batch 128, 256"
    assert capacity.table([plain, packed])[1][1][-1] == "derived"
    against, how = capacity.says([plain, packed])
    assert against.startswith("Over 8,192 tokens a bf16 cache gives ")
    assert "not measured" in how
    assert how.endswith("misses its step by 0 to 0 %.")
    assert capacity.derived(recorded[:2]) == []
    assert capacity.says([]) == []
    assert capacity.nearest([1, 8, 32], 4) == (1, 8)
    assert capacity.nearest([1, 8, 32], 1) == (1, 8)


def test_without_a_gpu_the_recorded_steps_speak() -> None:
    (job,) = capacity.jobs(quick())
    found = list(job.measure(quick()))
    assert {r.environment.device for r in found} == {"NVIDIA H200"}
    assert all(r.method.startswith("derived") for r in found)
    assert len(capacity.drawn(found)) == 1
    gpu = capacity.jobs(Session(Options(), GPU))
    assert len(gpu) == len(capacity.CONTEXTS) * len(capacity.FORMATS)

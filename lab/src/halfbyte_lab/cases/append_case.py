"""The append of one token, held against a kernel that copies as many bytes; what it writes must be what the specification says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from halfbyte.cache import KVCache
from halfbyte.kv_buffer import KVBuffer
from halfbyte.reference import append as reference
from halfbyte_lab.cases.chain import blank, refused_record
from halfbyte_lab.cases.targets import judge, targets_of
from halfbyte_lab.measure.caches import DecodeCase, Inputs, Rotation, clone, fill, parts_of
from halfbyte_lab.measure.checks import Accuracy
from halfbyte_lab.measure.records import Record, with_timing
from halfbyte_lab.measure.session import Session
from halfbyte_lab.measure.timing import NOT_CAPTURED, Timing, Work, fixed_threads, make_sampler, sample_in_turn, summary


@dataclass(frozen=True)
class AppendJob:
    """The append of one token to every sequence, beside a kernel that copies as many bytes."""

    problem: DecodeCase
    formats: tuple[str, ...]
    op: str = "append"

    @property
    def name(self) -> str:
        return self.problem.name

    def measure(self, session: Session) -> Iterator[Record]:
        """One record for each format."""
        for formats in self.formats:
            if session.wants(self.name, formats, "halfbyte auto"):
                try:
                    yield self._measure(session, formats)
                except Exception as error:
                    yield replace(refused_record(session, self.problem, formats, "auto", error), op=self.op)
                session.free()

    def _measure(self, session: Session, formats: str) -> Record:
        inputs = Inputs.random(self.problem, session.device.torch)
        cache, token = fill(inputs, formats), inputs.last()
        read = sum(t.nbytes for t in token)
        nbytes = read + round(cache.batch * cache.bytes_per_token)
        rotation = Rotation(cache, inputs, session.copies(nbytes))
        tokens = [token, *((token[0].clone(), token[1].clone()) for _ in rotation.caches[1:])]
        fns = [partial(c.append, *pair) for c, pair in zip(rotation.caches, tokens, strict=True)]
        works = {name: Work(fns, rotation.restore_short, paired=name == "paired") for name in ("alone", "paired")}
        expected = _appended(cache, token)
        with torch.no_grad(), fixed_threads(session.threads):
            samplers = {name: make_sampler(name, work, session.device, session.effort) for name, work in works.items()}

            def check(when: str) -> Accuracy:
                for name, sampler in samplers.items():
                    rotation.plant_decoys()
                    sampler.run()
                    accuracy = _alike(rotation.caches, expected)
                    accuracy.require(f"{self.name} {formats} {name}{when}")
                return accuracy

            check("")
            samples = sample_in_turn(samplers, session.effort)
            accuracy = check(", as it was timed")
            kernels = session.kernel_seconds({"alone": works["alone"]}).get("alone")
        copy = session.roofline.copy_seconds(nbytes)
        times = {name: summary(samples[name], sampler.method) for name, sampler in samplers.items()}
        return replace(self._record(session, formats, nbytes, accuracy, times, copy), kernel_seconds=kernels)

    def _record(
        self, session: Session, formats: str, moved: int, accuracy: Accuracy, times: dict[str, Timing], copy: float
    ) -> Record:
        timing = times["paired"]
        over = None if NOT_CAPTURED in timing.method else timing.median - copy
        record = replace(blank(session, self.problem, formats, "halfbyte auto", moved), op=self.op)
        return replace(
            with_timing(record, timing, accuracy),
            alone=times["alone"].median,
            paired=timing.median,
            gb_per_s=moved / timing.median / 1e9,
            peer="copy kernel",
            peer_seconds=copy,
            bars=judge(targets_of(self.name, formats), {"over_copy": over}),
            note=f"a copy kernel of as many bytes takes {1e6 * copy:.2f} us",
        )


def _appended(cache: KVCache, token: tuple[torch.Tensor, torch.Tensor]) -> tuple[KVBuffer, KVBuffer]:
    """What the planes of a full cache hold after its newest token was appended as the specification says."""
    keys, values = clone(cache.keys), clone(cache.values)
    reference.append_(*token, None, keys, values, cache.lengths - 1, cache.page_table, cache.rotate_keys)
    return keys, values


def _alike(caches: Sequence[KVCache], expected: tuple[KVBuffer, KVBuffer]) -> Accuracy:
    """How many caches are not bit for bit what is expected."""

    def same(cache: KVCache) -> bool:
        pairs = zip((cache.keys, cache.values), expected, strict=True)
        return all(torch.equal(t, parts_of(want)[name]) for plane, want in pairs for name, t in parts_of(plane).items())

    return Accuracy(float(sum(not same(cache) for cache in caches)), 0.0, "caches unlike the specification's")

"""Several ways to attend over the same cache, judged, then timed in turn: what studies of decode attention are made of.

Times are alone, launches kept apart, unless a way says that its launches overlap. Nothing is appended between calls. Results are
judged before and after: those of every call of the graphs that are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from halfbyte.cache import KVCache
from halfbyte.errors import Unsupported, check
from halfbyte.ops.by_plan import prepare
from halfbyte.plans.decode_portable import TritonTiles
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte_lab.measure.caches import Inputs, Promise, Rotation, fill, held_by
from halfbyte_lab.measure.checks import Accuracy
from halfbyte_lab.measure.records import Record, with_timing
from halfbyte_lab.measure.session import Session
from halfbyte_lab.measure.timing import NOT_CAPTURED, Work, is_cold
from halfbyte_lab.measure.trials import Trial

#: Judges several results [B, Hq, 1, D] of one case.
Judge = Callable[[Sequence[torch.Tensor]], Accuracy]
#: So many times the last cache leave next to nothing of themselves in it, so that one copy is a rotation.
_LARGE = 32


@dataclass(frozen=True)
class DecodeVariant:
    """One way to attend.

    call    gives [B, Hq, 1, D] for a full cache
    paired  whether launches may overlap while this runs
    sizes   what the record's shape says besides the problem's: programs, say
    """

    call: Callable[[KVCache], torch.Tensor]
    paired: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)


def measure_variants(
    session: Session,
    op: str,
    inputs: Inputs,
    formats: str,
    variants: Callable[[KVCache], Mapping[str, DecodeVariant]],
    rotate_keys: bool | None = None,
) -> list[Record]:
    """A record for each of the `variants` of a cache in `formats` that holds the inputs; one that fails or is wrong says why."""
    problem = inputs.problem
    session.free()
    cache = fill(inputs, formats, rotate_keys)
    nbytes = round(problem.tokens * cache.bytes_per_token)
    copies = max(2, session.copies(nbytes) if session.device.kind == "cuda" else 0)  # on a CPU studies run small, and say so
    caches = Rotation(cache, inputs, copies).caches
    blank = Record(op, problem.shape.sizes, formats, "", nbytes, session.environment, case=problem.name)
    return time_variants(session, blank, caches, Promise(inputs.q, held_by(cache)).judge, variants(cache))


def time_variants(
    session: Session,
    blank: Record,
    caches: Sequence[KVCache],
    judge: Judge,
    variants: Mapping[str, DecodeVariant],
    roof: bool = True,
) -> list[Record]:
    """The same over a rotation of caches. `blank` is what the records share; without `roof` they do not know the read roofline."""
    cold = is_cold(len(caches), blank.nbytes, session.device.cache_bytes) or blank.nbytes >= _LARGE * session.device.cache_bytes
    if session.device.kind == "cuda":
        prepare(session.device.torch)  # counters for all graphs: one that must clear its own takes longer
    trials = {
        name: Trial(name, Work([partial(v.call, c) for c in caches], paired=v.paired), lambda outs: judge(list(outs)))
        for name, v in variants.items()
    }
    outcomes = session.time(trials)
    kernels = session.kernel_seconds({name: trials[name].work for name, outcome in outcomes.items() if outcome.timing})
    records = []
    for name, outcome in outcomes.items():
        variant, timing, accuracy = variants[name], outcome.timing, outcome.accuracy
        r = replace(blank, shape={**blank.shape, **variant.sizes}, implementation=name)
        if timing and accuracy:
            r = with_timing(r, replace(timing, method=timing.method + ("" if cold else ", partly from cache")), accuracy)
            r = session.against_roofline(r) if roof else replace(r, gb_per_s=r.nbytes / timing.median / 1e9)
            how = {"chained" if variant.paired else "alone": timing.median}
            records.append(replace(r, kernel_seconds=kernels.get(name), **how))  # type: ignore[arg-type]
        else:
            records.append(replace(r, refused=f"{r.case} {r.formats} {name}: {outcome.refused}"))
    return records


def fastest(measured: Sequence[Record]) -> Record | None:
    """The record with the shortest time; on a GPU only times of graphs count."""
    return min((r for r in measured if r.seconds and NOT_CAPTURED not in r.method), key=lambda r: r.seconds or 0.0, default=None)


Plan = DecodePlan | TritonTiles

#: Where the shares of so many programs begin is computed in 32 bits (`share` in kernels/common/shares.py).
MOST_PROGRAMS = 2**15
#: The fewest tokens of a tile that one warp works on.
_LEAST_TOKENS = 16


def split(plan: Plan, splits: int, context: int) -> Plan:
    """The same with so many splits of each unit, `context` tokens long. Raises `Unsupported` for what the kernel cannot do.

    A split has one tile at least. Where that asks for more tiles than there are, the tuned kernel takes smaller ones.
    """
    check(splits >= 1, f"splits={splits}; a unit has at least one")
    if isinstance(plan, TritonTiles):
        blocks = -(-context // plan.block_tokens)
        if splits > blocks:
            raise Unsupported(f"{splits} splits of {context} tokens; the portable kernel has {blocks} blocks of them")
        return replace(plan, splits=splits, chunk=0)
    programs, spec = splits * plan.work_items, plan.spec
    if programs > MOST_PROGRAMS:
        raise Unsupported(f"{splits} splits of {plan.work_items} work items; the tuned kernel has at most {MOST_PROGRAMS} programs")
    while splits > -(-context // spec.tile) and spec.tokens > _LEAST_TOKENS:
        spec = replace(spec, tokens=spec.tokens // 2)
    if splits > -(-context // spec.tile):
        raise Unsupported(f"{splits} splits of {context} tokens; the tuned kernel's tiles have {spec.tile} at least")
    return replace(plan, spec=spec, programs=programs, why=f"{splits} splits asked for")


def splits_of(plan: Plan) -> float:
    """Splits of a unit; where programs of the tuned kernel share units, how many of them there are for each, in the mean."""
    return float(plan.splits) if isinstance(plan, TritonTiles) else plan.programs / plan.work_items


def launches(plan: Plan) -> int:
    """Kernels of a call: 2 where a second one adds the splits up."""
    return 2 if isinstance(plan, TritonTiles) and plan.splits > 1 else 1

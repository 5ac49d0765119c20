"""`python -m halfbyte_lab tune`: measure the plans of this GPU and store them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.shared import Json, integers, words
from halfbyte.errors import InvalidArgument, Unsupported, check
from halfbyte_lab.options import check_writable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfbyte_lab.measure.session import Session
    from halfbyte_lab.tune.search import LinearTuning, Store

#: What is measured unless sizes are given: the projections of Llama-3-8B and 70B; with --quick one of them.
_LINEAR, _QUICK_LINEAR = "4096x4096,6144x4096,28672x4096,4096x14336,8192x8192,10240x8192,57344x8192,8192x28672", "4096x4096"
_ROWS, _QUICK_ROWS = "1,2,4,8,16", "1,16"


def tune(
    linear: Annotated[
        str,
        typer.Option(
            help="Linear layers, out x in features, such as 4096x4096,6144x4096; fused q, k and v 4096,1024,1024x4096, "
            "fused gate and up 14336,14336x4096. Default: the layers of Llama-3-8B and 70B."
        ),
    ] = "",
    rows: Annotated[
        str,
        typer.Option(help=f"Batch sizes M, default {_ROWS}. A plan serves M up to the next power of two: 3 and 4 share one."),
    ] = "",
    weights: Annotated[str, typer.Option(help="Weight formats, such as int4_g128,mxfp4.")] = "int4_sym_g128",
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer candidates; without --linear one layer with M = 1 and 16."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Store the plans in this file, for HALFBYTE_PLANS, instead of the default place."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be measured; without a GPU, for an H200.")
    ] = False,
    device: Annotated[str | None, typer.Option("--device", help="cuda or cuda:N; default: the first GPU.")] = None,
    as_json: Json = False,
) -> None:
    """Time how else the GEMM kernels could run (tiles, stages, programs), and store what beats the plan that the rules give.

    Processes that start later use what is stored; `halfbyte explain` says which plan a call gets (docs/internals/tuning.md).
    """
    from halfbyte.paths import own_plans
    from halfbyte.plans.tuning_cache import Table
    from halfbyte_lab.measure.session import Options, Session
    from halfbyte_lab.tune.search import SCREEN, Store

    if not linear:
        linear, rows = (_QUICK_LINEAR, rows or _QUICK_ROWS) if quick else (_LINEAR, rows)
    make = _jobs(products(linear), integers(rows or _ROWS, "rows"), words(weights))
    if dry_run:
        check(not as_json, "--json prints what was measured, and --dry-run measures nothing; leave one of them out")
        _list(make(Store(Path(), Table("", 0))), quick)
        return
    check_writable(output, "output")
    session = Session.start(Options(quick=quick, json=as_json, device=device), SCREEN)
    if session.device.kind != "cuda":
        raise Unsupported("tune measures kernels on an NVIDIA GPU and there is none here; --dry-run says what would be measured")
    gpu, versions = session.device, session.environment.versions | {"driver": session.device.driver}
    store = Store(output or own_plans(gpu.name), Table(gpu.name, gpu.sm_count or 1, {}, versions), anew=output is None)
    store.entries()  # a file that cannot be added to is refused now, and not after the measuring
    _run(session, make(store), store)


def _jobs(
    linear: Sequence[tuple[tuple[int, ...], int]],
    rows: Sequence[int],
    weights: Sequence[str],
) -> Callable[[Store], list[LinearTuning]]:
    """What is to be measured, checked; its store is known later."""
    from halfbyte.formats import weight_format
    from halfbyte_lab.tune.search import LinearTuning

    for option, values in (("rows", rows), ("weights", weights)):
        check(bool(values), f"--{option} names nothing to measure; give one or more, separated by commas")
    for size in (*rows, *(n for features, width in linear for n in (*features, width))):
        check(size > 0, f"rows and features must be above 0; got {size}")
    for (features, width), name in itertools.product(linear, weights):
        weight_format(name).check_shape((max(features), width), f"weights={name!r}: a weight")
    return lambda store: [LinearTuning(*one, w, m, store) for one, w, m in itertools.product(linear, weights, rows)]


def _run(session: Session, jobs: Sequence[LinearTuning], store: Store) -> None:
    from halfbyte_lab.precompile import compile_ahead
    from halfbyte_lab.tune.search import HEADERS, left_out, says, table_rows

    searches = [job.planned(session.device.gpu, session.options.quick) for job in jobs]
    compile_ahead(((one.problem, plan) for one in searches for plan in one.plans.values()), session.device.gpu.capability)
    session.run(jobs)
    if not session.options.json:
        session.show_tables(f"plans on {session.device.name}", [(HEADERS, table_rows(session.records))], text_columns=2)
    for line in (*left_out(session.records), says(session.records)):
        session.say(line)
    session.say(f"{len(store.entries())} problems in {store.file}; processes that run already keep their plans")
    if session.interrupted:
        raise typer.Exit(130)
    if all(record.refused for record in session.records):
        raise typer.Exit(1)


def _list(jobs: Sequence[LinearTuning], quick: bool) -> None:
    """What would be measured on the GPU here, else on an H200."""
    from halfbyte.cli.inspect import this_gpu
    from halfbyte.device import gpu_count

    gpu = this_gpu()
    searches = [(job, job.planned(gpu, quick)) for job in jobs]
    for job, one in searches:
        print(f"{job.name}, {job.formats}: {one.refused or f'{len(one.plans)} choices'}")
    kernels = {(type(one.problem), plan.spec) for _, one in searches for plan in one.plans.values()}
    choices = sum(len(one.plans) for _, one in searches)
    where = f"{gpu.name}{'' if gpu_count() else '; there is no GPU here'}"
    print(f"{len(searches)} problems, {choices} choices, {len(kernels)} kernels to compile, for {where}")


def products(text: str) -> list[tuple[tuple[int, ...], int]]:
    """4096x4096,6144x4096 or 4096,1024,1024x4096 as (out features of each weight, in features), launch by launch."""
    one = r"\d+(?:,\d+){0,2}x\d+"
    if text and not re.fullmatch(rf"{one}(,{one})*", text):
        raise InvalidArgument(f"--linear {text!r}; give out features x in features, such as 6144x4096 or 4096,1024,1024x4096")
    pairs = [product.split("x") for product in re.findall(one, text)]
    return [(tuple(map(int, outs.split(","))), int(width)) for outs, width in pairs]

"""Commands about this machine, a model's configuration and plans: doctor, memory, explain."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte import settings
from halfbyte.cli.options import Dtype
from halfbyte.cli.shared import (
    Json,
    LmHead,
    Model,
    RecentTokens,
    SinkTokens,
    console,
    human_bytes,
    integers,
    print_facts,
    print_table,
    token_count,
    words,
)
from halfbyte.errors import InvalidArgument, check, laboratory

if TYPE_CHECKING:
    from halfbyte.device import GPU
    from halfbyte.doctor import Diagnosis
    from halfbyte.memory import Estimate


def doctor(
    check_kernels: Annotated[
        bool, typer.Option("--check", help="Also compare every kernel with the reference, which compiles them: minutes on a GPU.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Versions, hardware, what runs here and why. Never crashes."""
    from halfbyte.doctor import checks, diagnose

    diagnosis = diagnose()
    if not as_json:
        _print_diagnosis(diagnosis)
    results = []
    for one in checks() if check_kernels else ():
        results.append(one)
        if not as_json:
            print_facts({"": one}, "  ", 0)
    if as_json:
        print(json.dumps(diagnosis.to_dict() | ({"checks": [asdict(one) for one in results]} if check_kernels else {}), indent=2))
    failures = sum(one.failed for one in results)
    if check_kernels and not as_json:
        print(f"{len(results)} checks, {failures} failed" + "; please send this report to halfbyte's authors" * (failures > 0))
    if failures:
        raise typer.Exit(1)


def _print_diagnosis(found: Diagnosis) -> None:
    sections = {"versions": found.versions, "machine": found.machine, "ops": found.ops, "settings": found.settings}
    for title, facts in sections.items():
        print(title)
        print_facts(facts, "  ", 18)
    for title, lines in (("notes", found.notes), ("problems", found.problems)):
        if lines:
            print(title)
        for line in lines:
            print_facts({"": line}, "  ", 0)
    if not found.problems:
        print("no problems found")


def memory(
    model: Model,
    batch: Annotated[int, typer.Option(help="Sequences in the batch.")] = 1,
    context: Annotated[
        int, typer.Option(parser=token_count, metavar="TOKENS", help="Tokens of each sequence, such as 8192 or 128K.")
    ] = 8192,
    keys: Annotated[str, typer.Option(help="Format of the cached keys.")] = settings.KEYS,
    values: Annotated[str, typer.Option(help="Format of the cached values.")] = settings.VALUES,
    weights: Annotated[
        str | None,
        typer.Option(help=f"Format of linear layers; bf16: unquantized. Default: {settings.WEIGHTS}, or the model's own."),
    ] = None,
    lm_head: LmHead = "bf16",
    skip_layers: Annotated[str, typer.Option(help="Layers whose cache stays in 16 bits, such as 0,1,-1.")] = "",
    sink_tokens: SinkTokens = 0,
    recent_tokens: RecentTokens = 0,
    fit: Annotated[
        str, typer.Option("--memory", help="Also print how many tokens fit in 90 % of this much memory, such as 24GB.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Memory of a model and its cache, from the configuration alone."""
    from halfbyte.memory import estimate, parse_bytes

    result = estimate(
        model,
        batch=batch,
        context=context,
        keys=keys,
        values=values,
        weights=weights,
        lm_head=lm_head,
        skip_layers=integers(skip_layers, "skip-layers"),
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        memory=parse_bytes(fit) if fit else None,
    )
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _print_estimate(result)


def _print_estimate(e: Estimate) -> None:
    from halfbyte.memory import RESERVED

    head = "" if e.lm_head == "bf16" else f"{e.lm_head} lm_head, "
    per_token = e.plain_kv_bytes / (e.batch * e.context)
    sizes: list[tuple[str, float, float]] = [
        ("weights", e.plain_weight_bytes, e.weight_bytes),
        ("KV cache per token", per_token, e.kv_bytes_per_token),
        ("KV cache", e.plain_kv_bytes, e.kv_bytes),
        ("together", e.plain_total_bytes, e.total_bytes),
    ]
    rows = [(name, human_bytes(a), human_bytes(b), f"{a / b:.2f}x" if b else "") for name, a, b in sizes]
    if e.memory is not None and e.tokens_that_fit is not None and e.plain_tokens_that_fit is not None:
        ratio = f"{e.tokens_that_fit / e.plain_tokens_that_fit:.2f}x" if e.plain_tokens_that_fit else ""
        rows.append(
            (
                f"tokens in {1 - RESERVED:.0%} of {human_bytes(e.memory)}",
                f"{e.plain_tokens_that_fit:,}",
                f"{e.tokens_that_fit:,}",
                ratio,
            )
        )
    print_table(f"{e.model}: {e.batch:,} x {e.context:,} tokens", ("", "16 bits", "packed", "ratio"), rows, text_columns=1)
    say = console().print
    say(
        f"packed: {e.weights} weights, {head}{e.keys} keys, {e.values} values. {e.parameters:,} parameters, "
        f"{e.quantized_parameters:,} of them quantized; {e.kv_layers} layers with a cache of {e.kv_heads} heads x {e.head_dim}. "
        "Activations come on top.",
        highlight=False,
    )
    for note in e.notes:
        say(f"note: {note}", markup=False, highlight=False)


def explain(
    context: typer.Context,
    linear: Annotated[
        str,
        typer.Option(
            help="A linear layer instead of attention, out x in features: 6144x4096; fused q, k and v 4096,1024,1024x4096; "
            "fused gate and up 14336,14336x4096."
        ),
    ] = "",
    weights: Annotated[str, typer.Option(help="With --linear: weight format, or one for each weight.")] = "int4_g128",
    rows: Annotated[int, typer.Option(help="With --linear: batch size M.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences in the batch.")] = 1,
    heads: Annotated[str, typer.Option(help="Query heads / KV heads.")] = "32/8",
    dim: Annotated[int, typer.Option(help="Head dim.")] = 128,
    capacity: Annotated[
        int,
        typer.Option(
            "--context", "--capacity", parser=token_count, metavar="TOKENS", help="Capacity of the cache in tokens a sequence."
        ),
    ] = 8192,
    queries: Annotated[int, typer.Option(help="New tokens a sequence.")] = 1,
    keys: Annotated[str, typer.Option(help="Format of the cached keys.")] = settings.KEYS,
    values: Annotated[str, typer.Option(help="Format of the cached values.")] = settings.VALUES,
    page: Annotated[int, typer.Option(help="Page size in tokens; 0: contiguous.")] = 0,
    sink_tokens: SinkTokens = 0,
    recent_tokens: RecentTokens = 0,
    dtype: Dtype = settings.HALVES[0],
    deterministic_batch: Annotated[bool, typer.Option("--deterministic-batch", help="Batch-invariant attention.")] = False,
    sms: Annotated[int, typer.Option(help="Number of multiprocessors; 0: this machine's GPU, or the 132 of an H200.")] = 0,
    capability: Annotated[str, typer.Option(help="Compute capability; empty: this machine's GPU, or 9.0.")] = "",
    compile_it: Annotated[
        bool, typer.Option("--compile", help="Compile the tuned kernel, which needs no GPU: registers, spills, occupancy.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Which kernel a GPU runs for decode attention or a linear layer: tiles, splits, reasons."""
    from halfbyte.plans.explain import explanation, linear_explanation
    from halfbyte.plans.tuning_cache import NO_TABLE, table_of

    major, minor = _one_pair(capability, ".", "capability", "9.0") if capability else (0, 0)
    check(not capability or (8 <= major < 100 and 0 <= minor < 10), f"capability={capability!r}; the kernels run from 8.0 on")
    for option, value in (("sms", sms), ("page", page)):
        check(value < 2**31, f"{option}={value}; it must be below 2^31")
    here = this_gpu()
    by_numbers = bool(sms or capability)  # of such a GPU nothing is stored
    target = here._replace(num_sms=sms or here.num_sms, capability=(major, minor) if capability else here.capability)
    gpu: dict[str, Any] = {"gpu": target._replace(name="") if by_numbers else target}
    if compile_it:
        gpu["resources"] = laboratory("precompile", "--compile").resources
    _check_belongs(context, bool(linear))
    if linear:
        table = NO_TABLE if by_numbers else table_of(here.name, here.num_sms)
        facts = linear_explanation(*_features(linear), words(weights), rows, dtype, **gpu, table=table)
    else:
        q_heads, kv_heads = _one_pair(heads, "/", "heads", "32/8")
        shape, formats = (batch, q_heads, kv_heads, dim, capacity, queries), (keys, values, page, dtype)
        facts = explanation(*shape, *formats, deterministic_batch, **gpu, window=(sink_tokens, recent_tokens))
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print_facts(facts, "", max(map(len, facts)) + 1)


#: Options of `explain` that say something about a linear layer only, and about both.
_OF_LINEAR, _OF_BOTH = {"weights", "rows"}, {"linear", "dtype", "sms", "capability", "compile_it", "as_json"}


def _check_belongs(context: typer.Context, linear: bool) -> None:
    """Refuse an option that would be ignored."""
    for name in sorted(set(context.params) - _OF_BOTH):
        source = context.get_parameter_source(name)
        if (name in _OF_LINEAR) != linear and source is not None and source.name != "DEFAULT":
            about = "describes attention; leave it out with --linear" if linear else "describes a linear layer; add --linear"
            raise InvalidArgument(f"--{name.replace('_', '-')} {about}")


def _one_pair(text: str, separator: str, option: str, example: str) -> tuple[int, int]:
    """One pair of whole numbers, such as 32/8 or 9.0."""
    try:
        first, second = text.split(separator)
        return int(first), int(second)
    except ValueError:
        raise InvalidArgument(f"--{option} {text!r}; give two whole numbers, such as {example}") from None


def _features(text: str) -> tuple[list[int], int]:
    """6144x4096 or 4096,1024,1024x4096 as (out features of each weight, in features)."""
    outs, _, width = text.rpartition("x")
    try:
        return [int(n) for n in outs.split(",")], int(width)
    except ValueError:
        raise InvalidArgument(
            f"--linear {text!r}; give out features x in features, such as 6144x4096, or 4096,1024,1024x4096 for q, k and v"
        ) from None


def this_gpu() -> GPU:
    """The GPU here, else an H200."""
    from halfbyte.device import H200, describe, gpu_count

    return describe("cuda").gpu if gpu_count() else H200

"""Study `fused-qkv`: block-wise dequantization inside the projection of q, k and v, in the four published variants.

The published study has GPT-2's layer, 128 tokens, on an RTX 3090, and finds the two-kernel variant 20 to 25 % faster than naive for
MXFP4 and NF4, and semi-fused best for NVFP4. Here Llama's layers, 8B and 70B, come on top, each layer in 16 bits, and one launch
for q, k and v against three. `python -m halfbyte_lab qkv --weights DIR` runs the same on an extract of a model; `evaluate` extracts
first. On a CPU: GPT-2's layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte_lab.cases import figures, qkv_cases, qkv_layers
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table
from halfbyte_lab.measure.timing import MANY_GRAPHS
from halfbyte_lab.studies import Study

LLAMA_70B = qkv_layers.AttentionShape("Llama-3-70B layer", 8192, 64, 8, 128)


def jobs(session: Session) -> Sequence[Job]:
    """Each layer with all variants, then one launch against three."""
    return jobs_on(session, qkv_layers.shipped_weights(qkv_layers.GPT2), "auto")


def jobs_on(session: Session, first: qkv_layers.Weights, impl: str) -> Sequence[Job]:
    """The same with other weights in place of GPT-2's."""
    layers = [first]
    if session.device.kind == "cuda" and not session.options.quick:
        layers += [qkv_layers.random_weights(qkv_layers.LLAMA), qkv_layers.random_weights(LLAMA_70B)]
    return qkv_cases.jobs(layers, impl, session.device.kind, session.options.quick)


def table(measured: Sequence[Record]) -> Table:
    """A row for each layer, format and variant, then for each way to compute q, k and v."""
    return qkv_cases.table(measured)


def charts(measured: Sequence[Record]) -> list[str]:
    """End to end, then launch by launch."""
    return [*figures.end_to_end(measured), *figures.of_variants(measured)]


def says(measured: Sequence[Record]) -> list[str]:
    """The two-kernel variant against naive and against 16 bits, by layer and format; what is fastest; one launch against three."""
    reference = "published for GPT-2's layer on an RTX 3090, not measured here: 20 to 25 % faster, 0.80 to 0.83, for MXFP4 and NF4"
    naive, sixteen = (_shares(measured, over) for over in (qkv_layers.NAIVE, qkv_layers.SIXTEEN))
    sentences = [
        f"Time of the two-kernel variant over that of naive: {naive} ({reference})." * bool(naive),
        f"Over that of 16-bit weights: {sixteen}." * bool(sixteen),
        _fastest_said(measured),
        _launches_said(measured),
    ]
    return [sentence for sentence in sentences if sentence]


def _times(measured: Sequence[Record]) -> dict[tuple[str, str, str], float]:
    """Seconds by layer, format and variant."""
    return {(r.case, r.formats, r.implementation): r.seconds for r in measured if r.op == qkv_cases.OP and r.seconds}


def _shares(measured: Sequence[Record], over: str) -> str:
    """ "GPT-2 layer, nf4: 0.61; ...": time of the two-kernel variant over that of another."""
    times = _times(measured)
    return "; ".join(
        f"{case}, {formats}: {two / other:.2f}"
        for (case, formats, name), two in times.items()
        if name == qkv_layers.TWO_KERNEL and (other := times.get((case, formats, over)))
    )


def _fastest_said(measured: Sequence[Record]) -> str:
    """Which of the published variants is fastest, by layer and format."""
    by_case: dict[tuple[str, str], dict[str, float]] = {}
    for (case, formats, name), seconds in _times(measured).items():
        if name != qkv_layers.SIXTEEN:
            by_case.setdefault((case, formats), {})[name] = seconds
    parts = [
        f"{case}, {formats}: {min(times, key=lambda v: times[v])}" for (case, formats), times in by_case.items() if len(times) > 1
    ]
    return f"Fastest of the four: {'; '.join(parts)}." if parts else ""


def _launches_said(measured: Sequence[Record]) -> str:
    times = {(r.case, r.formats, r.implementation): r.seconds for r in measured if r.op == qkv_cases.FUSED_OP and r.seconds}
    gains = [
        three / one
        for (case, formats, name), one in times.items()
        if name == qkv_cases.ONE and (three := times.get((case, formats, qkv_cases.THREE)))
    ]
    if not gains:
        return ""
    return f"One launch for q, k and v is {min(gains):.2f} to {max(gains):.2f} times as fast as three, over {len(gains)} cases."


STUDY = Study("fused-qkv", table, charts, says, text_columns=3, effort=MANY_GRAPHS, jobs=jobs)

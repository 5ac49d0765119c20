"""Study `fused-qkv`: block-wise dequantization inside the projection of q, k and v, in the four published variants.

The published study has GPT-2's layer, 128 tokens, on an RTX 3090, and finds the two-kernel variant 20 to 25 % below naive for MXFP4
and NF4, and semi-fused best for NVFP4. Here Llama's layers, 8B and 70B, come on top, and one launch for q, k and v against three.
`python -m benchmarks qkv --weights DIR` runs the same on an extract of a model. On a CPU: GPT-2's layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import figures, qkv_cases, qkv_layers
from benchmarks.studies import Study
from halfbyte.measure.records import Record
from halfbyte.measure.session import Job, Session
from halfbyte.measure.tables import Table
from halfbyte.measure.timing import MANY_GRAPHS

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


def says(measured: Sequence[Record]) -> list[str]:
    """The two-kernel variant against naive by layer and format, and one launch against three."""
    return [told for told in (_variants_said(measured), _launches_said(measured)) if told]


def _variants_said(measured: Sequence[Record]) -> str:
    times = {(r.case, r.formats, r.implementation): r.seconds for r in measured if r.op == qkv_cases.OP and r.seconds}
    shares = [
        f"{case}, {formats}: {two / naive:.2f}"
        for (case, formats, name), two in times.items()
        if name == qkv_layers.TWO_KERNEL and (naive := times.get((case, formats, qkv_layers.NAIVE)))
    ]
    published = "published for GPT-2's layer on an RTX 3090, not measured here: 0.75 to 0.80 for MXFP4 and NF4"
    return f"Time of the two-kernel variant over that of naive: {'; '.join(shares)} ({published})." if shares else ""


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


STUDY = Study("fused-qkv", jobs, table, figures.of_variants, says, text_columns=3, effort=MANY_GRAPHS)

"""How the benchmarks' records are shown: cases with targets, baselines, q k v and each study; all others plainly, by operation."""

from __future__ import annotations

from halfbyte_lab import studies
from halfbyte_lab.cases import figures, linear_targets, literature, qkv_cases, targets
from halfbyte_lab.measure.figures import of_any
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.report_sections import Section, plain, plain_table

#: What records of baselines are marked with, as those of a study are.
BASELINES_MARK = "peers"

DECODE = Section("Decode attention and appends, with bars", targets.table, figures.of_attention)
LINEAR = Section(
    "Linear layers, with bars",
    linear_targets.table,
    figures.of_linear,
    lambda measured: (f"Quoted: {literature.SOURCE}.",),
    text_columns=3,
)
QKV = Section("Products for q, k and v", qkv_cases.table, figures.of_variants, text_columns=3)
BASELINES = Section("Peers", plain_table, of_any, text_columns=3)


def of_study(study: studies.Study) -> Section:
    """A study brings its own."""
    return Section(study.name, study.table, study.charts, study.says, study.text_columns, study.asks, study.also)


def section_of(r: Record) -> Section:
    """The section of one record. A study that is not known here is shown plainly."""
    if r.study in studies.QUESTIONS:
        return of_study(studies.study(r.study))
    if r.case and r.op in targets.OPS and not r.study:
        return DECODE
    if r.case and r.op == "linear" and not r.study:
        return LINEAR
    if r.study == BASELINES_MARK:
        return BASELINES
    if r.op in (qkv_cases.OP, qkv_cases.FUSED_OP):
        return QKV
    return plain(r.op)

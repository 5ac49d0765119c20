"""`python -m halfbyte_lab evaluate MODEL DIR`: one attention layer of a model through every variant and format, as files.

DIR gets `weights/` (as `halfbyte extract` writes them), records.jsonl, results.md, end-to-end.svg and breakdown.svg.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from halfbyte.cli.shared import check_new_folder
from halfbyte.errors import check
from halfbyte_lab.cases import figures, qkv_cases, qkv_layers, suites
from halfbyte_lab.cases.report_sections import section_of
from halfbyte_lab.extract import load_layer
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.records import Record, read
from halfbyte_lab.options import RunOptions, run_suites
from halfbyte_lab.studies import fused_qkv

WEIGHTS, RECORDS, RESULTS = "weights", "records.jsonl", "results.md"


def evaluate(options: RunOptions, model: str, folder: Path, layer: int) -> None:
    """Extract, measure, write. What was measured before an interrupt or a failure stays in the records."""
    check(options.output is None, f"--output: the records go to {folder / RECORDS}")
    check_new_folder(folder)
    charts.check_installed()
    load_layer(model, layer).save(folder / WEIGHTS)
    given = qkv_layers.extracted_weights(folder / WEIGHTS)
    formats = qkv_cases.QUICK_FORMATS[-1:] if options.quick else qkv_cases.FORMATS
    suite = replace(suites.study(fused_qkv.STUDY.name), jobs=lambda _: [qkv_cases.VariantsJob(given, "auto", formats)])
    run_suites(replace(options, output=folder / RECORDS), given.shape.name, lambda _: [suite], section_of)
    write(read(folder / RECORDS).records, folder)


def write(measured: list[Record], folder: Path) -> None:
    """The table with what it shows, and the charts of the one layer in the records."""
    headers, rows = fused_qkv.table(measured)
    lines = [f"| {' | '.join(cells)} |" for cells in (headers, ["---"] * len(headers), *rows)]
    where = f"{measured[0].environment.device}; {measured[0].environment.date}"
    text = "\n\n".join([where, *fused_qkv.says(measured), "\n".join(lines)])
    (folder / RESULTS).write_text(text + "\n", encoding="utf-8")
    for name, drawn in (("end-to-end", figures.end_to_end), ("breakdown", figures.of_variants)):
        for chart in drawn(measured):
            (folder / f"{name}.svg").write_text(chart, encoding="utf-8")

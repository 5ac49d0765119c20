"""Studies: one published table or one question each, measured again and told as a table, charts and two sentences.

A study is one file of this folder that ends with a `STUDY`; `python -m benchmarks study NAME` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from halfbyte.errors import InvalidArgument
from halfbyte.measure.records import Record
from halfbyte.measure.session import Job, Session
from halfbyte.measure.tables import Table
from halfbyte.measure.timing import GRAPHS, Effort

#: What each study asks, by its name on the command line; its file has underscores where the name has hyphens.
QUESTIONS = {
    "int4-gqa": "8 query heads on one KV head over 8,192 tokens: BF16 and INT4 by batch and splits",
    "int4-ladder": "what each step from the portable kernel to the tuned one as planned is worth, in INT4",
    "int8-granularity": "INT8 with a scale per tensor, token, head or group against FP16: time, bytes, error",
    "int8-splitk": "one sequence of 1,024 tokens in INT8: splits, order in memory, one launch or two, lengths",
    "w4a16-splitk": "how the work of a product with 1 to 16 rows is cut: data-parallel, split-K, stream-K",
    "fused-qkv": "weights dequantized inside the projection of q, k and v: the four published variants, launch by launch",
    "accuracy": "error and perplexity against bits an element on the shipped model, keys rotated and with a bias",
    "quality-per-bit": "divergence and attention error against bits by format and method, with and without outliers",
    "memory": "what fits: the longest context by model, card, weights, batch and KV format",
    "prompts": "attention of a prompt's tokens, over themselves and over a packed past, against 16 bits",
    "decode-70b": "a decode step of one of eight ranks of Llama 2 70B: BF16 against INT4 caches by batch and context",
}


@dataclass(frozen=True)
class Study:
    """What is measured and how it is told.

    jobs    what a session measures: small with `session.options.quick`, and on a CPU
    table   headers, and rows of text
    charts  <svg> elements
    says    two sentences that hold the figures
    text_columns  columns of the table that hold text, from the left; the others hold numbers
    """

    name: str
    jobs: Callable[[Session], Sequence[Job]]
    table: Callable[[Sequence[Record]], Table]
    charts: Callable[[Sequence[Record]], Sequence[str]]
    says: Callable[[Sequence[Record]], Sequence[str]]
    text_columns: int = 2
    effort: Effort = GRAPHS

    @property
    def asks(self) -> str:
        """The question in one line."""
        return QUESTIONS[self.name]


def study(name: str) -> Study:
    """The study of that name; its file is read now. Raises `InvalidArgument`."""
    if name not in QUESTIONS:
        raise InvalidArgument(f"study {name!r}; choose one of: {', '.join(QUESTIONS)}")
    found: Study = import_module(f"{__name__}.{name.replace('-', '_')}").STUDY
    return found

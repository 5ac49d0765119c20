"""Studies: one published table or one question each, measured again and reported as a table, charts and two sentences.

A study is one file of this folder that ends with a `STUDY`; `python -m halfbyte_lab study NAME` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

from halfbyte.errors import InvalidArgument
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.report_sections import Section
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.timing import GRAPHS, Effort

#: What each study asks, by its name on the command line; its file has underscores where the name has hyphens.
QUESTIONS = {
    "int4-gqa": "8 query heads on one KV head over 8,192 tokens: BF16 and INT4 by batch and splits",
    "int4-ladder": "INT4 decode attention: what each step from the portable to the tuned kernel gains",
    "int8-granularity": "INT8 with a scale per tensor, token, head or group against FP16: time, bytes, error",
    "int8-splitk": "INT8, one sequence of 1,024 tokens: number of splits, memory layout, one launch or two, unequal lengths",
    "w4a16-splitk": "INT4 GEMM with M = 1 to 16: data-parallel, split-K and stream-K schedules",
    "fused-qkv": "dequantization fused into the q, k, v projection: the four published variants, launch by launch",
    "accuracy": "error and perplexity against bits per element on the shipped model; rotated keys, keys with a bias",
    "quality-per-bit": "divergence and attention error against bits by format and method, with and without outliers",
    "evidence": "what formats cost a real model: divergence, perplexity, agreement and retrieval on news, code and chats",
    "memory": "the longest context that fits, by model, GPU, weights, batch and KV format",
    "prompts": "prefill attention over the prompt itself and over a packed past, compared with 16 bits",
    "engines": "append and attention of an engine's step over packed pages: against vLLM's kernels, decode_attention and 16 bits",
    "capacity": "tokens a second and GPU time with the largest batch that fits, by context and KV format; Llama 2 70B on 8 GPUs",
    "step": "a decode step of whole models through generate(): tokens a second, and where its time goes, launch by launch",
    "decode-70b": "a decode step of Llama 2 70B on 2 and 4 GPUs and of one rank of 8: BF16 and INT4 caches by batch and context",
}


@dataclass(frozen=True, kw_only=True)
class Study(Section):
    """A section, whose title is the study's name, and what is measured for it.

    jobs    what a session measures: small with `session.options.quick`, and on a CPU
    derive  what records of other studies say, where this one was not measured
    beside  another study, whose records the charts get as well
    """

    jobs: Callable[[Session], Sequence[Job]]
    effort: Effort = GRAPHS
    derive: Callable[[Sequence[Record]], Sequence[Record]] = lambda recorded: ()
    beside: str = ""


def study(name: str) -> Study:
    """The study of that name; its file is read now. Raises `InvalidArgument`."""
    if name not in QUESTIONS:
        raise InvalidArgument(f"study {name!r}; choose one of: {', '.join(QUESTIONS)}")
    definition: Study = import_module(f"{__name__}.{name.replace('-', '_')}").STUDY
    return replace(definition, asks=QUESTIONS[name])

"""Study `memory`: the longest context that fits, by model, card, weights, batch and KV format. Nothing is timed.

The arithmetic is that of `halfbyte memory`: parameters are counted on a model without storage, caches as they are allocated, in
whole blocks of 32 tokens. GB are 10^9 bytes, the card's as its name says it. Activations, the CUDA context and what the allocator
leaves unused come on top, and no heed is paid to the context that a model was trained for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.formats import weight_format
from halfbyte.memory import CacheSizes, meta_model, packed_layers, quantized_bytes
from halfbyte_lab.evals.quality import Setting, every_kv_setting
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table
from halfbyte_lab.studies import Study

OP = "memory"
CARDS, BATCHES = (24, 48, 80, 141), (1, 32)
PLAIN, FOUR_BITS = "bf16", "nf4"
#: Tokens that every format holds as they come: its largest block.
BLOCK = 32
#: Model type, and sizes as in config.json: hidden, feed-forward, layers, heads, KV heads, vocabulary. All have an output head.
MODELS = {
    "Llama 2 7B": ("llama", (4096, 11008, 32, 32, 32, 32000)),
    "Mistral 7B": ("mistral", (4096, 14336, 32, 32, 8, 32768)),
    "Qwen2.5 7B": ("qwen2", (3584, 18944, 28, 28, 4, 152064)),
    "Llama 3 8B": ("llama", (4096, 14336, 32, 32, 8, 128256)),
    "Qwen2.5 32B": ("qwen2", (5120, 27648, 64, 40, 8, 152064)),
    "Llama 2 70B": ("llama", (8192, 28672, 80, 64, 8, 32000)),
    "Llama 3 70B": ("llama", (8192, 28672, 80, 64, 8, 128256)),
}
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
QUICK = ("Llama 3 8B", "Llama 3 70B")


def jobs(session: Session) -> list[Job]:
    """One job for each model."""
    return [ModelJob(name) for name in (QUICK if session.options.quick else MODELS)]


def formats() -> list[Setting]:
    """16 bits, and every KV format without rotation, which takes no memory."""
    return [Setting(), *(s for s in every_kv_setting() if not s.rotate_keys)]


@dataclass(frozen=True)
class ModelJob:
    """One model with 16-bit and with 4-bit weights, and every KV format."""

    name: str
    op: str = OP

    def measure(self, session: Session) -> Iterator[Record]:
        """A record for each kind of weights and KV format; its shape holds the longest context of every card and batch."""
        selection = [
            (weights, s)
            for weights in (PLAIN, FOUR_BITS)
            for s in formats()
            if session.wants(f"{self.name}, {weights}", s.kv, "halfbyte")
        ]
        if not selection:
            return
        config = configuration(self.name)
        model = meta_model(config, self.name)
        plain = 2 * sum(p.numel() for p in model.parameters())
        weight_bytes = {PLAIN: plain, FOUR_BITS: plain - quantized_bytes(model, weight_format(FOUR_BITS))[0]}
        for weights, setting in selection:
            sizes = packed_layers(config, setting.keys, setting.values, ())
            contexts = {
                column(card, batch): longest(sizes, batch, card * 10**9 - weight_bytes[weights])
                for card in CARDS
                for batch in BATCHES
            }
            bits = 16 * sizes.nbytes(1, 8192) / sizes.plain_nbytes(1, 8192)
            case = f"{self.name}, {weights}"
            yield Record(OP, contexts, setting.kv, "halfbyte", weight_bytes[weights], session.environment, case=case, bits=bits)


def sizes_of(name: str, weights: str | None, keys: str, values: str, context: int) -> tuple[int, int]:
    """Bytes of one of `MODELS` with such weights (None: 16 bits), and of the cache of one sequence."""
    config = configuration(name)
    model = meta_model(config, name)
    saved = quantized_bytes(model, weight_format(weights))[0] if weights else 0
    return 2 * sum(p.numel() for p in model.parameters()) - saved, packed_layers(config, keys, values, ()).nbytes(1, context)


def column(card: int, batch: int) -> str:
    """ "24 GB x 32": a card and how many sequences."""
    return f"{card} GB x {batch}"


def configuration(name: str) -> Any:
    """The transformers configuration of one of `MODELS`."""
    from transformers import AutoConfig

    kind, numbers = MODELS[name]
    sizes = dict(zip(_NAMES, numbers, strict=True))
    return AutoConfig.for_model(kind, tie_word_embeddings=False, sliding_window=None, **sizes)


def longest(sizes: CacheSizes, batch: int, room: int) -> int:
    """Tokens of each of `batch` sequences whose cache fits in `room` bytes, in whole blocks; 0 where none does."""
    base, one = sizes.nbytes(batch, 0), sizes.nbytes(batch, BLOCK)  # tails and scales of whole tensors are there from the start
    return max(0, (room - base) // (one - base) * BLOCK)


# ------------------------------------------------------------------------------------------------------------- how it is told

COLUMNS = tuple(column(card, batch) for card in CARDS for batch in BATCHES)
HEADERS = ("model, weights", "KV cache", "bits", "weights, GB", *COLUMNS)
#: The cards and models that are drawn, and the formats.
DRAWN = (("Llama 3 8B", PLAIN, 24), ("Llama 3 70B", FOUR_BITS, 80))
SHOWN = ("bf16", "fp8", "int8", "int8 / int4_g32", "int4_g32", "int4_channel / int4", "int4")


def table(measured: Sequence[Record]) -> Table:
    """One row for each model, kind of weights and KV format: tokens of each sequence. Weights that fit nowhere have one row."""
    rows, cases = [], set()
    for r in (r for r in measured if r.op == OP and r.shape):
        weights = r.nbytes / 1e9
        fits = weights < max(CARDS)
        if fits or r.case not in cases:
            head = (r.formats, f"{r.bits:.2f}") if fits else ("every format", "")
            rows.append((r.case, *head, f"{weights:.1f}", *(_tokens(r.shape[c]) for c in COLUMNS)))
        cases.add(r.case)
    return HEADERS, rows


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "none"


def drawn(measured: Sequence[Record]) -> list[str]:
    """The longest context of one sequence by KV format, with that of a batch beside it, of one model and card a chart."""
    figures = []
    for model, weights, card in DRAWN:
        mine = {r.formats: r.shape for r in measured if r.op == OP and r.case == f"{model}, {weights}"}
        one, many = ({f: mine[f][column(card, batch)] for f in SHOWN if f in mine} for batch in BATCHES)
        if any(one.values()):
            labels = {f: f"{_tokens(one[f])} ({BATCHES[1]} x {_tokens(many[f])})" for f in one}
            title = f"Longest context: {model}, {weights} weights, {card} GB"
            with charts.measured_on("computed, not measured"):
                figures.append(charts.bars(one, x_label=f"tokens of one sequence (of {BATCHES[1]})", title=title, shown=labels))
    return figures


def says(measured: Sequence[Record]) -> list[str]:
    """What is drawn, in figures."""
    sentences = []
    for model, weights, card in DRAWN:
        mine = {r.formats: r.shape for r in measured if r.op == OP and r.case == f"{model}, {weights}"}
        parts = [
            f"{_tokens(mine[f][column(card, BATCHES[-1])])} with {f}"
            for f in ("bf16", "int8", "int8 / int4_g32", "int4")
            if f in mine
        ]
        if parts:
            what = f"{model} with {weights} weights and {BATCHES[-1]} sequences in {card} GB"
            sentences.append(f"{what}: tokens of each sequence {', '.join(parts)}.")
    return sentences


STUDY = Study("memory", table, drawn, says, text_columns=2, jobs=jobs)

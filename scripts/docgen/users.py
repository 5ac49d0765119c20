"""What users of whole models meet: steps and prompts in vLLM's engine, and the first token of `generate()`."""

from __future__ import annotations

import re
from typing import Any

from docgen.sources import tables

#: What lines of first tokens call the sizes.
MODELS_OF = {"llama-3-8b": "Llama 3 8B", "qwen3-1.7b": "Qwen3 1.7B"}
_SIZES = "Llama 3 8B's sizes with random weights"
#: Other models in vLLM, by their sizes in `halfbyte_lab.serving`: the name, and the mode with halfbyte.
_OTHERS = {
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", "int4_g128/int8+int4_g32"),
    "deepseek-v2-lite": ("DeepSeek-V2-Lite (MLA)", "int4_g64/int8+int8"),
}

#: Modes of `halfbyte_lab.serving`: vLLM alone, with halfbyte's cache, with its weights, the output layer's in INT8, too, and with
#: those that round x of prompts to INT8.
_MODES = ("bf16", "bf16/int8+int4_g32", "int4_g128+int8_col/int8+int4_g32", "int4_g128_a8+int8_col/int8+int4_g32")
#: The last of them with a 16-bit output layer.
_PLAIN_HEAD = "int4_g128/int8+int4_g32"
#: Cold requests x tokens of each + new ones.
_LOAD = "96x8192+128"
_Rows = dict[tuple[str, str, str], dict[str, Any]]


def in_vllm(prompts: bool = True) -> str:
    """What was measured, and a line for each batch: steps of each mode and, in a table of their own, prompts."""
    rows = _in_vllm()
    columns = ("16 bits", "INT8 / INT4 cache", "and INT4 weights", "and INT8 x")

    def lines(name: str, digits: int = 0) -> str:
        cells = [
            (_batch(shape), *(_figure(rows, "decode", mode, shape, name, digits) for mode in _MODES))
            for shape in _shapes(rows, "decode", _MODES[1:])
        ]
        return tables.markdown(("requests x context", *columns), cells)

    stock, packed = (rows["engine", mode, ""] for mode in (_MODES[0], _MODES[2]))
    env, shapes = packed["environment"], _shapes(rows, "decode", (_PLAIN_HEAD,))
    plain = ", ".join(_figure(rows, "decode", _PLAIN_HEAD, shape, "step_ms", 2) for shape in shapes)
    days = sorted({_day(r) for (_, mode, _), r in rows.items() if mode in (*_MODES, _PLAIN_HEAD)})
    older = [column for column, mode in zip(columns, _MODES, strict=True) if "sizes" not in rows["engine", mode, ""]]
    older += [_batch(shape) for (_, mode, shape), r in rows.items() if mode == _MODES[0] and "sizes" not in r]
    told = [
        f"{env['device']}, vLLM {env['versions']['vllm']} with torch.compile and CUDA graphs, {_SIZES}, {' and '.join(days)}; each "
        f"column on an H200 whose host other jobs shared. INT4 weights are int4_g128, with an output layer in int8_col; INT8 x is "
        f"int4_g128_a8. The cache holds {stock['kv_tokens']:,} tokens in 16 bits, twice as many in fp8 (computed), "
        f"{packed['kv_tokens']:,} in INT8 / INT4 with INT4 weights. Measured by an earlier form of `halfbyte_lab.serving`: "
        f"{', '.join(older)}.",
        f"Milliseconds a step:\n\n{lines('step_ms', 2)}",
    ]
    if prompts:
        told += [
            f"Tokens a second of prompts:\n\n{lines('prefill_tok_s')}",
            f"With INT4 weights and a 16-bit output layer a step of {_listed(shapes)} took {plain} ms, by the earlier form too. "
            f"With an empty kernel cache the engine started in {packed['start_s']:.0f} s, stock vLLM in {stock['start_s']:.0f} s.",
        ]
    return "\n\n".join(told)


def served() -> tuple[dict[str, list[tuple[int, float]]], list[tuple[int, int]], str]:
    """Milliseconds of a step by batch, and tokens that fit, each with the number of its mode in `_MODES`; and the GPU."""
    rows = _in_vllm()
    steps = {
        _batch(shape): [(i, float(r["step_ms"])) for i, mode in enumerate(_MODES) if (r := rows.get(("decode", mode, shape)))]
        for shape in _shapes(rows, "decode", _MODES)
    }
    fit = [(i, int(r["kv_tokens"])) for i, mode in enumerate(_MODES) if (r := rows.get(("engine", mode, "")))]
    return steps, fit, str(rows["engine", _MODES[0], ""]["environment"]["device"]).removeprefix("NVIDIA ")


def stock_step(shape: str) -> tuple[str, float]:
    """The GPU and the milliseconds of a step of vLLM alone, in 16 bits."""
    row = _in_vllm()["decode", _MODES[0], shape]
    return str(row["environment"]["device"]), float(row["step_ms"])


def others_in_vllm() -> str:
    """A line for each batch of mixtures and of latents: steps and prompts, stock and with halfbyte."""
    lines, told = [], []
    for sizes, (name, packed) in _OTHERS.items():
        rows, modes = _in_vllm(sizes), (_MODES[0], packed)
        for shape in _shapes(rows, "decode", modes):
            steps = (_figure(rows, "decode", mode, shape, "step_ms", 2) for mode in modes)
            prompts = (_figure(rows, "decode", mode, shape, "prefill_tok_s") for mode in modes)
            lines.append((name, _batch(shape), *steps, *prompts))
        stock, ours = (rows["engine", mode, ""] for mode in modes)
        told.append(
            f"{name}: {packed.partition('/')[0]} weights and {' / '.join(packed.partition('/')[2].split('+'))} cache; "
            f"{stock['kv_tokens']:,} tokens fit in 16 bits, {ours['kv_tokens']:,} packed; started in {stock['start_s']:.0f} and "
            f"{ours['start_s']:.0f} s"
        )
    env = ours["environment"]
    where = f"{env['device']}, vLLM {env['versions']['vllm']}, random weights, {_day(ours)}, stock in a run of its own."
    heads = ("model", "requests x context", "step, 16 bits, ms", "packed", "prompts, 16 bits, tokens/s", "packed")
    return f"{where} {'. '.join(told)}.\n\n{tables.markdown(heads, lines)}"


def hits_in_vllm() -> str:
    """A line for each number of new tokens behind a cached prefix: the first token, and new tokens a second."""
    rows, modes = _in_vllm(), (_MODES[0], *_MODES[2:])
    lines = [
        (
            _batch(shape.partition("+")[0]),
            shape.partition("+")[2],
            *(_figure(rows, "hits", mode, shape, name) for name in ("first_token_ms", "new_tok_s") for mode in modes),
        )
        for shape in _shapes(rows, "hits", modes[1:])
    ]
    columns = ("16 bits", "INT8 / INT4 cache, INT4 weights", "and INT8 x")
    heads = (
        "requests x cached tokens",
        "new tokens each",
        *(f"first token, ms: {columns[0]}", *columns[1:]),
        *(f"new tokens/s: {columns[0]}", *columns[1:]),
    )
    batch, _, new = _LOAD.partition("+")
    stock, packed, rounded = (rows["serve", mode, _LOAD]["all_tok_s"] for mode in modes)
    told = (
        f"{_batch(batch)} cold prompts with {new} new tokens each: {stock:,.0f} tokens/s in 16 bits, {packed:,.0f} with INT8 / "
        f"INT4 cache and INT4 weights, {rounded:,.0f} with x in INT8 as well."
    )
    return f"Behind a cached prefix:\n\n{tables.markdown(heads, lines)}\n\n{told}"


def _in_vllm(sizes: str = "llama-3-8b") -> _Rows:
    """Records of the engine by what was measured, mode and shape."""
    rows = (r for r in tables.json_lines("vllm.jsonl") if r.get("sizes", "llama-3-8b") == sizes)
    return {(r["what"], r["mode"], r.get("shape", "")): r for r in rows}


def _day(row: dict[str, Any]) -> str:
    """When a record was made."""
    return str(row["environment"]["date"])[:10]


def _figure(rows: _Rows, what: str, mode: str, shape: str, name: str, digits: int = 0) -> str:
    """A cell; empty where nothing was measured."""
    value = rows.get((what, mode, shape), {}).get(name)
    return "" if value is None else f"{value:,.{digits}f}"


def _batch(shape: str) -> str:
    """ "8x8192" as "8 x 8,192"."""
    return " x ".join(f"{int(number):,}" for number in shape.split("x"))


def _listed(shapes: list[str]) -> str:
    """Batches in words."""
    return ", ".join(map(_batch, shapes))


def _shapes(rows: _Rows, what: str, modes: tuple[str, ...]) -> list[str]:
    """The shapes that any of these modes ran, small ones first."""
    shapes = {shape for kind, mode, shape in rows if kind == what and mode in modes}
    return sorted(shapes, key=lambda shape: [int(number) for number in re.split("[x+]", shape)])


def first_tokens() -> str:
    """By model, a line for each prompt: 16 bits, and the default call."""
    rows = [r for r in tables.json_lines("first-token.jsonl") if r["what"] == "first_token" and "ms" in r]
    sides = {(r["sizes"], r["batch"], r["tokens"], r["side"]): r for r in rows}
    cases = sorted({key[:3] for key in sides if key[3] == "halfbyte"}, key=lambda case: (case[0], case[1] * case[2], case[1]))
    lines = []
    for size, b, n in cases:
        plain, packed = (sides[size, b, n, side] for side in ("bf16", "halfbyte"))
        beyond = (f"{r['peak_gb'] - r['model_gb']:.2f}" for r in (plain, packed))
        ms = (f"{r['ms']:.1f}" for r in (plain, packed))
        lines.append((MODELS_OF[size], f"{b} x {n:,}", *ms, f"{packed['ms'] / plain['ms']:.2f}", *beyond))
    env = rows[0]["environment"]
    told = (
        f"`generate(max_new_tokens=1)` by the clock, medians of warm calls: transformers {env['versions']['transformers']} in bf16 "
        f"and halfbyte with int4_g128 weights and an INT8 / INT4 cache; GB: peak memory beyond what was allocated before the "
        f"call, which with halfbyte includes recorded prompts. {env['device']}, {env['date'][:10]}, random weights."
    )
    heads = ("model", "batch x tokens", "16 bits, ms", "halfbyte, ms", "of 16 bits", "16 bits, GB", "halfbyte, GB")
    return f"{told}\n\n{tables.markdown(heads, lines)}"


def layers_of_prompts() -> str:
    """Linear layers of blocks over a prompt, as one graph: packed over 16 bits."""
    rows = [r for r in tables.json_lines("first-token.jsonl") if r["what"] == "linear_layers"]
    times = {(r["sizes"], r["weights"], r["tokens"]): r["packed_ms"] / r["bf16_ms"] for r in rows}
    tokens = sorted({key[2] for key in times})
    lines = [
        (MODELS_OF[size], weights, *(f"{times[size, weights, n]:.2f}" for n in tokens))
        for size, weights in dict.fromkeys(key[:2] for key in times)
    ]
    told = f"The linear layers of {rows[0]['layers']} blocks as one CUDA graph, time over that of 16 bits, by tokens."
    return f"{told}\n\n{tables.markdown(('model', 'weights', *(f'{n:,}' for n in tokens)), lines)}"

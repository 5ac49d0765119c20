"""What users of whole models meet: steps and prompts in vLLM's engine, and the first token of `generate()`."""

from __future__ import annotations

from typing import Any

from docgen.sources import tables

_SIZES = "Llama 3 8B's sizes with random weights"


def in_vllm() -> str:
    """A line for each batch: vLLM alone, with halfbyte's cache, and with its weights, too."""
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (r["mode"], r.get("shape", "engine")): r for r in tables.json_lines("vllm.jsonl")
    }
    stock, ours, packed = "bf16", "hb_int8_int4", "w4_hb_int8_int4"

    def told_of(mode: str, shape: str, figure: str) -> str:
        value = rows.get((mode, shape), {}).get(figure)
        return "" if value is None else f"{value:,.2f}" if figure == "step_ms" else f"{value:,}"

    shapes = {shape: None for mode, shape in rows if mode in (ours, packed) and shape != "engine"}
    lines = [
        (
            " x ".join(f"{int(number):,}" for number in shape.split("x")),
            *(told_of(mode, shape, figure) for figure in ("step_ms", "prefill_tok_s") for mode in (stock, ours, packed)),
        )
        for shape in sorted(shapes, key=lambda shape: [int(number) for number in shape.split("x")])
    ]
    heads = (
        "requests x context",
        "step, 16 bits, ms",
        "INT8 / INT4 cache",
        "and INT4 weights",
        "prompts, 16 bits, tokens/s",
        "INT8 / INT4 cache",
        "and INT4 weights",
    )
    before, now = rows[stock, "engine"], rows[ours, "engine"]
    env = now["environment"]
    fit = [f"{rows[mode, 'engine']['kv_tokens']:,}" for mode in (stock, ours, packed)]
    told = (
        f"{env['device']}, {env['date']}, vLLM {env['versions']['vllm']} with torch.compile and CUDA graphs, {_SIZES}, weights in "
        f"bf16 or in int4_g128, the output layer in bf16. Tokens that fit: {fit[0]}, {fit[1]} and {fit[2]}. Each column ran on "
        f"another GPU of that kind. With an empty kernel cache halfbyte's engine, the first on its machine, took "
        f"{now['start_s']:.0f} s to start; stock's {before['start_s']:.0f} s are of a second engine, whose files were in memory, "
        "so the two do not compare."
    )
    return f"{told}\n\n{tables.markdown(heads, lines)}"


def first_tokens() -> str:
    """A line for each prompt: 16 bits, and the default call."""
    rows = [r for r in tables.json_lines("first-token.jsonl") if r["what"] == "first_token"]
    plain = {(r["batch"], r["tokens"]): r["ms"] for r in rows if r["side"] == "bf16"}
    packed = {(r["batch"], r["tokens"]): r["ms"] for r in rows if r["side"] == "halfbyte"}
    lines = [
        (f"{b} x {n:,}", f"{plain[b, n]:.1f}", f"{packed[b, n]:.1f}", f"{packed[b, n] / plain[b, n]:.2f}")
        for b, n in sorted(packed, key=lambda at: (at[0] * at[1], at[0]))
    ]
    env = rows[0]["environment"]
    told = (
        f"`generate(max_new_tokens=1)` by the clock, ms, medians of warm calls: transformers {env['versions']['transformers']} in "
        f"bf16, and halfbyte with int4_g128 weights. {env['device']}, {env['date']}, {_SIZES}."
    )
    return f"{told}\n\n{tables.markdown(('batch x tokens', '16 bits', 'halfbyte', 'of 16 bits'), lines)}"

"""What users of whole models meet: steps and prompts in vLLM's engine, and the first token of `generate()`."""

from __future__ import annotations

from typing import Any

from docgen.sources import tables

_SIZES = "Llama 3 8B's sizes with random weights"


def in_vllm() -> str:
    """A line for each batch: vLLM alone, and with halfbyte's cache."""
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (r["mode"], r.get("shape", "engine")): r for r in tables.json_lines("vllm.jsonl")
    }
    stock, ours = "bf16", "hb_int8_int4"
    lines = [
        (
            shape.replace("x", " x ").replace("8192", "8,192").replace("2048", "2,048").replace("16384", "16,384"),
            f"{rows[stock, shape]['step_ms']:.2f}",
            f"{rows[ours, shape]['step_ms']:.2f}",
            f"{rows[stock, shape]['step_ms'] / rows[ours, shape]['step_ms']:.2f}x",
            f"{rows[stock, shape]['prefill_tok_s']:,}",
            f"{rows[ours, shape]['prefill_tok_s']:,}",
        )
        for mode, shape in rows
        if mode == ours and shape != "engine"
    ]
    heads = (
        "requests x context",
        "step, 16 bits, ms",
        "INT8 / INT4 cache, ms",
        "faster",
        "prompts, 16 bits, tokens/s",
        "INT8 / INT4",
    )
    before, now = rows[stock, "engine"], rows[ours, "engine"]
    env = now["environment"]
    told = (
        f"{env['device']}, {env['date']}, vLLM {env['versions']['vllm']} with torch.compile and CUDA graphs, {_SIZES}, weights and "
        f"output layer in bf16. Tokens that fit: {before['kv_tokens']:,} and {now['kv_tokens']:,}. 16 bits ran on another GPU of "
        f"that kind. With an empty kernel cache halfbyte's engine, the first on its machine, took {now['start_s']:.0f} s to start; "
        f"stock's {before['start_s']:.0f} s are of a second engine, whose files were in memory, so the two do not compare."
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

"""vLLM alone and with halfbyte, by the engine's own clock: start, tokens that fit, prompts, steps, prefix hits, cold requests.

    python -m halfbyte_lab.serving --modes bf16 int4_g128+int8_col/int8+int4_g32 --out results/vllm.jsonl

A mode is WEIGHTS, WEIGHTS+OUTPUT_LAYER, and either with /CACHE behind it (see `modes`). Weights are random, in known sizes. Every
mode is a process of its own with a time limit, so that none leaves memory behind; `vllm` must be installed.
"""

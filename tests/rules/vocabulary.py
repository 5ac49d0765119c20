"""Words that the project does not use, and the field's word for each."""

from __future__ import annotations

SPELLING = r"(normal|synchron|vector|special)is(e|es|ed|er|ing|ation)"
NEIGHBORS = r"neighbour(s|ing)?|colours?|licences?"
#: Pattern (whole words, any case) -> what to write. Code in backquotes and code blocks are not prose.
INSTEAD: dict[str, str] = {
    r"warp-group products?": "wgmma",
    r"products? (with|of) (weights|matrices)": "GEMM",
    r"rows? of x": "batch size M",
    r"scales? of (whole )?(channels?|rows)": "per-channel scales",
    r"scales? of groups?": "group scales, group-wise",
    r"scales? of tokens?": "per-token scales",
    r"(read )?roofs?": "roofline",
    r"peers?": "baseline, library",
    r"contenders?": "candidate",
    r"quoted figures?": "figures from the literature",
    r"told|untold": "reported",
    r"asked for|asks for": "requested",
    r"beside": "next to, with, compared with",
    r"apart": "separately, independently",
    r"h[eo]ld against": "compared with",
    r"deals? out|dealt out|dealing out": "partition",
    r"looked at again": "re-evaluated",
    r"put right": "corrected",
    r"no heed|paid heed": "ignored",
    r"as ever": "unchanged, as usual",
    r"by way of": "through",
    r"foreseen": "predicted",
    r"who (is|has|finds|sees|waits)": "which program, which warp",
    r"nobody": "no program, none",
    r"relaunch(es|ed|ing)?": "replay, launch cache",
    r"planes?": "KV buffer",
    r"multiplied up": "accumulated",
    r"taken off": "subtracted",
    r"bars? (met|missed)|meets? (its|their) bars?": "target",
    r"quantis(e|es|ed|er|ers|ing|ation)": "quantize",
    r"dequantis(e|es|ed|er|ing|ation)": "dequantize",
    SPELLING: "normalize, synchronize, vectorize, specialize",
    NEIGHBORS: "neighbor, color, license",
}

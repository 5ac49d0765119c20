"""What calibration gains on a real model, in the study `evidence`: of weights, and of formats by layer."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfbyte.paths import resolve_model
from halfbyte.text import Tokenizer, heldout_text, windows
from halfbyte_lab.evals import calibrate, real_model
from halfbyte_lab.evals.calibrate_keys import calibrate_keys
from halfbyte_lab.evals.model import load
from halfbyte_lab.evals.quality import Setting
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Session
from halfbyte_lab.measure.tables import Table
from halfbyte_lab.measure.timing import fixed_threads
from halfbyte_lab.studies.accuracy import quality_records

CALIBRATED, PLANS = "real model, calibrated weights", "real model, formats by layer"
ARITHMETIC = {"bf16": torch.bfloat16, "fp32": torch.float32}
BASE = Setting.of_transformers("bf16")
#: Weights that are calibrated; windows and tokens of each that they are calibrated on, of each text, and judged on.
CALIBRATED_WEIGHTS = ("int4_g64", "nvfp4", "nf4")
READ, JUDGED, QUICK_READ, QUICK_JUDGED = (32, 1024), (20, 2048), (2, 512), (1, 64)
#: Bits an element of the plans, formats that they choose from, and how many of the best uniform choices are judged beside each.
BITS = (3.5, 4.5, 5.5)
FORMATS = ("int8", "int8_channel", "int4", "int4_g32", "int4_channel", "int2", "int2_g32")
BESIDE = 3
#: Windows and tokens of each that plans, and the keys that they may use, are calibrated on, of each text, and judged on; tokens
#: that are read at a time to calibrate.
PLANS_READ, PLANS_JUDGED, CHUNK = (2, 2048), (8, 4096), 256


def model_of(session: Session, arithmetic: str) -> tuple[Any, Tokenizer]:
    """The real model in bf16 or fp32, with its tokenizer; the shipped one in a quick run."""
    return _loaded(resolve_model("demo") if session.options.quick else str(real_model.folder()), session.device.torch, arithmetic)


@functools.lru_cache(maxsize=1)
def _loaded(folder: str, device: torch.device, arithmetic: str) -> tuple[Any, Tokenizer]:
    model, tokenizer = load(folder, device)
    return model.to(ARITHMETIC[arithmetic]), tokenizer


@dataclass(frozen=True)
class CalibratedJob:
    """Divergence of weights that are rounded to nearest, and of calibrated ones, from 16-bit weights, in fp32.

    dithered: the model's weights are moved off the grid of the file that they come from.
    """

    weights: str
    dithered: bool
    op: str = CALIBRATED

    @property
    def name(self) -> str:
        """The model, as a part of the case of its records."""
        return "dithered, fp32" if self.dithered else "fp32"

    def measure(self, session: Session) -> Iterator[Record]:
        """One record for each text and way of rounding that the output does not hold yet."""
        from halfbyte import hf

        done = {(r.op, r.case, r.formats) for r in session.earlier()}
        model, tokenizer = model_of(session, "bf16")
        model = real_model.dithered(model) if self.dithered else model
        read, judged = calibration_tokens(session, tokenizer, READ, JUDGED)
        plain = real_model.dense(copy.deepcopy(model))
        for formats, tokens in ((self.weights, None), (f"{self.weights} calibrated", read)):
            if all((self.op, f"{text}, {self.name}", formats) in done for text in judged):
                continue
            if not session.wants(f"{self.op}: {self.name}", formats, "halfbyte"):
                continue
            rounded = real_model.dense(hf.quantize(copy.deepcopy(model), self.weights, calibrate=tokens))
            for text, cut in judged.items():
                kl = _divergence(plain, rounded, cut)
                blank = Record(
                    self.op, dict(zip(("windows", "T"), cut.shape, strict=True)), formats, "halfbyte", 0, session.environment
                )
                noise = 2 * float(kl.std()) / math.sqrt(kl.numel())
                case = f"{text}, {self.name}"
                yield replace(blank, case=case, error=float(kl.mean()), noise=noise, error_kind="mean KL divergence, nats")


def calibration_tokens(
    session: Session, tokenizer: Tokenizer, read: tuple[int, int], judged: tuple[int, int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Windows to calibrate on, `read` of each text, and by text those that judge. A quick run has few."""
    quick, half = session.options.quick, len(heldout_text()) // 2
    texts = {"prose": (heldout_text()[:half], heldout_text()[half:])} if quick else real_model.calibration_texts()
    read, judged = (QUICK_READ, QUICK_JUDGED) if quick else (read, judged)
    parts = [windows(tokenizer.encode(mine), read[1], read[0]) for mine, _ in texts.values()]
    return torch.cat(parts), {text: windows(tokenizer.encode(other), judged[1], judged[0]) for text, (_, other) in texts.items()}


@torch.no_grad()
def _divergence(plain: Any, rounded: Any, cut: torch.Tensor) -> torch.Tensor:
    """KL divergence of each predicted token but the first of each window, for windows [n, T]."""
    parts = []
    for window in cut.to(plain.device):
        p, q = (m(input_ids=window[None], use_cache=False).logits.float().log_softmax(-1) for m in (plain, rounded))
        parts.append((p.exp() * (p - q)).sum(-1)[0, 1:])
    return torch.cat(parts)


@dataclass(frozen=True)
class PlansJob:
    """Formats by layer for each size, with sink and recent tokens and calibrated keys among the candidates, and the best uniform
    choices of no more bits, on other text than they were chosen on, in bf16. Tokens in 16 bits are counted."""

    bits: tuple[float, ...]
    op: str = PLANS
    name: str = "formats by layer"

    def measure(self, session: Session) -> Iterator[Record]:
        """One record for each text, size and choice that the output does not hold yet; what was calibrated stays in a folder."""
        sizes = {f"within {size:g} bits": size for size in self.bits}
        done = {r.case for r in session.earlier() if r.op == self.op}
        model, tokenizer = model_of(session, "bf16")
        read, judged = calibration_tokens(session, tokenizer, PLANS_READ, PLANS_JUDGED)
        cases = [(text, size) for text in judged for size in sizes if f"{text}, {size}" not in done]
        if not (cases := [(t, s) for t, s in cases if session.wants(f"{self.op}: {t}, {s}", "by layer", "halfbyte")]):
            return
        with fixed_threads(session.threads):
            made = dict(zip(sizes, self._chosen(session, model, read), strict=True))
            for text, size in cases:
                plan, tokens = made[size].plan, read.shape[1]
                name = "by layer" + " calibrated" * bool(plan.calibration)
                bits = {replace(Setting.of_plan(plan), plan=name): calibrate.counted_bits(plan, tokens)}
                for alike in sorted(made[size].uniform, key=lambda one: one.measured["kl"])[:BESIDE]:
                    bits[Setting.of_uniform(alike)] = calibrate.counted_bits(alike, tokens)
                for setting, bits_of_it in bits.items():
                    records = quality_records(session, self.op, f"{text}, {size}", model, judged[text], [setting], BASE, late=True)
                    yield from (replace(r, bits=bits_of_it) for r in records if r.formats != BASE.kv)

    def _chosen(self, session: Session, model: Any, read: torch.Tensor) -> list[calibrate.Calibrated]:
        folder = real_model.FOLDER / ("quick-plans" if session.options.quick else "plans")
        folder.mkdir(parents=True, exist_ok=True)
        if not (keys := folder / "keys.safetensors").exists():
            calibrate_keys(model, read, CHUNK).write(keys)
        formats = FORMATS[::2] if session.options.quick else FORMATS
        ways = calibrate.ways(model, formats, str(keys), read.shape[1])
        ids = [calibrate.fingerprint(model, read, CHUNK, way.exact, way.calibration) for way in ways]
        stores = [calibrate.Measurements(folder / f"measured{way.name}.jsonl", mine) for way, mine in zip(ways, ids, strict=True)]
        divergence = calibrate.Divergence(model, read, CHUNK)
        return calibrate.search(divergence, [*zip(ways, stores, strict=True)], self.bits)


# ------------------------------------------------------------------------------------------------------------- how it is told


def calibrated_table(measured: Sequence[Record]) -> Table:
    """One row for each text, model and format that is calibrated."""
    errors = {(r.case, r.formats): r.error for r in measured if r.op == CALIBRATED and r.error}
    pairs = [(case, name, errors[case, name], errors.get((case, f"{name} calibrated"))) for case, name in sorted(errors)]
    rows = [
        (case, name, f"{nearest:.3f}", f"{error:.3f}", f"{100 * (1 - error / nearest):.0f}")
        for case, name, nearest, error in pairs
        if error
    ]
    return ("weights judged on", "formats", "KL, nearest", "KL, calibrated", "less, %"), rows


def gains(measured: Sequence[Record]) -> list[str]:
    """How much less calibrated weights, and formats by layer, diverge on text that is not the calibration's."""
    less = [int(row[-1]) for row in calibrated_table(measured)[1]]
    sentences = [f"Calibrated weights have {min(less)} to {max(less)} % less KL than rounded ones on other text."] if less else []
    ratios = []
    for case in dict.fromkeys(r.case for r in measured if r.op == PLANS and r.error):
        rows = [(r.formats.startswith("by layer"), r.error or 0.0) for r in measured if (r.op, r.case) == (PLANS, case) and r.error]
        best = [min((kl for is_plan, kl in rows if is_plan is wanted), default=0.0) for wanted in (True, False)]
        ratios += [best[1] / best[0]] if all(best) else []
    if ratios:
        better = sum(ratio > 1 for ratio in ratios)
        sentences.append(
            f"Formats by layer diverge less than the best uniform choice of no more bits in {better} of {len(ratios)} cases, by a "
            f"factor of {min(ratios):.2f} to {max(ratios):.2f}."
        )
    return sentences

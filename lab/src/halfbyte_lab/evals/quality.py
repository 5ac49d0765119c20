"""Perplexity and divergence of quantized runs, each compared with the 16-bit run of the same model.

Text is fed in chunks, so that all older keys and values are read from the packed cache. With p the next-token distribution of the
16-bit run and q the other's: perplexity is exp(mean -log q(next)), KL divergence sum p log(p / q) in nats for every token, top-1
agreement the share of tokens where both expect the same next one. Every run, the 16-bit one too, goes through the same code with a
cache of its own format.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console

from halfbyte.cache_plan import CachePlan
from halfbyte.errors import check
from halfbyte.formats import Format, check_window, key_format, plain_format, value_format, weight_format
from halfbyte.hf.cache_layers import CacheSettings
from halfbyte.hf.weights import weight_bytes
from halfbyte.nn import QuantLinear
from halfbyte.reference.hadamard import rotated
from halfbyte.reference.quantize import check_clip
from halfbyte_lab.evals.choices import caches
from halfbyte_lab.evals.own_attention import in_half, own_attention
from halfbyte_lab.progress import progress_later


@dataclass(frozen=True)
class Setting(CacheSettings):
    """One row of an evaluation: a cache, the formats of weights and lm_head (None: 16 bits), and the weights' clip.

    plan   the name of a cache with formats by layer
    dtype  the 16-bit type of the model, which caches are compared in
    own    transformers' own attention over its own cache, in the type that the model computes in
    """

    keys: str | tuple[str, ...] = "bf16"
    values: str | tuple[str, ...] = "bf16"
    rotate_keys: bool | tuple[bool, ...] = False
    skip_layers: tuple[int, ...] = ()
    calibration: str | None = None
    weights: str | None = None
    clip: str | None = None
    plan: str = ""
    lm_head: str | None = None
    dtype: str = "bf16"
    own: bool = False

    @classmethod
    def plain(cls, dtype: str, weights: str | None = None) -> Setting:
        """A 16-bit cache: the run that others are compared with, or one of quantized weights alone."""
        return cls(dtype, dtype, weights=weights, dtype=dtype)

    @classmethod
    def of_transformers(cls, dtype: str) -> Setting:
        """transformers' own attention and cache; behind the first setting in 16-bit arithmetic, which gives the floor."""
        return cls(dtype, dtype, dtype=dtype, own=True)

    @classmethod
    def of_plan(cls, plan: CachePlan, dtype: str = "bf16", exact: tuple[int, int] = (0, 0)) -> Setting:
        """The cache of a plan, with sink and recent tokens of its own or, where it has none, `exact`."""
        sinks, recent = plan.exact_tokens(exact)
        rest: dict[str, Any] = {"dtype": dtype, "plan": f"plan, {plan.bits:.2f} bits", "calibration": plan.calibration or None}
        return cls(plan.keys, plan.values, plan.rotate_keys, sink_tokens=sinks, recent_tokens=recent, **rest)

    @classmethod
    def of_uniform(cls, plan: CachePlan) -> Setting:
        """The cache of a plan whose layers are alike."""
        layer, dtype, exact = plan.layers[0], plan.measured["dtype"], (plan.sink_tokens, plan.recent_tokens)
        return cls(layer.keys, layer.values, layer.rotate_keys, (), *exact, calibration=plan.calibration or None, dtype=dtype)

    def __post_init__(self) -> None:
        for keys in (self.keys,) if isinstance(self.keys, str) else self.keys:
            key_format(keys)
        for values in (self.values,) if isinstance(self.values, str) else self.values:
            value_format(values)
        if isinstance(self.keys, str) and isinstance(self.values, str):
            check_window(*self.exact, key_format(self.keys), value_format(self.values))
        for weights in (self.weights, self.lm_head):
            if weights is not None:
                check_clip(self.clip, weight_format(weights))

    def cache_options(self) -> dict[str, Any]:
        """Options of a cache, but for a rotation of values, which may be one of weights."""
        return {name: x for name, x in self.options.items() if name != "rotate_values"}

    @property
    def exact(self) -> tuple[int, int]:
        """How many tokens stay in 16 bits: the first ones, and the last."""
        return self.sink_tokens, self.recent_tokens

    @property
    def in_weights(self) -> tuple[str | None, str | None, bool, str | None]:
        """What of the model differs, in the order of `with_weights`: settings that agree in it share one."""
        return self.weights, self.clip, self.rotate_values, self.lm_head

    @property
    def is_plain(self) -> bool:
        """Whether the whole cache is in the model's 16-bit type."""
        return self.kv == self.dtype

    @property
    def kv(self) -> str:
        """The cache's part of the name: "int8", "int8 / int4_g32", "int4 rotated"."""
        suffix = ", values rotated" if self.rotate_values else ""
        suffix += f", {self.sink_tokens} + {self.recent_tokens} tokens 16-bit" if any(self.exact) else ""
        if self.plan or self.own:
            return (self.plan or "transformers") + suffix
        keys, values = (x if isinstance(x, str) else "by layer" for x in (self.keys, self.values))
        both = keys if keys == values else f"{keys} / {values}"
        skips = f", {len(self.skip_layers)} layers 16-bit" if self.skip_layers else ""
        return both + (" calibrated" if self.calibration else " rotated" * bool(self.rotate_keys)) + suffix + skips

    @property
    def name(self) -> str:
        """The formats: of the cache, of the weights, or of both."""
        weights = self.weights and self.weights + " weights" * self.is_plain
        head = self.lm_head and f"{self.lm_head} lm_head"
        kv = None if self.is_plain and (weights or head) else self.kv
        return " + ".join(part for part in (kv, weights, head) if part)


@dataclass
class Quality:
    """What one setting gave, over `tokens` predicted tokens. KL is in nats, `change` in % of the 16-bit perplexity.

    `noise` is two standard errors of `change`, in %, from the differences of the tokens' log-likelihoods; `kl_noise` of `kl_mean`.
    `kl_by_quarter` is the mean over each quarter of a window, `late_kl` that over its second half, with `late_noise`; `model` names
    an outlier variant. `floor` is what 16-bit arithmetic costs by itself: the divergence of transformers' own attention in it from
    the packed 16-bit run, 0 where that was not run.
    """

    setting: Setting
    tokens: int = 0
    perplexity: float = math.nan
    change: float = math.nan
    noise: float = math.nan
    kl_mean: float = math.nan
    kl_p99: float = math.nan
    top1: float = math.nan
    kv_bytes_per_token: float = math.nan
    weight_bytes: int = 0
    seconds: float = 0.0
    layer_error: list[float] = field(default_factory=list)
    plain_weights: str = "bf16"
    kl_by_quarter: list[float] = field(default_factory=list)
    model: str = ""
    kl_noise: float = math.nan
    late_kl: float = math.nan
    late_noise: float = math.nan
    floor: float = 0.0


Step = Callable[[], None]


@torch.no_grad()
def evaluate(
    model: Any,
    settings: Sequence[Setting],
    windows: torch.Tensor,
    *,
    chunk: int = 16,
    batch: int = 8,
    on_step: Step = lambda: None,
) -> list[Quality]:
    """Run `windows`, int64 [n, T], through the model under each setting; the first one must be a 16-bit run: the packed one, or
    that of transformers.

    `model` has the halfbyte attention (`halfbyte.hf.quantize(model)`) and 16-bit weights. `on_step` is called after every chunk, of
    which there are `steps(...)`. The layer error is the relative L2 error of the hidden states behind each layer (behind the
    last one: after the final norm), first window.
    """
    from halfbyte.hf.model_support import half_type

    check(chunk >= 1, f"chunk={chunk}; expected at least one token")
    dtype = plain_format(half_type(model)).name
    check(
        bool(settings)
        and settings[0] in (Setting.plain(dtype), Setting.of_transformers(dtype))
        and {s.dtype for s in settings} == {dtype},
        f"settings must be of a model in {dtype}, and begin with its 16-bit run, Setting.plain({dtype!r})",
    )
    for setting in settings:
        check_exact(setting.exact, windows.shape[1])
    models = {in_weights: with_weights(model, *in_weights) for in_weights in dict.fromkeys(s.in_weights for s in settings)}
    half_model = in_half(model) if any(s.own for s in settings[1:]) else model
    tallies = [_Tally(s) for s in settings]
    for part in windows.split(batch):
        base: list[_Outputs] = []
        for tally in tallies:
            one = half_model if tally.setting.own and base else models[tally.setting.in_weights]
            tally.run(one, part, chunk, base, on_step)
    results = [tally.result() for tally in tallies]
    floor = max((r.kl_mean for r in results[1:] if r.setting.own), default=0.0)
    for result in results:
        result.floor = floor
        result.change = 100 * (result.perplexity / results[0].perplexity - 1)
        result.plain_weights = "as saved" if any(isinstance(m, QuantLinear) for m in model.modules()) else dtype
        result.weight_bytes = weight_bytes(models[result.setting.in_weights])
        result.kv_bytes_per_token = kv_bytes_per_token(model, result.setting)
    return results


def steps(settings: Sequence[Setting], windows: torch.Tensor, chunk: int = 16, batch: int = 8) -> int:
    """How many times `evaluate` calls `on_step`."""
    return len(settings) * math.ceil(windows.shape[0] / batch) * math.ceil(windows.shape[1] / chunk)


def run_evaluation(
    model: Any,
    settings: Sequence[Setting],
    windows: torch.Tensor,
    chunk: int,
    console: Console,
    *,
    batch: int = 8,
    name: str = "",
) -> list[Quality]:
    """`evaluate` of a model of this name behind a progress bar; as many windows at once as keep log-probabilities below 1 GiB."""
    from halfbyte.hf.weights import show_progress

    check(chunk >= 1, f"chunk={chunk}; expected at least one token")
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    batch = max(1, min(batch, 2**28 // (windows.shape[1] * vocabulary)))
    with progress_later(console, f"evaluating {name}", steps(settings, windows, chunk, batch)) as on_step, show_progress():
        return [replace(r, model=name) for r in evaluate(model, settings, windows, chunk=chunk, batch=batch, on_step=on_step)]


def check_exact(exact: tuple[int, int], length: int) -> None:
    """Raise where texts of `length` tokens are not longer than the sink and recent tokens that stay in 16 bits."""
    sinks, recent = exact
    check(
        not (sinks or recent) or sinks + recent < length,
        f"sink_tokens={sinks}, recent_tokens={recent}: nothing of a text of {length:,} tokens would be quantized; use longer ones",
    )


@dataclass
class _Outputs:
    """What a model said of one chunk, on its device: logits [B, L, V]; hidden states [L, hidden] of the first window by layer."""

    logits: torch.Tensor
    hidden: list[torch.Tensor]

    def log_probs(self, tokens: int) -> torch.Tensor:
        """fp32 [B, tokens, V], of the first tokens."""
        return torch.log_softmax(self.logits[:, :tokens].float(), -1)


class _Tally:
    """Sums over everything one setting predicted."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._seconds = 0.0
        self._tokens: list[torch.Tensor] = []  # of each batch of windows [4, B, T - 1]: KL, log-likelihoods of both, agreement
        self._error: list[torch.Tensor] = []  # of each chunk [layers, 2]: squared error, squared norm

    def run(self, model: Any, part: torch.Tensor, chunk: int, base: list[_Outputs], on_step: Step) -> None:
        """Feed one batch of windows. The first setting fills `base`; the others are compared with it, chunk by chunk."""
        first, tokens = not base, list[torch.Tensor]()
        start = time.perf_counter()
        for i, outputs in enumerate(_outputs(model, self.setting, part, chunk)):
            self._seconds += time.perf_counter() - start
            if first:
                base.append(outputs)
            tokens.append(self._compare(outputs, base[i], part[:, i * chunk + 1 : (i + 1) * chunk + 1]))
            on_step()
            start = time.perf_counter()
        self._tokens.append(torch.cat(tokens, 2).cpu())

    def _compare(self, outputs: _Outputs, base: _Outputs, following: torch.Tensor) -> torch.Tensor:
        """`following` [B, n] are the true next tokens; the last position of a window has none. Returns float64 [4, B, n]."""
        ours, theirs = (x.log_probs(following.shape[1]) for x in (outputs, base))
        index = following.to(ours.device).unsqueeze(-1)
        kl = (theirs.exp() * (theirs - ours)).sum(-1).clamp_min(0)
        ours_next, theirs_next = (x.gather(-1, index).squeeze(-1) for x in (ours, theirs))
        pairs = [(a.float(), b.float()) for a, b in zip(outputs.hidden, base.hidden, strict=True)]
        self._error.append(torch.stack([torch.stack([(a - b).square().sum(), b.square().sum()]) for a, b in pairs]).double())
        return torch.stack([x.double() for x in (kl, ours_next, theirs_next, ours.argmax(-1) == theirs.argmax(-1))])

    def result(self) -> Quality:
        whole = torch.cat(self._tokens, 1)
        quarters = [part.flatten() for part in whole[0].tensor_split(4, 1)]
        kl, late = torch.cat(quarters), torch.cat(quarters[2:])
        late = late if late.numel() else kl  # a window of three tokens predicts two
        rank = max(math.ceil(0.99 * kl.numel()), 1)
        _, ours, theirs, agreed = whole.flatten(1)
        error, norm = torch.stack(self._error).sum(0).unbind(1)
        return Quality(
            self.setting,
            kl.numel(),
            perplexity=math.exp(-float(ours.mean())),
            noise=100 * math.exp(float((theirs - ours).mean())) * _noise(theirs - ours),
            kl_mean=float(kl.mean()),
            kl_noise=_noise(kl),
            late_kl=float(late.mean()),
            late_noise=_noise(late),
            kl_p99=float(kl.kthvalue(rank).values),
            top1=float(agreed.mean()),
            seconds=self._seconds,
            layer_error=(error / norm.clamp_min(1e-30)).sqrt().tolist(),
            kl_by_quarter=[float(quarter.sum() / max(quarter.numel(), 1)) for quarter in quarters],
        )


def _noise(x: torch.Tensor) -> float:
    """Two standard errors of a mean."""
    return 2 * float(x.std(correction=0)) / math.sqrt(x.numel())


def _outputs(model: Any, setting: Setting, part: torch.Tensor, chunk: int) -> Iterator[_Outputs]:
    """Feed windows [B, T] in chunks through a fresh cache of the setting's formats."""
    from halfbyte.hf.every_forward import part_of_text
    from halfbyte.hf.model_support import CACHE

    cache = cache_for(model, setting, part.shape[1])
    if not setting.own:
        cache.expect_steps(chunk)
    for piece in part.split(chunk, dim=1):
        with part_of_text(model, part.shape[1] - 1), own_attention(model) if setting.own else nullcontext():
            out = model(input_ids=piece.to(model.device), **{CACHE: cache}, use_cache=True, output_hidden_states=True)
        yield _Outputs(out.logits, [h[0].clone() for h in out.hidden_states[1:]])


def with_weights(
    model: Any, weights: str | None, clip: str | None = None, rotate_values: bool = False, lm_head: str | None = None
) -> Any:
    """The model itself for 16 bits, else a copy with quantized weights, or ones that rotate values, if these can."""
    from halfbyte import hf
    from halfbyte.hf.attention_weights import unfolded

    rotate_values = rotate_values and not unfolded(model)
    if weights is lm_head is None and not rotate_values:
        return model
    return hf.quantize(copy.deepcopy(model), weights=weights, clip=clip, rotate_values=rotate_values, lm_head=lm_head)


def kv_bytes_per_token(model: Any, setting: Setting) -> float:
    """Bytes that one token of one sequence takes in the cache, over all layers."""
    return float(cache_for(model, replace(setting, own=False), 64 + sum(setting.exact)).bytes_per_token)


def cache_for(model: Any, setting: Setting, capacity: int) -> Any:
    """A packed cache of the setting for a model with the setting's weights, or transformers' own. Values are rotated where the
    weights cannot rotate them."""
    from halfbyte.hf.attention_weights import unfolded
    from halfbyte.hf.cache import PackedCache
    from halfbyte.hf.model_support import check_continues

    check_continues(model)
    if setting.own:
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    rotate_values = setting.rotate_values and bool(unfolded(model))
    return PackedCache(model, capacity, rotate_values=rotate_values, **setting.cache_options())


def every_kv_setting(head_dim: int = 128, dtype: str = "bf16") -> list[Setting]:
    """Each KV format for keys and values alike (per-channel keys with values of the same width), the pairs that `caches` names,
    INT8 keys with INT4 values, and the formats whose keys a cache of heads of `head_dim` rotates by default as it does. Formats
    that store what another one does, as their groups are whole heads, are left out."""
    from halfbyte.formats import KV_FORMATS

    by_head = {(f.code, f.clip) for f in KV_FORMATS.values() if f.granularity == "head"}
    distinct = {
        name: f
        for name, f in KV_FORMATS.items()
        if f.scale and not (f.granularity == "group" and f.scale.group == head_dim and (f.code, f.clip) in by_head)
    }

    def values_for(fmt: Format) -> str:
        return fmt.code.name if fmt.token_block else fmt.name

    alike = [Setting(name, values_for(fmt), dtype=dtype) for name, fmt in distinct.items()]
    by_default = [
        Setting(name, values_for(fmt), rotate_keys=True, dtype=dtype)
        for name, fmt in distinct.items()
        if rotated(None, fmt, head_dim)
    ]
    pairs = [Setting(*pair, dtype=dtype) for pair in (("int8", "int4_g32"), *caches(dtype).values()) if pair != (dtype, dtype)]
    return list(dict.fromkeys([*alike, *pairs, *by_default]))


def every_weight_setting(dtype: str = "bf16") -> list[Setting]:
    """Each weight format, with a 16-bit cache."""
    from halfbyte.formats import WEIGHT_FORMATS

    return [Setting.plain(dtype, name) for name in WEIGHT_FORMATS]

"""The options of an engine in `--additional-config`, and the formats of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

from halfbyte.cache_plan import CachePlan, LayerFormats, read_plan
from halfbyte.engine import PAGE_FORMATS, PageLayout, page_layouts
from halfbyte.errors import Unsupported, check
from halfbyte.formats import KV_FORMATS, check_window
from halfbyte.vllm.calibrated import check_calibration
from halfbyte.vllm.names import PLAN, backend_name, backend_names, cache_dtype

#: Formats of keys and values; None in the backend of cache plans.
Pair = tuple[str, str] | None
#: The options that name tokens in 16 bits.
EXACT_TOKENS = ("sink_tokens", "recent_tokens")
#: Connectors that move whole pages.
CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "ExampleConnector")


class Options(NamedTuple):
    """`--additional-config '{"halfbyte": {"prefill": "exact", "rotate_keys": true}}'`.

    prefill      "cache": every key is read as it is stored; "exact": a chunk attends to its own 16-bit keys
    rotate_keys  keys are stored Hadamard-rotated, for outliers
    plan         a cache plan, or its file, by `halfbyte calibrate`: each layer has formats of its own
    calibration  a file of calibrated keys, by `halfbyte calibrate`, with which quantized keys are stored; a plan names its own
    sink_tokens, recent_tokens   the first and the last tokens of a sequence that stay in 16 bits; of a plan or of a model saved
                 with a packed cache, theirs
    """

    prefill: str = "cache"
    rotate_keys: bool = False
    plan: CachePlan | str | None = None
    calibration: str | None = None
    sink_tokens: int = 0
    recent_tokens: int = 0

    @property
    def exact_tokens(self) -> tuple[int, int]:
        """(sink tokens, recent tokens)."""
        return self.sink_tokens, self.recent_tokens

    @classmethod
    def current(cls, pair: Pair) -> Options:
        """The options of the engine that is being built, checked, for a backend of these formats."""
        config = get_current_vllm_config()
        additional = config.additional_config if isinstance(config.additional_config, dict) else {}
        entries, names = additional.get("halfbyte", {}), ", ".join(cls._fields)
        strays = [name for name in additional if name in cls._fields or (name != "halfbyte" and str(name).lower() == "halfbyte")]
        check(not strays, f"additional_config has {strays}; expected {{'halfbyte': {{...}}}}, an object with some of: {names}")
        check(isinstance(entries, dict), f"additional_config has halfbyte={entries!r}; expected an object with some of: {names}")
        unknown = [name for name in entries if name not in cls._fields]
        check(not unknown, f"additional_config has halfbyte options {unknown}; known are {names}")
        from halfbyte.hf.default_cache import SAVED

        section = {} if entries.get("plan") is not None else getattr(config.model_config.hf_config, SAVED, None) or {}
        options = cls(**{name: section[name] for name in EXACT_TOKENS if name in section} | entries)
        _check_skipped(config)
        _check_connector(config.kv_transfer_config)
        check(options.prefill in ("cache", "exact"), f"halfbyte option prefill={options.prefill!r}; choose cache or exact")
        check(isinstance(options.rotate_keys, bool), f"halfbyte option rotate_keys={options.rotate_keys!r}; choose true or false")
        check(
            (pair is None) == (options.plan is not None),
            f"halfbyte option plan={options.plan!r} with formats {pair} of the backend: a plan goes with attention backend {PLAN}, "
            f"and only there",
        )
        plan, calibration = options.plan, options.calibration
        for name, value in (("rotate_keys", options.rotate_keys), ("calibration", calibration)):
            check(plan is None or not value, f"halfbyte option {name}: a plan says it for each layer; leave it out")
        check(calibration is None or isinstance(calibration, str), f"halfbyte option calibration={calibration!r}; name a file")
        check(calibration is None or not options.rotate_keys, "halfbyte option rotate_keys: calibrated keys are; leave it out")
        if plan is not None:
            fitting = _fitting(plan, config.model_config)
            sinks, recent = fitting.exact_tokens(options.exact_tokens)
            options = options._replace(
                plan=fitting, calibration=fitting.calibration or None, sink_tokens=sinks, recent_tokens=recent
            )
        else:
            assert pair is not None
            check_window(*options.exact_tokens, KV_FORMATS[pair[0]], KV_FORMATS[pair[1]])
        if any(options.exact_tokens):
            _check_exact_tokens(config)
        if options.calibration is not None:
            check_calibration(options.calibration, config.model_config)
        return options


def _check_exact_tokens(config: Any) -> None:
    """Raise where vLLM would not manage two kinds of pages."""
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise Unsupported(
            "sink_tokens and recent_tokens need vLLM's hybrid KV cache manager: leave out --disable-hybrid-kv-cache-manager"
        )
    if config.kv_transfer_config is not None:
        raise Unsupported("KV connectors do not move the pages of sink_tokens and recent_tokens; leave these out, or the connector")


def layer_index(name: str) -> int:
    """Which of the layers with attention `name` is of; a block of LongCat has two, with a number of their own."""
    numbers = sum(part.isdigit() for part in name.split("."))
    return int(extract_layer_index(name, max(numbers, 1)))


def is_draft(config: Any, index: int) -> bool:
    """Whether layer `index` of a model that is being loaded with this configuration is a draft model's."""
    speculation, model = config.speculative_config, config.model_config
    if speculation is None:
        return False
    target = speculation.target_model_config
    return bool(index >= target.hf_text_config.num_hidden_layers or model is speculation.draft_model_config is not target)


def _check_skipped(config: Any) -> None:
    """Raise where kv_cache_dtype_skip_layers names what is no layer of the model or its drafts: vLLM would ignore it."""
    models, speculation = [config.model_config], config.speculative_config
    if speculation is not None:  # the model here may be the draft model
        models += [speculation.target_model_config, speculation.draft_model_config]
    layers = sum({id(m): m.hf_text_config.num_hidden_layers for m in models if m is not None}.values())
    names = {"sliding_window", *map(str, range(layers))}
    unknown = [name for name in config.cache_config.kv_cache_dtype_skip_layers if name not in names]
    check(
        not unknown,
        f"kv_cache_dtype_skip_layers names layers {', '.join(unknown)}; the model has layers 0 to {layers - 1}, and sliding_window "
        f"stands for all that have one",
    )


def _check_connector(transfer: Any) -> None:
    """Raise for a connector that may move single tokens or heads of a page: their scales lie elsewhere in it."""
    name = None if transfer is None else transfer.kv_connector
    connectors = transfer.kv_connector_extra_config.get("connectors", []) if name == "MultiConnector" else [{"kv_connector": name}]
    unknown = [one["kv_connector"] for one in connectors if one["kv_connector"] not in (None, *CONNECTORS)]
    if unknown:
        raise Unsupported(
            f"KV connector {unknown[0]} may move parts of a page, which halfbyte's pages do not have; "
            f"connectors that move whole pages: {', '.join(CONNECTORS)}"
        )


def _fitting(plan: CachePlan | str, model_config: Any) -> CachePlan:
    """The plan, checked against the model. Raises `Unsupported` for formats that cannot be stored in pages."""
    from halfbyte.hf.model_support import model_sizes

    plan = read_plan(plan)
    plan.check_model(model_sizes(model_config.hf_text_config))
    page_layouts(replace(plan, sink_tokens=0, recent_tokens=0))
    return plan


def layer_formats(options: Options, pair: Pair, index: int, skipped: bool, dtype: torch.dtype) -> LayerFormats:
    """Formats of a layer: those of the plan; 16 bits where it is `skipped`; else those of the backend's name."""
    if isinstance(options.plan, CachePlan):
        layers = options.plan.layers
        if index >= len(layers):
            raise Unsupported(
                f"layer {index}: the cache plan has {len(layers)}; give the draft model an attention_backend of its own"
            )
        return layers[index]
    if skipped:
        plain = "fp16" if dtype is torch.float16 else "bf16"
        return LayerFormats(plain, plain)
    assert pair is not None
    return LayerFormats(*pair, options.rotate_keys)


def check_cache(pair: Pair, head_size: int, kv_cache_dtype: str, value_size: int | None = None) -> None:
    """Raise for heads that do not fit into a page, and for another kv_cache_dtype (`check_cache_dtype`)."""
    if pair is not None:
        PageLayout(*pair, head_size, value_size)
    check_cache_dtype(pair, kv_cache_dtype)


def check_cache_dtype(pair: Pair, kv_cache_dtype: str) -> None:
    """Raise for a kv_cache_dtype next to a backend that has formats of its own; that of the model's files is passed over."""
    config, own = get_current_vllm_config_or_none(), cache_dtype(PLAN if pair is None else backend_name(*pair))
    model = None if config is None else config.model_config
    of_files = "auto" if model is None else resolve_kv_cache_dtype_string("auto", model)
    if kv_cache_dtype not in ("auto", own, of_files):
        raise Unsupported(
            f"kv_cache_dtype={kv_cache_dtype!r} and an attention backend with formats of its own exclude each other; leave "
            f"kv_cache_dtype out"
        )


def check_saved(cache: Mapping[str, Any], backend: str) -> None:
    """Raise where a model that was saved with a packed `cache`, if it has one, would run with another library's."""
    if not cache or backend in backend_names():
        return
    keys, values = cache["keys"], cache["values"]
    named = (
        backend_name(keys, values) if all(isinstance(f, str) and f in PAGE_FORMATS for f in (keys, values)) else "one of halfbyte's"
    )
    raise Unsupported(
        f"this model was saved with a packed cache, keys={keys!r}, values={values!r}, and attention backend {backend} has another; "
        f"give --attention-backend {named}, or take halfbyte_cache out of its config.json"
    )

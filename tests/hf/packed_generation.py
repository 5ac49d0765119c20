"""transformers' own tests of generation, with an INT8 cache wherever `generate()` is not asked for another, or for none.

    python tests/hf/packed_generation.py CHECKOUT [options of pytest]

CHECKOUT is a checkout of transformers at the installed version; no package has these tests. This file is also the pytest plugin
that packs the caches. A test must pass and make a packed cache, or stand in `LEFT_OUT` with the reason; an entry that no family
needs fails the run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationMixin

import halfbyte.hf as hf
from halfbyte.hf.default_cache import Prepared

#: GPT-NeoX is not among them: its tests draw attention masks with holes, which are refused.
FAMILIES = (*("llama", "gpt_oss", "gemma2", "gpt2", "mistral", "mixtral"), *("olmo2", "opt", "phi3", "qwen2", "qwen3", "stablelm"))
FORMATS = {"keys": "int8", "values": "int8"}

_NO_CACHE, _NO_GENERATE, _STATIC = "passes use_cache=False", "calls no generate()", "asks for a static cache"
#: Test -> why it fails, or makes no packed cache.
LEFT_OUT: dict[str, str] = {
    "test_beam_sample_generate_dict_output": _NO_CACHE,
    "test_beam_search_generate_dict_output": _NO_CACHE,
    "test_greedy_generate_dict_outputs": _NO_CACHE,
    "test_sample_generate_dict_output": _NO_CACHE,
    "test_inherits_generation_mixin": _NO_GENERATE,
    "test_left_padding_compatibility": _NO_GENERATE + "; tests/hf/test_hf_families.py pads",
    "test_past_key_values_format": _NO_GENERATE,
    "test_prepare_inputs_for_generation_kwargs_forwards": _NO_GENERATE,
    "test_prompt_lookup_decoding_stops_at_eos": _NO_GENERATE,
    "test_prompt_lookup_decoding_matches_greedy_search": "is_flaky without parentheses runs nothing; tests/hf/test_hf_drafts.py",
    "test_generate_from_inputs_embeds_with_static_cache": _STATIC,
    "test_generate_with_static_cache": _STATIC,
    "test_static_cache_no_recompile_with_smaller_length": _STATIC,
    "test_generate_compile_model_forward_fullgraph": "wants a DynamicCache by default; tests/hf/test_hf_compile.py",
}

#: The tests, as the checkout's own modules import them.
MIXIN = "tests.generation.test_utils"


def main(checkout: str, *options: str) -> int:
    """Run the tests of all families; pytest's exit status."""
    files = [f"tests/models/{family}/test_modeling_{family}.py" for family in FAMILIES]
    if missing := [file for file in files if not Path(checkout, file).is_file()]:
        raise SystemExit(f"{checkout}: no checkout of transformers; it lacks {missing[0]}")
    here = str(Path(__file__).absolute().parent)
    os.chdir(checkout)
    sys.path[:0] = [os.getcwd(), here]
    quiet = ["-q", "-o", "log_cli=false", "-W", "ignore", "--show-capture=no"]
    return int(pytest.main([*files, "-m", "generate", "-p", Path(__file__).stem, *quiet, *options]))


# ------------------------------------------------------------------------------------------------------------- packed caches

made = 0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "generate: a test of generation")
    hf.PackedCache.__init__ = _counted(hf.PackedCache.__init__)  # type: ignore[method-assign]
    GenerationMixin.generate = _packed(GenerationMixin.generate)


def _counted(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def init(*args: Any, **kwargs: Any) -> None:
        global made
        made += 1
        method(*args, **kwargs)

    return init


def _packed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_cache") is not False and kwargs.get("cache_implementation") is None:
            kwargs.pop("output_attentions", None)  # is refused
            if model.config._attn_implementation != hf.NAME or "generate" not in vars(model):
                hf.quantize(model, **FORMATS)  # a configuration may be another model's, which has been here
            if not isinstance(model, Prepared):
                return model.generate(*args, **kwargs)
        return method(model, *args, **kwargs)

    return generate


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look at packed caches where the tests look at the tensors of transformers' own."""
    mixin = importlib.import_module(MIXIN).GenerationTesterMixin
    for name, check, argument in (
        ("_check_past_key_values_for_generate", check_cache, "past_key_values"),
        ("_check_attentions_for_generate", check_no_weights, "decoder_past_key_values"),
    ):
        setattr(mixin, name, _if_packed(getattr(mixin, name), check, argument))


def _if_packed(method: Callable[..., None], check: Callable[..., None], argument: str) -> Callable[..., None]:
    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(method).bind(*args, **kwargs).arguments
        if isinstance(given[argument], hf.PackedCache):
            check(**{name: x for name, x in given.items() if name != "self"})
        else:
            method(*args, **kwargs)

    return checked


def check_cache(batch_size: int, past_key_values: hf.PackedCache, seq_length: int, config: Any) -> None:
    assert len(past_key_values.layers) == config.get_text_config(decoder=True).num_hidden_layers
    for layer in past_key_values.layers:
        assert (layer.key_format.name, layer.value_format.name) == (FORMATS["keys"], FORMATS["values"])
        assert layer.kv.lengths.tolist() == [seq_length] * batch_size


def check_no_weights(attentions: Any, **kwargs: Any) -> None:
    assert attentions is None


# ------------------------------------------------------------------------------------------------------------------- verdicts


#: Test of `LEFT_OUT` -> whether a family needs the entry. The process that counts gets every report, with xdist, too.
needed: dict[str, bool] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.when != "call" or report.skipped:
        return report
    unmade = made == item.stash[_BEFORE]
    if item.name in LEFT_OUT:
        report.user_properties.append(("left out", (item.name, bool(report.failed or unmade))))
        report.outcome, report.wasxfail = "skipped", LEFT_OUT[item.name]
    elif report.passed and unmade:
        report.outcome, report.longrepr = "failed", "no packed cache was made; give the reason in LEFT_OUT"
    return report


_BEFORE = pytest.StashKey[int]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEFORE] = made


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for kind, value in report.user_properties:
        if kind == "left out":
            name, fails = value
            needed[name] = needed.get(name, False) or fails


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if stale := [name for name, fails in needed.items() if not fails]:
        terminalreporter.write_line(f"LEFT_OUT has what every family passes: {', '.join(stale)}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not all(needed.values()) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(*sys.argv[1:]))

"""Single requests in a real engine: too long ones, aborted ones, and the same bits beside any others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engines import PROMPTS, SHIPPED, TEXT, engine, generate, quantized, refused, save
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.determinism import batch_invariant

from halfbyte.vllm import backend
from halfbyte.vllm.names import backend_name

pytestmark = pytest.mark.cpu_platform  # they look into the engine, which is in another process elsewhere
PAIR = backend_name("int8", "int8")


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    """An engine of 13 blocks, enough for the longest request and not for two; the tests of it come first: one engine at a time."""
    with engine(backend=PAIR, block_size=16, max_model_len=192, num_gpu_blocks_override=13, enable_prefix_caching=False) as made:
        yield made


def free_blocks(llm: Any) -> int:
    """Blocks that no request holds."""
    return int(llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def test_requests_longer_than_the_engine_are_refused_and_change_nothing(llm: Any) -> None:
    """Of 192 tokens with none left for an answer, and of more; alone and in a batch, whose other requests run afterwards."""
    expected = generate(llm, PROMPTS[:1])
    for length in (192, 300):
        for batch in ([TEXT[:length]], [PROMPTS[0], TEXT[:length]]):
            with pytest.raises(VLLMValidationError, match=r"maximum (model|context) length (of|is) 192"):
                generate(llm, [list(p) for p in batch])
    for request in llm.llm_engine.output_processor.request_states.copy():
        llm.llm_engine.abort_request([request])
    assert generate(llm, PROMPTS[:1]) == expected
    assert len(generate(llm, [TEXT[:180]], 30)[0].tokens) == 12  # up to the engine's length


def test_an_aborted_request_leaves_its_pages(llm: Any) -> None:
    """In its prompt's second chunk, in the middle of its answer, and beside another; the pool is too small for what stays."""
    expected = generate(llm, PROMPTS, 12)
    run, params = llm.llm_engine, SamplingParams(max_tokens=80, temperature=0, ignore_eos=True, detokenize=False)
    for steps in (0, 1, 7):
        for name, at in (("first", 0), ("second", 400)):
            run.add_request(name, {"prompt_token_ids": list(TEXT[at : at + 90])}, params)
        for _ in range(steps):
            run.step()
        run.abort_request(["first", "second"])
        while run.has_unfinished_requests():
            run.step()
        assert free_blocks(llm) == 12  # one of 13 is vLLM's
        assert [said.tokens for said in generate(llm, PROMPTS, 12)] == [said.tokens for said in expected]


def test_an_engine_whose_cache_holds_no_request_of_its_length() -> None:
    assert "KV cache" in refused(backend=PAIR, block_size=16, max_model_len=192, num_gpu_blocks_override=4)


def test_batch_invariance_reaches_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of VLLM_BATCH_INVARIANT, without vLLM's own part, whose kernels need a GPU."""
    asked = list[bool]()
    attend = backend.attention_varlen

    def watched(*args: Any, **options: Any) -> Any:
        asked.append(options["deterministic_batch"])
        return attend(*args, **options)

    monkeypatch.setattr(backend, "attention_varlen", watched)
    monkeypatch.setattr(batch_invariant, "init_batch_invariance", lambda: None)
    for value in ("0", "1"):
        asked.clear()
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        with engine(backend=PAIR) as made:
            assert generate(made, PROMPTS[:1], 2)
        assert set(asked) == {value == "1"}


def test_batch_invariance_with_packed_weights_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    folder = save(quantized(SHIPPED, weights="int8_col"), tmp_path / "packed")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT=1 is not implemented for halfbyte's linear layers" in refused(backend=PAIR, model=folder)

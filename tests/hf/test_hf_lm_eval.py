"""lm-eval measures the packed cache within `packed_forwards`. Skipped where lm-eval is not installed; `make hf-suite` has it."""

from __future__ import annotations

import copy
import importlib
import json
import math

import pytest
import torch
import transformers as tf

import halfbyte.hf as hf
from command_line import refusal
from halfbyte.errors import InvalidArgument
from halfbyte.paths import shipped_model
from halfbyte_lab.evals.quality import Setting
from halfbyte_lab.evals.suite import lm_eval_results

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install lm-eval", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = [
    "import os\nimport sys\n\ndef main(argv):\n    for name in argv[1:]:\n        print(os.path.join(name, 'x'))\n",
    "class A:\n    pass\n",
]
TASKS = {
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric": "byte_perplexity",
    },
    "choice": {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": ["def", "class"], "doc_to_target": 0},
    "answer": {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "x", "metric": "exact_match"},
}


@pytest.fixture
def tasks(tmp_path):
    """Task files, and the data that they name."""
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, own in TASKS.items():
        task = {**own, "task": name, "dataset_path": "json", "test_split": "test"}
        task["dataset_kwargs"] = {"data_files": {"test": str(tmp_path / "texts.jsonl")}}
        task["metric_list"] = [{"metric": task.pop("metric", "acc")}]
        if own["output_type"] == "generate_until":
            task["generation_kwargs"] = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return importlib.import_module("lm_eval.tasks").TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.fixture(scope="module")
def shipped():
    tokenizer = tf.AutoTokenizer.from_pretrained(shipped_model())
    tokenizer.pad_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens([0, 1])  # lm-eval needs both
    return tf.AutoModelForCausalLM.from_pretrained(shipped_model()).eval(), tokenizer


def evaluate(model, tokenizer, tasks):
    harness = importlib.import_module("lm_eval.models.huggingface").HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=256
    )
    made = lm_eval.simple_evaluate(harness, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0, random_seed=0)
    samples = {name: [s["filtered_resps"] for s in made["samples"][name]] for name in TASKS}
    return harness, made["results"]["perplexity"]["byte_perplexity,none"], samples


@pytest.mark.slow
def test_tasks_of_lm_eval_read_the_packed_cache(shipped, tasks):
    found = {}
    for kind in ("bf16", "int8", "int4"):
        model = hf.quantize(copy.deepcopy(shipped[0]), keys=kind, values=kind)
        with hf.packed_forwards(model):
            harness, found[kind], samples = evaluate(model, shipped[1], tasks)
        assert found[kind] == pytest.approx(perplexity(model, shipped[1], harness.prefix_token_id, kind), rel=1e-5)
        ids = shipped[1](TEXTS[0], return_tensors="pt").input_ids
        answer = shipped[1].decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :])
        assert samples["answer"][0] == [answer.split("\n\n")[0]]
    assert len({*found.values()}) == 3
    assert abs(found["int8"] - found["bf16"]) < abs(found["int4"] - found["bf16"])


@pytest.mark.slow
def test_local_tasks_of_a_card(shipped, tasks, tmp_path):
    """`halfbyte eval --suite --tasks perplexity.yaml`: the figures of each cache, as lm-eval has them within `packed_forwards`."""
    folder = tmp_path / "model"
    shipped[0].save_pretrained(folder)
    shipped[1].save_pretrained(folder)
    loaded, found = copy.deepcopy(shipped[0]), {}
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    for kind in ("bf16", "int4"):
        file = str(tmp_path / "perplexity.yaml")
        made = lm_eval_results(loaded, str(folder), Setting(kind, kind, kind == "int4"), [file])  # rotated by default
        found[kind] = made["perplexity"]["byte_perplexity"]
        model = hf.quantize(copy.deepcopy(shipped[0]), keys=kind, values=kind)
        assert found[kind] == pytest.approx(perplexity(model, tokenizer, first, kind), rel=1e-5)
    assert found["int4"] > found["bf16"]
    with pytest.raises(InvalidArgument, match=r"has no task \['none'\]"):
        lm_eval_results(loaded, str(folder), Setting("int8", "int8"), ["none"])


def test_task_files_that_are_not_there(capsys):
    assert "no such file" in refusal(capsys, "eval", "demo", "--suite", "--tasks", "nowhere/mine.yaml")


def perplexity(model, tokenizer, first, kind):
    """Of the texts a byte, fed in chunks of 16 tokens to a packed cache."""
    total = 0.0
    for text in TEXTS:
        ids = torch.tensor([[first, *tokenizer(text, add_special_tokens=False).input_ids]])
        cache = hf.PackedCache(model, 256, keys=kind, values=kind)
        with torch.no_grad():
            logits = torch.cat([model(part, past_key_values=cache).logits for part in ids[:, :-1].split(16, 1)], 1)
        total += float(logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum())
    return math.exp(-total / sum(len(text.encode()) for text in TEXTS))

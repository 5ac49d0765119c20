"""llama.cpp as a peer of whole models on a CPU: its steps with a GGUF file of the model, by its server's own clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from halfbyte.device import Device
from halfbyte.errors import check, require
from halfbyte.hf.model_support import text_config
from halfbyte_lab.measure.environment import environment
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.roofline import Roofline
from halfbyte_lab.measure.timing import QUICK
from halfbyte_lab.model_step import Steps, Times, step_record

#: Calls whose median is taken, behind one that warms up.
REPEATS = 5
#: Types of its cache, by ggml's names.
CACHES = ("f16", "q8_0")


def check_can_run(file: Path, batch: int, machine: Device) -> None:
    """Raise where it cannot be measured."""
    check(file.is_file(), f"gguf={str(file)!r} is no file")
    check(machine.kind == "cpu" and batch == 1, "gguf is given; llama.cpp is measured on a CPU (--device cpu), with one sequence")
    require("xllamacpp", "llama.cpp as a peer")


def records(file: Path, model: Any, steps: Steps, machine: Device) -> Iterator[Record]:
    """Steps of one sequence with the `model` in a GGUF file: a record for each type of its cache."""
    check_can_run(file, steps.batch, machine)
    threads = torch.get_num_threads()
    shape = {"B": 1, "T": steps.context, "layers": text_config(model).num_hidden_layers}
    rate, where = Roofline(machine, threads, QUICK).read(2**24).gb_per_s, environment(machine, threads)
    for cache in CACHES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # torch's threads would take turns with its own
            times = pool.submit(_times, file, steps.prompts(model)[0].tolist(), steps.new, threads, cache).result()
        names, note = f"{file.stem.rpartition('.')[2]}, {cache}/{cache}", f"first token {1e3 * times.first:.1f} ms"
        yield step_record(shape, names, "llama.cpp", file.stat().st_size, where, times, rate, note)


def _times(file: Path, prompt: list[int], new: int, threads: int, cache: str) -> Times:
    import xllamacpp

    options: Any = xllamacpp.CommonParams()
    options.model.path, options.n_parallel, options.n_ctx = str(file), 1, len(prompt) + new + 64
    options.verbosity = -1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.cache_type_k = options.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
    server = xllamacpp.Server(options)
    ask = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    timings = [_timings(server.handle_completions(ask)) for _ in range(1 + REPEATS)][1:]
    return Times(min(t["prompt_ms"] for t in timings) / 1e3, tuple(t["predicted_per_token_ms"] / 1e3 for t in timings))


def _timings(answer: Any) -> dict[str, float]:
    fields: dict[str, Any] = json.loads(answer) if isinstance(answer, str | bytes) else answer
    timings: dict[str, float] = fields["timings"]
    return timings

"""`python -m halfbyte_lab.serving`: every mode in a process of its own, rows as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import halfbyte_lab.serving as package
from halfbyte.device import describe
from halfbyte_lab.measure.environment import environment
from halfbyte_lab.model_sizes import SIZES
from halfbyte_lab.serving import engine, folders
from halfbyte_lab.serving.modes import PLAIN, Mode

#: What is measured, in this order, with its default sizes.
MEASURED = {"decode": ["1x2048", "8x8192", "64x8192"], "hits": ["64x8192+16", "64x8192+512"], "serve": ["96x8192+128"]}
#: No network, no reports, and engines in processes of their own; what the user has set stays.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "PYTHONUNBUFFERED": "1",
}


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m halfbyte_lab.serving", description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--modes", nargs="+", type=Mode.parse, default=[Mode.parse(m) for m in ("bf16", "bf16/int8+int4_g32")])
    p.add_argument("--sizes", default="llama-3-8b", choices=sorted(SIZES))
    for what, shapes in MEASURED.items():
        p.add_argument(f"--{what}", nargs="*", default=shapes, metavar="SHAPE", help=(getattr(engine.Engine, what).__doc__))
    p.add_argument("--tokens", nargs=2, type=int, default=[16, 80], metavar=("SHORT", "LONG"), help="of the runs that time steps")
    p.add_argument("--ranks", type=int, default=1, help="tensor parallelism")
    p.add_argument("--limit", type=float, default=420, help="seconds a mode")
    p.add_argument("--layers", type=int, help="in place of the model's")
    p.add_argument("--args", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    p.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "halfbyte-serving", help="folders, caches and logs")
    p.add_argument("--out", type=Path, default=Path("vllm.jsonl"))
    p.add_argument("--log", type=Path, help=argparse.SUPPRESS)  # of a child, whose only mode it measures
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every mode; the exit status tells whether all came to their end."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(typed)
    if options.log:
        del sys.argv[-4:]  # records hold what the user typed, without the child's mode and log
        measure(options)
        return 0
    ends = [_in_child(mode, typed, options) for mode in options.modes]
    return int(not all(ends))


def measure(options: argparse.Namespace) -> None:
    """One mode, in this process."""
    (mode,) = options.modes
    machine = describe()
    facts = asdict(environment(machine, machine.threads))

    def write(row: dict[str, Any]) -> None:
        row = {"mode": str(mode), "sizes": options.sizes, **row, "environment": facts}
        print(json.dumps(row), flush=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    llm, row = engine.started(llm_arguments(mode, options))
    facts["versions"] = facts["versions"] | {"vllm": row["vllm"]}
    write({"what": "engine", **row})
    running = engine.Engine(llm, row["kv_tokens"], SIZES[options.sizes].vocab_size, tuple(options.tokens), options.log)
    for what in MEASURED:
        for shape in getattr(options, what):
            write(running.row(what, shape))


def llm_arguments(mode: Mode, options: argparse.Namespace) -> dict[str, Any]:
    """Of `vllm.LLM`: the same for every mode but for what the mode is."""
    sizes = SIZES[options.sizes]
    folder = folders.write(sizes, mode, options.work, options.layers or sizes.num_hidden_layers)
    return {
        "model": str(folder),
        "load_format": "dummy" if mode.weights == PLAIN else "auto",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "jit_monitor_verbose": True,
        "max_model_len": 16640,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "tensor_parallel_size": options.ranks,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, *range(8, 65, 8)]},
        **mode.options,
        **options.args,
    }


def _in_child(mode: Mode, typed: list[str], options: argparse.Namespace) -> bool:
    """Whether the mode came to its end in time; the end of its log is shown where it did not."""
    options.work.mkdir(parents=True, exist_ok=True)
    log = options.work / f"{str(mode).replace('/', '-')}-{time.time():.0f}.log"
    command = [sys.executable, "-m", package.__name__, *typed, "--modes", str(mode), "--log", str(log)]
    variables = {**_ENVIRONMENT, "VLLM_CACHE_ROOT": str(options.work / "cache"), **os.environ}
    with log.open("w", encoding="utf-8") as file, _killed(command, stdout=file, stderr=file, env=variables) as child:
        try:
            status: object = child.wait(options.limit)
        except subprocess.TimeoutExpired:
            status = f"not done after {options.limit:.0f} s"
    if status:
        print(f"{mode}: {status}", *log.read_text(errors="replace").splitlines()[-40:], sep="\n", file=sys.stderr)
    else:
        print(*(line for line in log.read_text(errors="replace").splitlines() if line.startswith("{")), sep="\n")
    return not status


@contextlib.contextmanager
def _killed(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone at the end, and its engine's with it."""
    child = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


if __name__ == "__main__":
    sys.exit(main())

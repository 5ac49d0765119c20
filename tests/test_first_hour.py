"""The first hour of a user: from a look at the machine to a decision about a model, in a terminal of 80 columns, offline.

Each step is a process of its own in an empty folder, as it would be typed; a step uses what the steps before it left. What each
prints stays in build/first-hour, with pictures of terminals and pages where there is a browser. So do the times of five tasks that
use nothing but commands of the documentation: commit times.jsonl as results/first-hour.jsonl. HALFBYTE_FIRST_HOUR=all adds what
takes minutes: vLLM, if `make engine-test` has installed it, and the demo beside two busy processes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from browser import picture, terminal
from halfbyte.device import describe
from halfbyte.paths import append_line, shipped_model
from halfbyte_lab.measure.environment import environment

transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HALFBYTE = [sys.executable, "-m", "halfbyte"]
ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "first-hour"
INDEX, ENGINES, CHECKPOINTS = "docs/index.md", "docs/guides/engines.md", "docs/guides/checkpoints.md"
SERVE = "docs/guides/vllm.md"
HERE = "127.0.0.1"
#: Python of vLLM's environment.
VLLM = ROOT / ".venv-engine" / "bin" / "python"
minutes = pytest.mark.skipif(os.environ.get("HALFBYTE_FIRST_HOUR") != "all", reason="minutes; HALFBYTE_FIRST_HOUR=all")
ENVIRONMENT = {"COLUMNS": "80", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DISPLAY": "", "WAYLAND_DISPLAY": ""}


def step(folder: Path, *words: str, status: int = 0) -> str:
    """What a command prints; it must end as expected, without a traceback, on lines of 80 columns but for what is to be copied."""
    done = subprocess.run(
        [*HALFBYTE, *words], cwd=folder, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=600, check=False
    )
    said = done.stdout if status == 0 else done.stderr
    command = shlex.join(["halfbyte", *words])
    terminal(command, said, KEPT / re.sub(r"[^a-z0-9]+", "-", command.lower())[:60].strip("-"))
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    wide = [line for line in said.splitlines() if len(line) > 80 and not re.match(r"halfbyte |model = ", line)]
    assert status or wide == []
    return said


def test_from_a_bare_machine_to_a_decision(tmp_path: Path) -> None:
    assert "versions" in step(tmp_path, "doctor")
    assert "int4_channel" in step(tmp_path, "formats", "--for", "kv")
    assert "1 x 16,384 tokens" in step(tmp_path, "memory", "demo", "--context", "16k", "--memory", "24GB")
    assert "tuned" in step(tmp_path, "explain", "--context", "1M")
    timed_here = ("--batch", "1", "--heads", "8/2", "--dim", "64", "--context", "256", "--formats", "int8", "--impl", "auto")
    assert "halfbyte auto" in step(tmp_path, "bench", "decode", *timed_here, "--quick")

    advice = step(tmp_path, "advise", "demo", "--gpu", "24GB", "--batch", "8", "--context", "2k")
    assert "by the evidence card of demo" in advice
    (keys, values, weights) = re.search(r"--keys (\w+) --values (\w+) --weights (\w+)", advice).groups()
    assert "a100-80gb" in step(tmp_path, "advise", "demo", "--gpu", "abacus", status=1)

    judged = step(tmp_path, "eval", "demo", "--keys", keys, "--values", values, "--windows", "1", "--length", "64")
    assert "1 window of 64 tokens" in judged
    assert re.search(r"smaller, perplexity .*safe", " ".join(judged.split()))
    # Every setting quantizes the weights and searches their clip, so the model of this step has one layer.
    transformers.AutoModelForCausalLM.from_pretrained(shipped_model(), num_hidden_layers=1).save_pretrained(tmp_path / "small")
    step(tmp_path, "eval", "./small", "--suite", "--card", "card.json", "--windows", "1", "--length", "32", "--long", "96")
    by_card = step(tmp_path, "advise", "./small", "--card", "card.json")
    assert "by the evidence card of ./small" in " ".join(by_card.split())
    assert "+0.00\u00b10.00*" in by_card  # what formats cost is shown in 80 columns, too
    assert "KL" in (tmp_path / "card.md").read_text()
    step(tmp_path, "quantize", "demo", "--weights", weights, "-o", "packed")
    prompt = "def main("
    texts = [
        step(tmp_path, "generate", name, "--prompt", prompt, "--keys", keys, "--values", values, "--tokens", "8", *more)
        for name, more in (("demo", ("--weights", weights)), ("./packed", ()))
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith(prompt)
    stored = step(tmp_path, "advise", "./packed", "--gpu", "24GB")
    assert "halfbyte.hf.load('./packed', keys=" in stored
    assert f"{weights} weights" in " ".join(step(tmp_path, "memory", "./packed").split())
    assert {p.name for p in tmp_path.iterdir()} == {"small", "packed", "card.json", "card.md"}


@contextlib.contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[None]:
    """A process that a test leaves behind would be waited for."""
    try:
        yield
    finally:
        process.kill()


def test_the_demo_and_its_playground(tmp_path: Path) -> None:
    """The report is written, the page answers with the same sections, formats can be tried, and Ctrl-C ends it quietly."""
    options = {"cwd": tmp_path, "env": {**os.environ, **ENVIRONMENT}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # What runs in a shell's background ignores Ctrl-C, and hands that down.
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([*HALFBYTE, "demo", "--quick", "--serve"], text=True, **options) as process, killed(process):
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("Playground: "):
                break
        host, port = re.search(r"http://([\d.]+):(\d+)/", said[-1]).groups()
        connection = http.client.HTTPConnection(host, int(port), timeout=120)
        connection.request("GET", "/")
        page = connection.getresponse().read().decode()
        for width in (1000, 400):
            picture(f"http://{host}:{port}/", KEPT / f"playground-{width}.png", (width, 1800))
        asked = {"keys": "int8", "values": "int8", "weights": "bf16", "prompt": "def main(", "tokens": 4}
        connection.request("POST", "/try", json.dumps(asked), {"Content-Type": "application/json"})
        events = [json.loads(line) for line in connection.getresponse().read().splitlines()]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert (rest, "Traceback" in errors) == ("", False)
    assert events[-1]["kind"] == "quality"
    assert all(len(line.rstrip("\n")) <= 80 for line in said)
    terminal("halfbyte demo --quick --serve", "".join(said), KEPT / "demo-quick")
    picture((tmp_path / "halfbyte-report.html").as_uri(), KEPT / "report.png")
    report = (tmp_path / "halfbyte-report.html").read_text()
    sections = re.findall(r"<h2 id=.*?</h2>", report)
    assert sections
    assert re.findall(r"<h2 id=.*?</h2>", page) == sections
    assert "Try formats" not in report


def busy_seconds() -> float:
    """CPU seconds that this machine has spent on anything but idling and waiting."""
    user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def timed(task: str, *pages: str) -> Iterator[dict[str, float]]:
    """Keeps a record of a task: pages to read, seconds, CPU seconds, and how many cores other processes kept busy meanwhile."""
    before, busy, start = sum(os.times()[:4]), busy_seconds(), time.perf_counter()
    took: dict[str, float] = {}
    yield took
    took["seconds"] = time.perf_counter() - start
    took["cpu_seconds"] = sum(os.times()[:4]) - before
    took["others"] = (busy_seconds() - busy - took["cpu_seconds"]) / took["seconds"]
    rounded = {name: round(value, 1) for name, value in took.items()}
    made = asdict(environment(describe("cpu"), 1)) | {"command": "pytest tests/test_first_hour.py"}
    where = {"cores": len(os.sched_getaffinity(0)), "environment": made}
    KEPT.mkdir(parents=True, exist_ok=True)
    append_line(KEPT / "times.jsonl", json.dumps({"task": task, "pages": pages, **rounded, **where}))


def shown(page: str, start: str) -> list[str]:
    """The words of the first command of a page that begins so."""
    code = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", "")
    found = re.search(rf"^ *({re.escape(start)}.*)$", code, re.MULTILINE)
    assert found, f"{page} shows no {start}"
    return shlex.split(found[1], comments=True)


def blocks_of(page: str) -> str:
    """The Python of a page."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


def script(folder: Path, text: str) -> str:
    """What a Python script prints."""
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=folder, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_formats_for_a_card_of_24_gb(tmp_path: Path) -> None:
    """Of a model with Llama-3-8B's sizes, of which only config.json is here."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes, vocab_size=128256, max_position_embeddings=8192, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "model")
    page = "docs/guides/choosing-formats.md"
    mine = {"demo": "./model", "h200": "24GB", "2048": "8k"}
    with timed("choose formats for a 24 GB card", INDEX, page):
        advice = step(tmp_path, *[mine.get(word, word) for word in shown(page, "halfbyte advise")[1:]])
    assert re.search(r"bf16/bf16 +8.59 +5 of 8", advice)  # in 16 bits this batch does not fit
    assert re.search(r"Take \w+ weights, \w+ keys and \w+ values", advice)


def test_int4_keys_judged(tmp_path: Path) -> None:
    page = "docs/guides/measuring.md"
    with timed("judge INT4 keys on a model", INDEX, "docs/guides/choosing-formats.md", page):
        mine = ("--values", "int8", "--weights", "bf16", "--windows", "8", "--length", "256")
        judged = step(tmp_path, *shown(page, "halfbyte eval demo --keys int4")[1:], *mine)
    assert "int4 / int8 rotated: 2.51x smaller" in judged
    assert re.search(r"(not )?safe \(KL", " ".join(judged.split()))


def test_a_gptq_checkpoint(tmp_path: Path, gptq_folder: Path) -> None:
    shutil.copytree(gptq_folder, tmp_path / "some" / "model-GPTQ")
    with timed("load a GPTQ checkpoint", INDEX, CHECKPOINTS):
        said = script(tmp_path, blocks_of(CHECKPOINTS) + "print(model.model.layers[0].self_attn.q_proj)")
        converted = step(tmp_path, *shown(CHECKPOINTS, "halfbyte quantize --from")[1:])
    assert "FusedProjections" in said
    assert "loaded again and equal bit for bit" in converted


def test_attention_from_the_memory_of_an_engine(tmp_path: Path) -> None:
    page = "docs/tutorials/kernels-in-an-engine.md"
    with timed("call attention from an engine's memory", INDEX, ENGINES, page):
        assert "[4, 8, 1, 64] True" in script(tmp_path, blocks_of(page))
        assert "[4, 8, 64] 106" in script(tmp_path, blocks_of(ENGINES))


@minutes
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not here; make engine-test installs it")
def test_a_folder_quantized_and_served(tmp_path: Path) -> None:
    """Until the first words; on a CPU with the two changes that the page names."""
    with socket.socket() as s:
        s.bind((HERE, 0))
        port = str(s.getsockname()[1])
    serve = [str(VLLM), *shown(SERVE, "python -m vllm.entrypoints")[1:], *shown(SERVE, "vllm serve FOLDER")[2:], "--port", port]
    ask = [word.replace("8000", port) for word in shown(SERVE, "curl localhost")]
    options = {"cwd": tmp_path, "env": {**os.environ, **ENVIRONMENT}}
    with timed("quantize a folder and serve it", INDEX, SERVE), (tmp_path / "log").open("w") as log:
        step(tmp_path, *["demo" if word == "MODEL" else word for word in shown(SERVE, "halfbyte quantize MODEL")[1:]])
        with subprocess.Popen(serve, stdout=log, stderr=log, start_new_session=True, **options) as server:
            try:
                until_it_answers(server, f"http://{HERE}:{port}/health")
                answer = subprocess.run(ask, capture_output=True, text=True, check=True, **options).stdout
                server.terminate()
                server.wait(60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGKILL)
    assert json.loads(answer)["usage"]["completion_tokens"] == 24
    assert "KV cache in int4 / int4: " in (tmp_path / "log").read_text()


def until_it_answers(server: subprocess.Popen[bytes], url: str) -> None:
    while server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60):
            return
        time.sleep(0.5)
    raise AssertionError(f"the server ended with {server.returncode}")


@contextlib.contextmanager
def beside_two_busy_processes() -> Iterator[None]:
    """Two cores for everything, and two processes that never wait: sessions of their own, among which a scheduler divides cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(2)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, cores)


@minutes
@pytest.mark.parametrize(("options", "most"), [((), 180), (("--quick",), 60)])
def test_the_demo_on_two_busy_cores(tmp_path: Path, options: tuple[str, ...], most: int) -> None:
    with beside_two_busy_processes(), timed(shlex.join(["halfbyte", "demo", *options]), "README.md") as took:
        step(tmp_path, "demo", *options)
    assert took["seconds"] < most, took

"""The first hour of a user: from a look at the machine to a decision about a model, in a terminal of 80 columns, offline.

Each step is a process of its own in an empty folder, as it would be typed; a step uses what the steps before it left. What each
prints stays in build/first-hour, with pictures of terminals and pages where there is a browser.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import picture, terminal
from halfbyte.paths import shipped_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HALFBYTE = [sys.executable, "-m", "halfbyte"]
KEPT = Path(__file__).parents[1] / "build" / "first-hour"
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
    assert "evaluating" in errors  # progress, although this is no terminal
    assert events[-1]["kind"] == "quality"
    assert all(len(line.rstrip("\n")) <= 80 for line in said)
    terminal("halfbyte demo --quick --serve", "".join(said), KEPT / "demo-quick")
    picture((tmp_path / "halfbyte-report.html").as_uri(), KEPT / "report.png")
    report = (tmp_path / "halfbyte-report.html").read_text()
    sections = re.findall(r"<h2 id=.*?</h2>", report)
    assert sections
    assert re.findall(r"<h2 id=.*?</h2>", page) == sections
    assert "Try formats" not in report

"""`vllm serve`, as a user starts it: 32 OpenAI requests at once, of which one client dies."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engines import DTYPE, ON_GPU, SHIPPED, TEXT

import halfbyte.vllm
from halfbyte.engine import PageLayout
from halfbyte.vllm.names import backend_name

HERE = "127.0.0.1"
TYPE = str(DTYPE).removeprefix("torch.")
PROMPTS = [list(TEXT[500 * i : 500 * i + 10 + 4 * i]) for i in range(31)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind((HERE, 0))
        return int(s.getsockname()[1])


class Server:
    """A server and its log."""

    def __init__(self, folder: Path) -> None:
        # The CPU build of vLLM is a distribution of another name than the one that `vllm serve` looks for.
        if not ON_GPU:
            named = folder / "vllm-0.32.0+cpu.dist-info"
            named.mkdir()
            (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.port, self.log = free_port(), folder / "log"
        backend = f"--attention-backend {backend_name('int8', 'int4_g32')}"
        dtype = f"--dtype {TYPE}" + " --gpu-memory-utilization 0.1" * ON_GPU
        options = f"{backend} {dtype} --max-model-len 512 --enforce-eager --port {self.port}"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(SHIPPED), "--served-model-name", "tiny"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *options.split()], env=environment, stdout=out, stderr=out, start_new_session=True
            )

    def wait(self, seconds: float = 280) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"the server is not up:\n{self.log.read_text()[-3000:]}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{HERE}:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int], tokens: int = 24) -> str:
        request = urllib.request.Request(
            f"http://{HERE}:{self.port}/v1/completions", self.body(prompt, tokens), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=200) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        assert found["usage"]["completion_tokens"] == tokens
        return str(found["choices"][0]["text"])

    def body(self, prompt: list[int], tokens: int, stream: bool = False) -> bytes:
        options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        return json.dumps({"model": "tiny", "prompt": prompt, **options}).encode()

    def die_while_reading(self) -> bytes:
        """A client that is killed after the first tokens of a long answer: its connection is reset."""
        body = self.body(list(TEXT[:30]), 480, stream=True)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((HERE, self.port), timeout=200) as s:
            s.sendall(head.encode() + body)
            read = b""
            while read.count(b"data: ") < 3:
                read += s.recv(4096)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return read

    def metric(self, name: str) -> float:
        return float(re.search(rf"^{name}{{.*}} (\S+)$", self.get("/metrics"), re.MULTILINE)[1])  # type: ignore[index]

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def lives(self) -> bool:
        """Whether any process of it is there, the engine's too."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server"))
    try:
        started.wait()
        yield started
    finally:
        started.stop()


def test_many_requests_and_a_client_that_dies(server: Server) -> None:
    """All others get what each gets alone, and the pages of the dead client's request come back."""
    with ThreadPoolExecutor(32) as pool:
        dead = pool.submit(server.die_while_reading)
        together = list(pool.map(server.complete, PROMPTS))
    assert b'"text"' in dead.result()
    assert together[::6] == [server.complete(prompt) for prompt in PROMPTS[::6]]
    for _ in range(60):
        if server.metric("vllm:num_requests_running") == server.metric("vllm:kv_cache_usage_perc") == 0:
            break
        time.sleep(0.5)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    # 32 answers of 24 tokens are fewer than the dead client asked for alone.
    assert server.metric("vllm:generation_tokens_total") < 37 * 24 + 480


def test_the_log_tells_how_many_blocks_there_are(server: Server) -> None:
    server.complete(PROMPTS[0])
    told = re.search(
        rf"KV cache in int8 / int4_g32: ([\d,]+) blocks; the same memory has ([\d,]+) in {TYPE} and ([\d,]+) in fp8",
        server.log.read_text(),
    )
    assert told is not None
    ours, plain, fp8 = (int(n.replace(",", "")) for n in told.groups())
    assert fp8 == pytest.approx(DTYPE.itemsize * plain, rel=1e-2)
    assert ours / plain == pytest.approx(2 * 64 * DTYPE.itemsize / PageLayout("int8", "int4_g32", 64).token_head_bytes, rel=1e-2)


def test_a_server_that_is_told_to_end_does(server: Server) -> None:
    """SIGTERM in the middle of an answer: as stock it ends without an error, and takes its engine with it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(server.die_while_reading).result()
    server.process.terminate()
    assert server.process.wait(30) in (0, -signal.SIGTERM)
    for _ in range(60):
        if not server.lives:
            break
        time.sleep(0.25)
    assert not server.lives


def test_registering_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has a line for each new backend; those who do not use halfbyte's need not read 145 of them."""
    from vllm.v1.attention.backends import registry

    seen: list[logging.LogRecord] = []
    monkeypatch.setattr(registry.logger, "level", logging.INFO)
    monkeypatch.setattr(registry.logger, "handle", seen.append)
    monkeypatch.setattr("halfbyte.vllm.names.backend_names", lambda: ["HALFBYTE_OF_A_TEST"])
    halfbyte.vllm.register()
    assert "HALFBYTE_OF_A_TEST" in registry.AttentionBackendEnum.__members__
    assert not seen


def test_registering_imports_no_layers() -> None:
    """vLLM calls the plugin in processes that load no weights, where the imports of layers took longer than all the rest of it."""
    code = "import sys, halfbyte.vllm as v; v.register(); sys.exit('halfbyte.vllm.weights' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0

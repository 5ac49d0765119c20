"""`halfbyte demo --serve`: the report with a playground for formats, on a local server.

The page posts formats and a prompt to /try and streams one JSON object a line: bytes, the text of both models as it comes, speed,
quality. The server listens on 127.0.0.1; pages of other sites can neither read it nor trigger work, because requests must name this
host and come as JSON.
"""

from __future__ import annotations

import contextlib
import html
import json
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from halfbyte.cli.formats import format_rows
from halfbyte.errors import HalfbyteError, InvalidArgument, check
from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS, key_format
from halfbyte.hf.weights import weight_bytes
from halfbyte.reference.hadamard import rotated
from halfbyte.text import Tokenizer, heldout_text, windows
from halfbyte_lab.evals.choices import caches
from halfbyte_lab.evals.model import write
from halfbyte_lab.evals.quality import Setting, evaluate, kv_bytes_per_token, with_weights

Event = dict[str, Any]

#: Where the server listens.
HOST = "127.0.0.1"
#: Most characters of a prompt, most tokens of a text, most bytes of a request.
PROMPT, TOKENS, REQUEST = 1200, 512, 1 << 16
#: What quality is measured on: windows, and tokens of each.
WINDOWS, LENGTH = 8, 128
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Asked:
    """One request: formats, a prompt, and how many tokens to write."""

    keys: str
    values: str
    weights: str
    prompt: str
    tokens: int

    @classmethod
    def read(cls, body: bytes) -> Asked:
        """From JSON; raises `InvalidArgument` that names what is wrong."""
        try:
            data = json.loads(body)
            request = cls(**{name: data[name] for name in ("keys", "values", "weights", "prompt", "tokens")})
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidArgument("expected a JSON object with keys, values, weights, prompt and tokens") from None
        texts = (request.keys, request.values, request.weights, request.prompt)
        check(all(isinstance(x, str) for x in texts), "keys, values, weights and prompt must be texts")
        check(0 < len(request.prompt) <= PROMPT, f"prompt has {len(request.prompt):,} characters; give 1 to {PROMPT:,}")
        check(type(request.tokens) is int and 0 < request.tokens <= TOKENS, f"tokens={request.tokens!r}; give 1 to {TOKENS}")
        return request

    def setting(self, head_dim: int) -> Setting:
        """As `halfbyte.hf.quantize` would take these formats: keys rotated where that is the default."""
        weights = None if self.weights == "bf16" else self.weights
        return Setting(self.keys, self.values, rotated(None, key_format(self.keys), head_dim), weights=weights)


class Playground:
    """What answers requests, one at a time: a model, and what was found of it so far."""

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        from halfbyte.hf.model_support import head_dims, text_config

        self.model, self.tokenizer = model, tokenizer
        self._head_dim = head_dims(text_config(model))[0]
        self._busy = threading.Lock()
        self._windows = windows(tokenizer.encode(heldout_text()), LENGTH, WINDOWS, tokenizer.bos)
        self._quantized = lru_cache(4)(lambda weights: with_weights(model, weights))
        self._quality = lru_cache(64)(self._measured)

    def events(self, asked: Asked) -> Iterator[Event]:
        """Bytes, both texts, speed and quality, each when it is known. Formats that do not exist raise before the first one."""
        setting = asked.setting(self._head_dim)
        with self._busy:
            variant = self._quantized(setting.weights)
            sizes = {"kv": kv_bytes_per_token(self.model, setting), "plain_kv": kv_bytes_per_token(self.model, Setting())}
            yield {"kind": "bytes", **sizes, "weights": weight_bytes(variant), "plain_weights": weight_bytes(self.model)}
            ours = yield from self._written("ours", "writing with these formats", variant, setting, asked)
            plain = yield from self._written("plain", "writing with 16 bits", self.model, Setting(), asked)
            yield {"kind": "speed", "ours": ours, "plain": plain, "cpu": self.model.device.type == "cpu"}
            yield {"kind": "step", "text": "measuring quality on held-out text"}
            yield self._quality(setting)

    def _written(self, kind: str, step: str, model: Any, setting: Setting, asked: Asked) -> Generator[Event, None, float]:
        """The pieces of a text; returns tokens per second, the prompt's left out."""
        yield {"kind": "step", "text": step}
        start, text = 0.0, ""
        for piece in write(model, self.tokenizer, asked.prompt, setting, asked.tokens):
            start = start or time.perf_counter()
            text += piece
            yield {"kind": kind, "piece": piece}
        tokens = len(self.tokenizer.encode(text))
        return (tokens - 1) / max(time.perf_counter() - start, 1e-9)

    def _measured(self, setting: Setting) -> Event:
        settings = [Setting(), *([setting] if setting != Setting() else [])]
        result = evaluate(self.model, settings, self._windows)[-1]
        return {"kind": "quality", "change": result.change, "noise": result.noise, "kl": result.kl_mean, "tokens": result.tokens}


def form(prompt: str) -> str:
    """The form as a part of a page."""
    rows = {(name, use == "weights"): f"{codes}, one scale for each {scale}" for name, use, codes, scale, _ in format_rows()}
    labels = {"Fastest": "Fastest on a GPU"}
    buttons = "".join(
        f'<button type="button" data-preset="{keys} {values} bf16">{labels.get(name, name)}</button>'
        for name, (keys, values) in {**caches(), "INT2": ("int2", "int2")}.items()
    )
    parts = {
        "keys": _options(KV_FORMATS, rows, False, "int4_channel"),
        "values": _options([n for n, f in KV_FORMATS.items() if not f.token_block], rows, False, "int8"),
        "weights": _options(["bf16", *WEIGHT_FORMATS], rows, True, "nvfp4"),
        "prompt": html.escape(prompt),
        "presets": buttons,
    }
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"{{{{{name}}}}}", part)
    return text


def _options(names: Iterable[str], rows: dict[tuple[str, bool], str], of_weights: bool, chosen: str) -> str:
    """The entries of a list of formats, each with what it is."""
    titles = {name: "16 bits" if name in ("bf16", "fp16") else rows[name, of_weights] for name in names}
    attributes = {chosen: " selected"}
    return "".join(f'<option title="{html.escape(t)}"{attributes.get(name, "")}>{name}</option>' for name, t in titles.items())


def bind(port: int) -> ThreadingHTTPServer:
    """A server on this port of 127.0.0.1, 0 for any free one; it answers once it is given a page by `serve`."""
    try:
        return ThreadingHTTPServer((HOST, port), _Handler)
    except (OSError, OverflowError) as error:
        raise InvalidArgument(f"port={port} cannot be used ({error}); give another --port") from error


def serve(server: ThreadingHTTPServer, page: str, playground: Playground) -> None:
    """Answer until Ctrl-C, or until another thread calls `server.shutdown()`."""
    server.page, server.playground, server.daemon_threads = page.encode(), playground, True  # type: ignore[attr-defined]
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever(poll_interval=0.1)


class _Handler(BaseHTTPRequestHandler):
    """GET / is the page, POST /try an experiment."""

    server: Any

    def do_GET(self) -> None:
        if self._is_ours():
            if self.path == "/":
                self._answer(200, "text/html; charset=utf-8", self.server.page)
            else:
                self._refuse(404, "there is only / here")

    def do_POST(self) -> None:
        if not self._is_ours():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/try" or self.headers.get("Content-Type") != "application/json":
            self._refuse(415, "POST /try takes application/json")
        elif not length.isdigit() or int(length) > REQUEST:
            self._refuse(413, f"a request has a length of at most {REQUEST:,} bytes")
        else:
            self._try(self.rfile.read(int(length)))

    def _try(self, body: bytes) -> None:
        try:
            events = self.server.playground.events(Asked.read(body))
            first = next(events)
        except HalfbyteError as error:
            self._refuse(400, str(error))
            return
        self._start(200, "application/x-ndjson")
        with contextlib.suppress(ConnectionError), contextlib.closing(events):  # the reader may leave
            self._say(first)
            try:
                for event in events:
                    self._say(event)
            except HalfbyteError as error:
                self._say({"kind": "error", "text": str(error)})

    def _say(self, event: Event) -> None:
        self.wfile.write(json.dumps(event).encode() + b"\n")

    def _is_ours(self) -> bool:
        """Whether the request names this server: a page of another site may have its name point here."""
        port = self.server.server_address[1]
        if self.headers.get("Host") in (f"{HOST}:{port}", f"localhost:{port}"):
            return True
        self._refuse(403, f"this server answers {HOST} only")
        return False

    def _refuse(self, status: int, text: str) -> None:
        self._answer(status, "application/json", json.dumps({"kind": "error", "text": text}).encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self._start(status, kind, len(body))
        self.wfile.write(body)

    def _start(self, status: int, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS}.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal belongs to the command."""

"""The playground: what its server answers and refuses, and the page in a browser where there is one."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from browser import CHROMIUM
from halfbyte.errors import InvalidArgument
from halfbyte_lab.evals.demo import PROMPT
from halfbyte_lab.evals.model import load, write
from halfbyte_lab.evals.playground import HOST, Asked, Playground, bind, form, serve
from halfbyte_lab.evals.quality import Setting
from halfbyte_lab.report import Report

#: Where pictures of the page are kept.
PICTURES = Path(__file__).parents[1] / "build" / "playground"
ASKED = {"keys": "int4", "values": "int8", "weights": "nvfp4", "prompt": "def main(", "tokens": 4}


@pytest.fixture(scope="module")
def playground() -> Playground:
    torch.set_num_threads(1)
    return Playground(*load("demo"))


@pytest.fixture
def port(playground: Playground) -> Iterator[int]:
    server = bind(0)
    page = Report("The report").heading("Every run").form(form(PROMPT)).to_html()
    thread = threading.Thread(target=serve, args=(server, page, playground))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read()


def attempt(port: int, asked: Any, **headers: str) -> tuple[int, list[dict[str, Any]]]:
    status, body = ask(port, "POST", "/try", json.dumps(asked).encode(), **{"Content_Type": "application/json", **headers})
    return status, [json.loads(line) for line in body.splitlines()]


def test_the_page_is_the_report_with_a_form(port: int) -> None:
    status, page = ask(port, "GET", "/")
    text = page.decode()
    assert status == 200
    assert text.index('class="play"') < text.index("Every run")
    assert "{{" not in text
    assert "&quot;&quot;&quot;Merge two sorted lists" in text


def test_an_attempt_streams_bytes_texts_speed_and_quality(port: int, playground: Playground) -> None:
    status, events = attempt(port, ASKED)
    assert status == 200
    kinds = [e["kind"] for e in events]
    assert list(dict.fromkeys(kinds)) == ["bytes", "step", "ours", "plain", "speed", "quality"]
    by_kind = {e["kind"]: e for e in events}
    sizes = by_kind["bytes"]
    assert sizes["kv"] == 6 * 2 * ((32 + 4) + (64 + 2))  # layers, KV heads: INT4 keys, scale and offset; INT8 values and scale
    assert sizes["plain_kv"] == 6 * 2 * 2 * 128
    assert sizes["weights"] < sizes["plain_weights"] / 3
    plain = "".join(e["piece"] for e in events if e["kind"] == "plain")
    assert plain == "".join(write(playground.model, playground.tokenizer, ASKED["prompt"], Setting(), 4))
    assert by_kind["speed"]["ours"] > 0
    assert by_kind["speed"]["plain"] > 0
    assert 0 < by_kind["quality"]["kl"] < 0.1
    assert by_kind["quality"]["tokens"] == 8 * 127


def test_16_bits_against_16_bits_is_the_same(port: int) -> None:
    _, events = attempt(port, {**ASKED, "keys": "bf16", "values": "bf16", "weights": "bf16"})
    texts = ["".join(e["piece"] for e in events if e["kind"] == kind) for kind in ("ours", "plain")]
    assert texts[0] == texts[1] != ""
    assert events[-1]["kl"] == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"keys": "int3"}, "'int3'"),
        ({"values": "int4_channel"}, "int4_channel"),
        ({"weights": "int8"}, "'int8'"),
        ({"prompt": ""}, "prompt has 0 characters"),
        ({"prompt": "x" * 1201}, "prompt has 1,201 characters"),
        ({"prompt": 3}, "must be texts"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 513}, "tokens=513"),
        ({"tokens": True}, "tokens=True"),
        ({"tokens": "4"}, "tokens='4'"),
    ],
)
def test_what_cannot_be_done_is_said(port: int, changed: dict[str, object], said: str) -> None:
    status, (event,) = attempt(port, {**ASKED, **changed})
    assert (status, event["kind"]) == (400, "error")
    assert said in event["text"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'"keys"', b"[" * 9000, b"\xff"])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="expected a JSON object"):
        Asked.read(body)


def test_other_pages_are_refused(port: int) -> None:
    """A name that points here, a form of another site, too long a body, other addresses."""
    body = json.dumps(ASKED).encode()
    assert ask(port, "GET", "/", Host="evil.example")[0] == 403
    assert ask(port, "POST", "/try", body, Host="evil.example", Content_Type="application/json")[0] == 403
    assert ask(port, "POST", "/try", body, Content_Type="text/plain")[0] == 415
    assert ask(port, "POST", "/try", body)[0] == 415
    assert ask(port, "POST", "/other", body, Content_Type="application/json")[0] == 415
    assert ask(port, "POST", "/try", b"", Content_Type="application/json", Content_Length="65537")[0] == 413
    assert ask(port, "POST", "/try", b"", Content_Type="application/json", Content_Length="-1")[0] == 413
    assert ask(port, "GET", "/../pyproject.toml")[0] == 404
    assert ask(port, "GET", "/", Host=f"localhost:{port}")[0] == 200


def test_a_reader_who_leaves_frees_the_model(port: int) -> None:
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    connection.request("POST", "/try", json.dumps({**ASKED, "tokens": 64}), {"Content-Type": "application/json"})
    connection.getresponse().read(1)
    connection.close()
    assert attempt(port, ASKED)[1][-1]["kind"] == "quality"


def test_a_port_in_use_is_named(port: int) -> None:
    with pytest.raises(InvalidArgument, match=f"port={port} cannot be used"):
        bind(port)
    with pytest.raises(InvalidArgument, match="port=70000 cannot be used"):
        bind(70000)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser; set HALFBYTE_CHROMIUM to one")
def test_the_page_in_a_browser(port: int) -> None:
    """Formats are picked, both texts and four figures appear; in both colors and on a phone nothing is wider than the screen."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" and "favicon" not in said.text else None)
        page.goto(f"http://{HOST}:{port}/")
        page.fill("[name=tokens]", "24")
        page.click('button:text("INT2")')
        page.wait_for_selector(".play button[type=submit]:enabled", timeout=120_000)
        assert page.input_value("[name=keys]") == "int2"
        assert "smaller" in page.inner_text("[data-fact=cache]")
        assert page.inner_text("[data-fact=weights]").startswith("16 bits")
        assert "tokens/s" in page.inner_text("[data-fact=speed]")
        assert "KL" in page.inner_text("[data-fact=quality]")
        assert page.inner_text("[data-text=plain]").startswith("def merge_sorted")
        assert page.locator("mark").count() == 1
        for width, scheme in ((1000, "light"), (1000, "dark"), (390, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.screenshot(path=PICTURES / f"{width}-{scheme}.png", full_page=True)
        page.fill("[name=prompt]", "x" * 1201)
        page.click('button:text("Generate")')
        page.wait_for_selector(".said.bad")
        assert "1,201 characters" in page.inner_text(".said")
        assert [p for p in problems if "400" not in p] == []
        browser.close()

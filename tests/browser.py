"""A headless Chromium for pictures of pages and of terminals, where there is one; HALFBYTE_CHROMIUM names it."""

from __future__ import annotations

import html
import os
import shutil
import subprocess
from pathlib import Path

CHROMIUM = os.environ.get("HALFBYTE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def picture(url: str, to: Path, size: tuple[int, int] = (1000, 1400)) -> None:
    """The page as a PNG of so many pixels; nothing without a browser."""
    if CHROMIUM is None:
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    how = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--screenshot={to}",
        "--window-size={},{}".format(*size),
    ]
    done = subprocess.run([CHROMIUM, *how, url], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert to.stat().st_size > 1000


def terminal(command: str, said: str, to: Path, columns: int = 80) -> None:
    """What a command printed: as text and, with a browser, as a picture of a terminal of so many columns."""
    to.parent.mkdir(parents=True, exist_ok=True)
    text = f"$ {command}\n{said}"
    to.with_suffix(".txt").write_text(text, encoding="utf-8")
    style = f"font: 14px/1.3 monospace; width: {columns}ch; white-space: pre-wrap; overflow-wrap: anywhere; background: #fff"
    page = to.with_suffix(".html")
    page.write_text(f"<meta charset=utf-8><pre style='{style}'>{html.escape(text)}</pre>", encoding="utf-8")
    picture(page.as_uri(), to.with_suffix(".png"), (720, 60 + 19 * (3 + sum(1 + len(x) // columns for x in text.splitlines()))))
    page.unlink()

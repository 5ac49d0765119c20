"""Every example runs, and says what it is there to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.device import cpu_has_bf16
from halfbyte_lab.measure import records

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "01_cache_and_attention.py": "lengths after crop and reorder [1005, 1005]",
    "02_weights.py": "q [4, 512], k [4, 128], v [4, 128]",
    "03_transformers.py": "loaded again: the same tokens",
    "04_engine_memory.py": "merged equals whole within",
    "05_decode_layer.py": "token by token equals all at once within",
    "07_chat.py": "tokens in a cache of",
}


#: What the chat is told, line after line.
LINES = "Name a color.\nAnother one.\n"
#: The one that takes minutes as it is: below, with fewer tokens.
WHOLE_MODEL = "06_tokens_per_second.py"


def output(name: str, *options: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, input=LINES, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({p.name for p in EXAMPLES.glob("*.py")} - {WHOLE_MODEL}))
def test_example(name: str, chat_folder: Path) -> None:
    said = output(name, *([str(chat_folder)] if name == "07_chat.py" else []))
    assert SAYS[name] in said
    if "within" in SAYS[name]:
        assert float(said.split("within")[1]) < 1e-5


@pytest.mark.slow
def test_the_whole_model_leaves_records(tmp_path: Path) -> None:
    """Four of them; weights and a cache of 16 or 32 bits take twice or four times the bytes of 8-bit ones, less what stays so."""
    file = tmp_path / "models.jsonl"
    said = output(WHOLE_MODEL, "--new", "4", "--weights", "int8_col", "--keys", "int8", "--output", str(file))
    plain, packed, recorded, fused = records.read(file).records
    assert (packed.nbytes, packed.formats) == (recorded.nbytes, recorded.formats) == (fused.nbytes, fused.formats)
    own, wide = ("bf16", 1) if cpu_has_bf16() else ("fp32", 2)
    assert (plain.op, plain.formats, packed.formats) == ("generate", own, "int8_col, int8/int8")
    assert plain.shape == packed.shape == {"B": 1, "T": 256, "layers": 6}
    assert 1.25 * wide < plain.nbytes / packed.nbytes < 2 * wide
    assert said.count("tokens a second; reading") == said.count("of a step takes") == 4

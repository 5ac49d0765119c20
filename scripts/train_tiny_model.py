"""Train the byte-level Llama that ships in ``src/halfbyte/data/tiny``, and cut the held-out text beside it.

    python scripts/train_tiny_model.py prepare --out .corpus     # any machine, seconds
    python scripts/train_tiny_model.py train --corpus .corpus    # one GPU, minutes

``prepare`` reads a CPython ``Lib`` folder (default: the running interpreter's) and is deterministic. ``train`` fixes
every seed; kernels that add in another order still move the last digits, so the loss reproduces and the bytes do not.
The shipped model's versions, steps and seed are in ``src/halfbyte/data/tiny/training.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "src" / "halfbyte" / "data"

# Chosen before any training, as ordinary library code of several kinds (parsing, text, numbers, threads, I/O).
HELDOUT = ("cmd", "heapq", "queue", "selectors", "shlex", "statistics", "textwrap")
# Generated tables and machine-specific files say nothing about Python; other people's packages have other licences.
DROP_DIRS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "tests/data"}
DROP_PREFIXES = ("_sysconfigdata", "config-")
DROP_FILES = {"stringprep.py", "html/entities.py"}
MAX_FILE = 400_000
SEPARATOR = b"\n"  # files end in a newline, so a blank line parts them and the text stays plain
PROMPTS = ("class Stack:\n    def __init__(self):\n", "def read_lines(path):\n", "import os\nimport sys\n\n")


def is_dropped(relative: Path) -> bool:
    path = "/" + relative.as_posix()
    return (
        path[1:] in DROP_FILES
        or any(f"/{name}/" in path for name in DROP_DIRS)
        or any(part.startswith(DROP_PREFIXES) for part in relative.parts)
    )


def belongs_to_heldout(relative: Path) -> bool:
    """True for a held-out module and for anything named after one, its tests first of all."""
    names = {*relative.parts[:-1], relative.stem}
    return any(name in (module, f"test_{module}") for name in names for module in HELDOUT)


def long_lines(text: bytes) -> set[bytes]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= 40}


def prepare(lib: Path, version: str, licence: Path | None, out: Path) -> None:
    licence = licence or next((p for p in (lib / "LICENSE.txt", lib.parent / "LICENSE.txt") if p.exists()), None)
    if licence is None:
        raise SystemExit(f"no LICENSE.txt beside {lib}: name CPython's licence file with --licence")
    heldout = SEPARATOR.join((lib / f"{module}.py").read_bytes() for module in HELDOUT)
    heldout_lines = long_lines(heldout)
    seen: set[bytes] = set()
    kept: list[bytes] = []
    left_out: list[str] = []
    for path in sorted(lib.rglob("*.py"), key=lambda p: p.relative_to(lib).as_posix()):
        relative = path.relative_to(lib)
        if is_dropped(relative) or path.stat().st_size > MAX_FILE:
            continue
        text = path.read_bytes().replace(b"\r\n", b"\n")
        digest = hashlib.sha256(text).digest()
        # Ten long lines in common is a copy or an excerpt; idioms and licence headers share fewer.
        if belongs_to_heldout(relative) or len(long_lines(text) & heldout_lines) >= 10:
            left_out.append(relative.as_posix())
            continue
        try:
            text.decode("utf-8")  # files that test other source encodings would teach invalid UTF-8
        except UnicodeDecodeError:
            continue
        if text.strip() and digest not in seen:
            seen.add(digest)
            kept.append(text if text.endswith(b"\n") else text + b"\n")
    train = SEPARATOR.join(kept)
    out.mkdir(parents=True, exist_ok=True)
    (out / "train.txt").write_bytes(train)
    (out / "heldout.txt").write_bytes(heldout)
    shutil.copyfile(licence, out / "LICENSE-PSF.txt")
    about = {
        "source": f"CPython {version} standard library, Lib/**/*.py with Lib/test",
        "files": len(kept),
        "train_bytes": len(train),
        "train_sha256": hashlib.sha256(train).hexdigest(),
        "heldout_modules": list(HELDOUT),
        "heldout_bytes": len(heldout),
        "heldout_sha256": hashlib.sha256(heldout).hexdigest(),
        "never_trained_on": left_out,
    }
    (out / "corpus.json").write_text(json.dumps(about, indent=2) + "\n")
    print(json.dumps(about, indent=2))


def byte_tokenizer() -> Any:
    """A tokenizer whose ids are the byte values: BPE without merges over the 256 symbols of ByteLevel."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel writes each byte as one printable character: itself where it is printable, else the next from 256 on.
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    hidden = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte) if byte in printable else chr(256 + hidden.index(byte)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=symbols, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def bits_per_byte(model: Any, text: bytes, window: int) -> float:
    """Mean bits per byte over windows laid end to end.

    Every byte but the very first is predicted once, from the bytes of its window before it (at least one, at most
    ``window``); no window sees into the one before.
    """
    import torch

    device = model.device
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).long()
    starts = list(range(0, len(text) - 1, window))
    total = 0.0
    with torch.no_grad():
        for i in range(0, len(starts), 16):
            # The last window is short: it goes through alone so that the others stay one batch.
            for group in (
                [s for s in starts[i : i + 16] if s + window < len(text)],
                [s for s in starts[i : i + 16] if s + window >= len(text)],
            ):
                if not group:
                    continue
                rows = torch.stack([ids[s : s + window + 1] for s in group])
                logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
                total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
    return total / (len(text) - 1) / math.log(2)


def train(args: argparse.Namespace) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    corpus = json.loads((args.corpus / "corpus.json").read_text())
    text = torch.frombuffer(bytearray((args.corpus / "train.txt").read_bytes()), dtype=torch.uint8).to(device)
    heldout = (args.corpus / "heldout.txt").read_bytes()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        # Every id is a byte of text, so none may start or end a sequence; Llama's defaults are ids 1 and 2.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attention_dropout=args.attention_dropout,
    )
    model = LlamaForCausalLM(config).to(device)
    params = model.num_parameters()
    print(f"{params:,} parameters, {len(text):,} training bytes, {len(heldout):,} held-out bytes, {device}", flush=True)

    # Norm gains are few and have no scale to lose, so only matrices decay.
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")

    def factor(step: int) -> float:
        if step < args.warmup:
            return float((step + 1) / args.warmup)
        done = (step - args.warmup) / max(1, args.steps - args.warmup)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    step_loss = torch.compile(loss_of) if device.type == "cuda" else loss_of
    windows = text.unfold(0, args.window + 1, 1)
    draws = torch.Generator().manual_seed(args.seed)  # on the CPU: the same windows on every device
    running: torch.Tensor | None = None
    started = time.perf_counter()
    for step in range(args.steps):
        rows = windows[torch.randint(len(windows), (args.batch,), generator=draws).to(device)].long()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = step_loss(rows)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        running = loss.detach() if running is None else running.lerp(loss.detach(), 0.02)
        if (step + 1) % args.report == 0 or step + 1 == args.steps:
            model.eval()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                now = bits_per_byte(model, heldout, 1024)
            model.train()
            seconds = time.perf_counter() - started
            train_bits = float(running) / math.log(2)
            print(f"step {step + 1:6d}  train {train_bits:.4f}  held-out {now:.4f}  {seconds:6.1f} s", flush=True)

    folder: Path = args.out / "tiny"
    model.generation_config = GenerationConfig(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model.config.attention_dropout = 0.0
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    byte_tokenizer().save_pretrained(folder)
    shutil.copyfile(args.corpus / "LICENSE-PSF.txt", folder / "LICENSE-PSF.txt")
    shutil.copyfile(args.corpus / "heldout.txt", args.out / "heldout.txt")

    # Everything reported is measured on what was saved: bf16 weights, computed in float32 as a CPU would.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.set_float32_matmul_precision("highest")
    final = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    bits = {str(window): round(bits_per_byte(final, heldout, window), 4) for window in (256, 1024, 2048)}
    samples = []
    for prompt in PROMPTS:
        torch.manual_seed(args.seed)
        ids = tokenizer(prompt, return_tensors="pt").to(device)
        out = final.generate(**ids, max_new_tokens=args.sample_bytes, do_sample=True, temperature=0.6, top_k=0)
        samples.append(tokenizer.decode(out[0]))
        print(f"{'-' * 80}\n{samples[-1]}", flush=True)
    record = {
        "parameters": params,
        "heldout_bits_per_byte": bits,
        "train_bits_per_byte": round(train_bits, 4),
        "steps": args.steps,
        "batch_windows": args.batch,
        "window_bytes": args.window,
        "bytes_seen": args.steps * args.batch * args.window,
        "seconds": round(seconds),
        "seed": args.seed,
        "optimizer": f"AdamW, lr {args.lr}, betas 0.9 0.95, weight decay {args.weight_decay}, clip 1.0, bf16 autocast",
        "schedule": f"{args.warmup} steps of warm-up, cosine to 1 %",
        "attention_dropout": args.attention_dropout,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "corpus": corpus,
        "continuations": samples,
    }
    (folder / "training.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    (folder / "README.md").write_text(readme(record))
    print(json.dumps({k: v for k, v in record.items() if k not in ("corpus", "continuations")}, indent=2))


def readme(record: dict[str, Any]) -> str:
    corpus, versions, bits = record["corpus"], record["versions"], record["heldout_bits_per_byte"]
    modules = ", ".join(f"`{module}`" for module in corpus["heldout_modules"])
    return f"""# A tiny byte-level Llama

{record["parameters"]:,} parameters, bf16: hidden 256, 6 layers, 8 query heads on 2 KV heads of 64, context 2,048.
A token is a byte: the id is the byte's value, and there are no special tokens.

- Text: {corpus["source"]};
  {corpus["files"]:,} files, {corpus["train_bytes"]:,} bytes, joined by newlines.
- Held out, with their tests: {modules}
  (`../heldout.txt`, {corpus["heldout_bytes"]:,} bytes).
- Held-out bits per byte: {bits["1024"]} in windows of 1,024, {bits["2048"]} in windows of 2,048.
- Training: {record["steps"]:,} steps of {record["batch_windows"]} windows of {record["window_bytes"]:,} bytes, seed \
{record["seed"]}, {record["seconds"]} s on one {record["device"]}.
- Versions: Python {versions["python"]}, torch {versions["torch"]}, transformers {versions["transformers"]}.
- Made by `scripts/train_tiny_model.py`; every number is in `training.json`. The held-out text was never trained on,
  but it was watched to choose the number of steps, weight decay and dropout.

The text is Copyright (c) 2001 Python Software Foundation; All Rights Reserved, used under the PSF License Agreement in
`LICENSE-PSF.txt`. The held-out text is a verbatim excerpt; the weights are derived from the rest.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("prepare", help="write train.txt, heldout.txt and corpus.json")
    sub.add_argument("--lib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    sub.add_argument("--lib-version", default=platform.python_version(), help="the version of --lib, to be recorded")
    sub.add_argument("--licence", type=Path, help="CPython's LICENSE, where it is not beside Lib")
    sub.add_argument("--out", type=Path, default=Path(".corpus"))
    sub = commands.add_parser("train", help="train and write the model folder and heldout.txt")
    sub.add_argument("--corpus", type=Path, default=Path(".corpus"))
    sub.add_argument("--out", type=Path, default=DATA)
    sub.add_argument("--device", help="default: cuda where there is one")
    for name, value in (("steps", 2600), ("batch", 64), ("window", 2048), ("warmup", 200), ("seed", 0)):
        sub.add_argument(f"--{name}", type=int, default=value)
    sub.add_argument("--report", type=int, default=500, help="steps between looks at the held-out text")
    sub.add_argument("--sample-bytes", type=int, default=300)
    sub.add_argument("--lr", type=float, default=3e-3)
    # With decay 0.1 and no dropout the held-out loss turns up again after 3,000 steps (14 passes over the text).
    sub.add_argument("--weight-decay", type=float, default=0.5)
    sub.add_argument("--attention-dropout", type=float, default=0.1)
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.lib, args.lib_version, args.licence, args.out)
    else:
        train(args)


if __name__ == "__main__":
    main()

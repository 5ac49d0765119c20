"""The command line: quick help, one-line errors, plain and JSON output."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import halfbyte
from command_line import diagnosis, refusal, run
from halfbyte import cli, hf, memory, settings
from halfbyte.cli import inspect, models
from halfbyte.cli.shared import human_bytes
from halfbyte.doctor import Check, diagnose
from halfbyte.errors import InvalidArgument, MissingPackage, require
from halfbyte_lab import bench_model
from halfbyte_lab.evaluate import evaluate
from halfbyte_lab.measure import records
from halfbyte_lab.measure.environment import Environment


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["memory", "--help"], ["bench", "decode", "--help"]])
def test_help_and_version_do_not_import_torch(arguments: list[str]) -> None:
    code = (
        f"import sys\nfrom halfbyte.cli import main\ntry: main({arguments!r})\nexcept SystemExit as e: code = e.code\n"
        "heavy = sorted({'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules))\nprint('heavy:', heavy, 'code:', code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("heavy: [] code: 0")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"halfbyte {halfbyte.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["memory", "/no/such/folder"], "there is no folder"),
        (["memory", "demo", "--keys", "int9"], "keys='int9'"),
        (["memory", "demo", "--memory", "lots"], "memory='lots'"),
        (["memory", "demo", "--memory", "9" * 400 + "GB"], "above 0 and below 2^63"),
        (["memory", "demo", "--memory", "9" * 5000 + "GB"], "... (5002 characters); give a number with a unit"),
        (["memory", "demo", "--skip-layers", "9" * 5000], "--skip-layers '999"),
        (["memory", "demo", "--batch", "9" * 400], "above 0 and below 2^63"),
        (["memory", "demo", "--skip-layers", "a"], "--skip-layers 'a'"),
        (["explain", "--linear", "4096"], "--linear '4096'"),
        (["explain", "--linear", "4096x4096", "--weights", "int3"], "weights='int3'"),
        (["explain", "--linear", "4096x4096", "--batch", "4"], "--batch describes attention"),
        (["explain", "--rows", "4"], "--rows describes a linear layer"),
        (["explain", "--heads", ""], "--heads ''; give two whole numbers"),
        (["explain", "--heads", "0/8"], "heads=0/8; both must be above 0"),
        (["explain", "--batch", "9" * 400], "above 0 and below 2^31"),
        (["explain", "--dim", "80", "--values", "int4_g32"], "values='int4_g32': a head has a last axis of 80"),
        (["explain", "--dim", "81", "--keys", "int4", "--values", "int8"], "keys='int4': a head has a last axis of 81"),
        (["explain", "--keys", "int4_channel", "--page", "16"], "keys='int4_channel': a page has a number of tokens of 16"),
        (["explain", "--page", "-3"], "page=-3"),
        (["explain", "--page", "9" * 20], "it must be below 2^31"),
        (["explain", "--sms", "9" * 20], "it must be below 2^31"),
        (["explain", "--capability", "7.5"], "capability='7.5'; the kernels run from 8.0 on"),
        (["explain", "--capability", "-1.-1"], "capability='-1.-1'"),
        (["explain", "--capability", ","], "--capability ','; give two whole numbers, such as 9.0"),
        (["eval", "demo", "-o", "/proc/file"], "--output '/proc/file' cannot be written"),
        (["eval", "demo", "--windows", "0"], "windows=0"),
        (["bench", "decode", "--threads", "99999999"], "threads=99999999; expected 1 to 1024"),
        (["bench", "decode", "--batch", "9" * 400], "give whole numbers below 2^31"),
        (["bench", "decode", "--heads", "32"], "--heads '32'"),
        (["bench", "linear", "--size", "9" * 400 + "x8"], "give pairs of whole numbers below 2^31"),
        (["bench", "decode", "--heads", "5/2"], "q_heads=5"),
        (["bench", "linear", "--formats", "int3"], "formats='int3'"),
        (["bench", "linear", "--filter", "("], "filter='('"),
        (["bench", "model", "--weights", "int3"], "weights='int3' is not a format"),
        (["bench", "model", "--values", "int4_channel"], "values='int4_channel' is for keys only"),
        (["bench", "model", "./no-such-folder"], "there is no folder"),
        (["bench", "model", "-o", "."], "--output '.' is a folder"),
        (["bench", "linear", "-o", "."], "--output '.' is a folder"),
        (["bench", "linear", "-o", "/proc/no/file"], "--output '/proc/no/file' cannot be written"),
        (["bench", "linear", "--html", "/dev/null"], "--html '/dev/null' is no ordinary file"),
        (["bench", "linear", "--html", "/proc/it.html"], "--html '/proc/it.html' cannot be written"),
        (["bench", "linear", "--threads", "9" * 400], "expected 1 to 1024"),
        (["bench", "roofline", "--mib", "x"], "--mib 'x'"),
        (["extract", "./no-such-folder", "-o", "./never-made"], "there is no folder"),
        (["extract", "demo", "-o", "."], "output='.' exists"),
        (["quantize", "demo", "--weights", "nf4", "-o", "./no-such-folder/it"], "the folder it would lie in"),
        (["quantize", "demo", "--weights", "nf4", "--clip", "half", "-o", "./it"], "clip='half'; expected None, or 'search'"),
        (["quantize", "--from", "demo", "--clip", "search", "-o", "./it"], "--clip is about rounding 16-bit weights"),
        (["quantize", "--from", "demo", "--skip", "q_proj", "-o", "./it"], "--skip names modules that keep 16-bit weights"),
        (["quantize", "--from", "demo", "--calibrate", __file__, "-o", "./it"], "--calibrate is about rounding 16-bit weights"),
        (["quantize", "demo", "--calibrate", "./no-such-text", "-o", "./it"], "cannot be read (no such file)"),
        (["quantize", "demo", "--device", "cpu", "-o", "./it"], "--device cpu is about --calibrate"),
        (["eval", "demo", "--clip", "search"], "name --weights as well"),
        (["advise", "demo", "--device", "cpu"], "--device cpu is where --measure runs the model"),
        (["memory", "demo", "--lm-head", "int3"], "'int3'"),
        (["quantize", "demo", "--lm-head", "int8", "-o", "./it"], "'int8'"),
        (["quantize", "-o", "./it"], "give a MODEL"),
        (["generate", "demo", "--prompt", "x", "--tokens", "2000000000"], "GB is larger than this device's memory"),
        (["generate", "demo", "--prompt", "x", "--tokens", "100000000000"], "tokens=100000000000; expected at least 1"),
        (["generate", "demo", "--prompt", "x", "--temperature", "1e300"], "temperature=1e+300"),
        (["generate", "demo", "--prompt", "a\udcff"], "prompt cannot be read as UTF-8 text"),
    ],
)
def test_our_errors_are_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in refusal(capsys, *arguments)


def test_formats_that_nobody_named_are_those_of_hf_quantize(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cache where a command is about a whole model or its kernels, of the weights where it writes them."""
    for command in (evaluate, models.generate, inspect.memory, inspect.explain, bench_model.bench_model, memory.estimate):
        shown = signature(command).parameters
        assert (shown["keys"].default, shown["values"].default) == (settings.KEYS, settings.VALUES), command
    asked: dict[str, Any] = {}

    def load(folder: str, **options: Any) -> None:
        asked.update(options)
        raise InvalidArgument("seen")

    monkeypatch.setattr(hf, "load", load)
    for given, taken in (
        ((), (settings.WEIGHTS, settings.CLIP, None)),
        (("--weights", "nf4"), ("nf4", None, None)),
        (("--lm-head", "int8_col"), (None, None, "int8_col")),
    ):
        assert run("quantize", "demo", "-o", "./it", *given) == 1
        assert (asked["weights"], asked["clip"], asked["lm_head"]) == taken
        assert asked["dtype"] is torch.bfloat16
    for given, dtype in ((["demo", "--dtype", "fp16"], torch.float16), (["--from", "demo"], "auto")):
        assert run("quantize", "-o", "./it", *given) == 1
        assert asked["dtype"] == dtype


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.doctor.diagnose", Mock(side_effect=ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["doctor"])


@pytest.fixture
def diagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doctor finds here, for all commands that tell it."""
    monkeypatch.setattr("halfbyte.doctor.diagnose", diagnosis)


@pytest.mark.usefixtures("diagnosed")
def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json") == 0
    assert {"versions", "machine", "ops", "settings", "problems"} <= set(json.loads(capsys.readouterr().out))
    assert run("doctor") == 0
    assert "decode_attention" in capsys.readouterr().out


@pytest.mark.usefixtures("diagnosed")
def test_doctor_checks_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A report to send: what is here, then each check. It fails where a kernel is wrong."""
    right, wrong = Check("linear, nf4, M = 1", "gluon", 0.1), Check("append, int8 keys", "triton", 7.0)
    monkeypatch.setattr("halfbyte.doctor.checks", lambda: iter([right]))
    assert run("doctor", "--check") == 0
    assert "linear, nf4, M = 1, gluon: right, 0.1 of the error that is allowed" in capsys.readouterr().out
    monkeypatch.setattr("halfbyte.doctor.checks", lambda: iter([right, wrong]))
    assert run("doctor", "--check") == 1
    out = capsys.readouterr().out
    assert "versions" in out
    assert "append, int8 keys, triton: WRONG, 7 of the error that is allowed" in out
    assert out.endswith("2 checks, 1 failed; please send this report to halfbyte's authors\n")
    assert run("doctor", "--check", "--json") == 1
    assert json.loads(capsys.readouterr().out)["checks"][1]["error"] == 7.0


@pytest.mark.usefixtures("diagnosed")
@pytest.mark.parametrize("command", ["doctor", "explain", "formats"])
def test_a_terminal_of_no_columns_is_one_of_unknown_width(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run(command) == 0
    expected = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "0")
    assert run(command) == 0
    assert capsys.readouterr().out == expected


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    hardware = ["--sms", "132", "--capability", "9.0"]
    assert run("explain", "--linear", "4096,1024,1024x4096", "--weights", "nf4", "--rows", "4", *hardware, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["work"] == "x [4, 4096] times nf4 [4096, 4096], nf4 [1024, 4096], nf4 [1024, 4096]"
    assert run("explain", "--heads", "8/2", *hardware) == 0
    assert "2 work items" in capsys.readouterr().out


def test_explain_compiles_and_tells_registers_and_occupancy(capsys: pytest.CaptureFixture[str]) -> None:
    """What is said must be what the limits of an SM give for what the assembler says."""
    pytest.importorskip("triton")
    for shape in (
        ["--linear", "4096x4096", "--weights", "int4_sym_g128"],
        ["--heads", "8/1", "--keys", "int4", "--values", "int4"],
    ):
        assert run("explain", *shape, "--sms", "132", "--capability", "9.0", "--compile", "--json") == 0
        facts = json.loads(capsys.readouterr().out)
        ((taken, fits),) = [(facts[name], facts[name.replace("takes", "fits")]) for name in facts if name.endswith(" takes")]
        registers, kilobytes, threads = (int(found) for found in re.findall(r"(\d+) (?:registers|KB|threads)", taken))
        assert "none spilled" in taken
        assert 32 < registers <= 255
        programs, limit = min((65536 // (-(-registers // 8) * 8 * threads), "registers"), (227 // kilobytes, "shared memory"))
        assert (
            fits
            == f"{programs} programs a multiprocessor, limited by {limit}: {100 * programs * threads / 2048:.0f} % of its warps"
        )


def test_explain_compiles_contiguous_caches_only(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert run("explain", "--page", "64", "--compile", "--sms", "132", "--capability", "9.0") == 1
    assert "pages and windows are other variants" in capsys.readouterr().err


@pytest.mark.parametrize(("keys", "dim", "said"), [("int4", 128, "blocks of 128"), ("int4_g32", 96, "of 32"), ("int8", 128, "")])
def test_explain_says_whether_keys_are_rotated(keys: str, dim: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("explain", "--keys", keys, "--values", "int8", "--dim", str(dim), "--sms", "132", "--capability", "9.0", "--json") == 0
    )
    assert said in (rotation := json.loads(capsys.readouterr().out).get("rotation", ""))
    assert bool(rotation) == bool(said)


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("16k", 1 << 14), ("128K", 1 << 17), (" 2 m ", 2 << 20)])
def test_a_number_of_tokens_may_have_its_unit(text: str, tokens: int) -> None:
    from halfbyte.cli.shared import token_count
    from halfbyte_lab.options import token_counts

    assert token_count(text) == tokens
    assert token_counts(f"1,{text}") == [1, tokens]


@pytest.mark.parametrize("text", ["", "k", "16 kilo", "1.5K", "16G", "0x10", "9" * 13])
@pytest.mark.parametrize("command", [("memory", "demo"), ("advise", "demo"), ("explain",), ("bench", "model"), ("bench", "decode")])
def test_what_is_no_number_of_tokens_is_refused(command: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    if command == ("bench", "decode") and not text:
        return  # the default cases
    assert run(*command, "--context", text) == 2
    assert "no number of tokens" in " ".join(capsys.readouterr().err.replace("\u2502", "").split())


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("memory", "demo") == 0  # what quantize makes, and advise recommends
    assert f"packed: {settings.WEIGHTS} weights, {settings.KEYS} keys" in " ".join(capsys.readouterr().out.split())
    command = ["memory", "demo", "--batch", "8", "--context", "32K", "--weights", "nf4", "--memory", "1GB"]
    assert run(*command, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kv_layers"] == 6
    assert data["total_bytes"] == data["weight_bytes"] + data["kv_bytes"]
    assert run(*command) == 0
    shown = capsys.readouterr().out
    assert f"{data['tokens_that_fit']:,}" in shown
    assert "\x1b[" not in shown  # no colour where there is no terminal


@pytest.mark.usefixtures("brief")
def test_bench_writes_records_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, page = tmp_path / "r.jsonl", tmp_path / "p.html"
    command = ["bench", "linear", "--size", "64x64", "--formats", "nf4", "--quick", "--device", "cpu", "--threads", "1"]
    command += ["--output", str(output)]
    assert run(*command, "--json", "--html", str(page)) == 0
    lines = capsys.readouterr().out.splitlines()
    found = records.read(output).records
    assert [records.Record.from_json(line) for line in lines] == found
    assert [r.formats for r in found] == ["bf16", "fp16", "nf4"]
    assert page.read_text().startswith("<!doctype html>")
    assert run(*command) == 0
    shown = capsys.readouterr().out
    assert "Rooflines at" in shown
    assert "halfbyte cpu" in shown
    assert len(records.read(output).records) == 6  # appended


def test_bench_that_measures_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "linear", "--size", "64x64", "--formats", "nf4", "--quick", "--device", "cpu", "--json", "--filter"]
    assert run(*command, "none such") == 1
    assert "leaves nothing to measure" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_the_roofline_and_two_sets_of_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "roofline", "--mib", "1", "--device", "cpu") == 0
    assert "Rooflines at 1 MiB: read " in capsys.readouterr().out
    before, after = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    where = Environment("a CPU", "", 1, {}, "", "halfbyte bench", "2026-01-01T00:00:00+00:00")
    for file, seconds in ((before, 1e-3), (after, 2e-3)):
        records.append(file, [records.Record("linear", {"M": 1}, "nf4", "halfbyte cpu", 1, where, seconds, seconds, seconds)])
    assert run("bench", "compare", str(before), str(before)) == 0
    assert capsys.readouterr().out == "0 of 1 changed\n"
    assert run("bench", "compare", str(before), str(after)) == 0
    shown = capsys.readouterr().out
    assert "slower" in shown
    assert "1 of 1 changed" in shown


@pytest.mark.parametrize(("value", "text"), [(999, "999 B"), (1500, "1.50 kB"), (24e9, "24.00 GB"), (3.2e15, "3200.00 TB")])
def test_bytes_are_readable(value: float, text: str) -> None:
    assert human_bytes(value) == text


def test_formats_lists_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    from halfbyte.formats import EVERY_WEIGHT_FORMAT, KV_FORMATS

    assert run("formats", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["format"] for row in found] == [*KV_FORMATS, *EVERY_WEIGHT_FORMAT]
    assert {row["format"]: row["bits an element"] for row in found if row["for"] != "weights"}["int4_g32"] == "5"
    assert run("formats", "--for", "weights") == 0
    shown = capsys.readouterr().out
    assert "nvfp4" in shown
    assert "int8_token" not in shown


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from halfbyte.cli import main
for line in sys.argv[2:]:
    try:
        main(line.split())
    except SystemExit as left:
        print(left.code, flush=True)
"""


#: The command that installs it; the bounds are those of when halfbyte was installed here.
TRANSFORMERS = r"pip install 'transformers<[\d.]+,>=[\d.]+'"


def test_a_version_that_is_not_declared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "6.1.0" if name == "transformers" else real(name))
    with pytest.raises(MissingPackage, match=rf"halfbyte.hf needs another transformers than 6\.1\.0: {TRANSFORMERS}"):
        require("transformers", "halfbyte.hf")
    monkeypatch.setattr("halfbyte.doctor._ops", dict)  # which no extra is about
    assert any("needs another transformers than 6.1.0" in problem for problem in diagnose().problems)


def test_without_transformers_a_command_says_so_in_one_line(tmp_path: Path) -> None:
    commands = ["eval demo", "generate demo --prompt x", "memory demo", "extract demo -o x", "calibrate demo --bits 5 -o x", "demo"]
    commands += ["quantize demo --weights nf4 -o x", "quantize --from demo -o x"]
    done = subprocess.run([sys.executable, "-c", WITHOUT, "transformers", *commands], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["1"] * len(commands), done.stderr
    said = rf"halfbyte: halfbyte.hf needs transformers, which is not installed: {TRANSFORMERS}\n"
    assert re.fullmatch(said * len(commands), done.stderr)
    assert not list(tmp_path.iterdir())


def test_files_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """Which takes seconds: each line names a file that is not there, a folder, or a place that cannot be written."""
    refused = {
        "eval demo --text FILE": "text='FILE' cannot be read (no such file)",
        "eval demo --text .": "text='.' cannot be read (it is a folder)",
        "eval demo --plan FILE": "plan='FILE'",
        "eval demo --calibration FILE": "calibration='FILE'",
        "eval demo --output no/FILE": "--output 'no/FILE'",
        "eval demo --suite --card no/FILE.json": "--card 'no/FILE.json'",
        "eval demo --suite --card FILE": "--card 'FILE'; give a name that ends with .json",
        "eval ./FILE": "model='./FILE'",
        "generate ./FILE --prompt x": "model='./FILE'",
        "generate demo --prompt x --calibration FILE": "calibration='FILE'",
        "quantize demo --calibrate FILE -o x": "calibrate='FILE'",
        "quantize ./FILE -o x": "model='./FILE'",
        "quantize --from ./FILE -o x": "model='./FILE'",
        "quantize demo -o no/FILE": "output='no/FILE'",
        "calibrate demo -o x --text FILE": "text='FILE'",
        "calibrate demo -o no/FILE": "--output 'no/FILE'",
        "calibrate demo --bits 5 -o x --calibration FILE": "calibration='FILE'",
        "advise demo --card FILE": "card='FILE'",
        "memory ./FILE": "model='./FILE'",
        "warmup ./FILE": "model='./FILE'",
        "extract demo -o no/FILE": "output='no/FILE'",
        "extract ./FILE -o x": "model='./FILE'",
        "bench model demo --output /proc/no/FILE": "--output",
        "demo --output no/FILE": "--output 'no/FILE'",
    }
    done = subprocess.run([sys.executable, "-c", WITHOUT, "torch", *refused], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["1"] * len(refused), done.stderr
    for said, named in zip(done.stderr.splitlines(), refused.values(), strict=True):
        assert said.startswith("halfbyte: ")
        assert named in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["eval", "demo", "--keys", "int9"], "keys='int9'"),
        (["eval", "demo", "--values", "int4_channel"], "keys only"),
        (["eval", "demo", "--values", "int4_g128"], "values='int4_g128'"),
        (["eval", "demo", "--weights", "int3"], "weights='int3'"),
        (["eval", "demo", "--skip-layers", "9"], "layers 0 to 5"),
        (["eval", "demo", "--text", "./missing.txt"], "text='missing.txt'"),
        (["eval", "demo", "--length", "1"], "length=1"),
        (["eval", "demo", "--chunk", "0"], "chunk=0"),
        (["eval", "demo", "--plan", "./missing.json"], "plan='missing.json'"),
        (["eval", "demo", "--html", "./no-such-folder/it.html"], "--html"),
        (["generate", "demo", "--prompt", "x", "--keys", "int9"], "keys='int9'"),
        *(
            ([*command, "--dtype", "fp32"], "dtype='fp32'; choose bf16 or fp16")
            for command in (
                *(["eval", "demo"], ["eval", "demo", "--suite"], ["generate", "demo", "--prompt", "x"], ["bench", "model", "demo"]),
                *(["calibrate", "demo", "--bits", "5", "-o", "plan.json"], ["advise", "demo", "--measure"], ["explain"]),
                ["quantize", "demo", "-o", "./it"],
            )
        ),
        (["generate", "demo", "--prompt", "x", "--weights", "int3"], "weights='int3'"),
        (["calibrate", "demo", "--bits", "5", "-o", "plan.json", "--formats", "int9"], "formats='int9'"),
        (["extract", "demo", "-o", "./no-such-folder/it"], "the folder it would lie in"),
        (["quantize", "demo", "--weights", "int3", "-o", "./it"], "weights='int3'"),
        (["quantize", "demo", "--weights", "nf4", "-o", "./it", "--calibrate", __file__, "--device", "tpu"], "device='tpu'"),
        (["eval", "demo", "--text", "/dev/null"], "holds no text"),
        (["calibrate", "demo", "-o", "./it", "--text", "/dev/null"], "holds no text"),
        (["eval", "demo", "--suite", "--text", "/dev/null"], "holds no text"),
        (["quantize", "demo", "--weights", "nf4", "-o", "/proc/it"], "output='/proc/it' cannot be written"),
    ],
)
def test_what_is_known_before_a_model_is_loaded_is_checked_before(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for loads in ("halfbyte.hf.load", "halfbyte_lab.extract.load_layer", "halfbyte_lab.model_step.load"):
        monkeypatch.setattr(loads, lambda *_, **__: pytest.fail("a model was loaded"))
    assert named in refusal(capsys, *arguments)


def test_more_tokens_than_positions_are_noted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte_lab.evals.model.model_of", Mock(side_effect=halfbyte.HalfbyteError("loads now")))
    for length, noted in (("1024", False), ("999999", True)):
        assert run("eval", "demo", "--length", length) == 1
        assert ("note: 999,999 tokens are more than" in capsys.readouterr().err) is noted


def test_switches_have_no_negative_and_pages_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["eval"], ["demo"], ["calibrate"], ["bench", "decode"], ["bench", "report"], ["explain"]):
        assert run(*command, "--help") == 0
        shown = capsys.readouterr().out
        assert "--html" in shown or command == ["explain"]
        assert "<bool>" not in shown
        assert "--no-" not in shown.replace("--no-rotate-keys", "").replace("--no-rotate", "")


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99"])
@pytest.mark.parametrize("command", [["eval", "demo"], ["advise", "demo", "--measure"], ["demo"]])
def test_a_device_that_is_not_there_is_one_line(
    command: list[str], device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert device in refusal(capsys, *command, "--device", device)


@pytest.mark.slow
def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: writes stop half-way and raise."""
    code = """
import resource, signal, sys
from pathlib import Path
from halfbyte import paths
from halfbyte.cli import main
folder = Path(sys.argv[1])
(folder / "old.html").write_text("before")
paths.append_line(folder / "r.jsonl", "first")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
for write, name in ((paths.write_whole, "old.html"), (paths.append_line, "r.jsonl")):
    try:
        write(folder / name, "x" * 5000)
    except OSError as error:
        print(error)
for line in ("quantize demo --weights nf4 -o", "extract demo -o"):
    try:
        main([*line.split(), str(folder / "made")])
    except SystemExit as left:
        print(left.code)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    first, second, *codes = done.stdout.splitlines()
    assert "old.html" in first
    assert "r.jsonl" in second
    assert codes == ["1", "1"]
    errors = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert len(errors) == 2
    assert all(line.startswith("halfbyte: ") and str(tmp_path / "made") in line for line in errors)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"old.html": "before", "r.jsonl": "first\n"}


@pytest.mark.parametrize(("model", "proxies", "offline"), [("a/b", {}, True), ("a/b", {"https": "x"}, False), ("demo", {}, False)])
def test_a_hub_that_cannot_be_reached_is_not_retried(
    model: str, proxies: dict[str, str], offline: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    def unknown(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("urllib.request.getproxies", lambda: proxies)
    monkeypatch.setattr("halfbyte.memory.load_config", unknown)
    assert run("memory", model) == 1
    assert constants.HF_HUB_OFFLINE is offline
    capsys.readouterr()

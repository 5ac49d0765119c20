"""`halfbyte calibrate`: calibrated keys, or formats by layer for a size of the cache, chosen by measurement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte import settings
from halfbyte.cli.options import Calibration, Dtype
from halfbyte.cli.shared import Model, RecentTokens, SinkTokens, Where, console, print_table, readable, words
from halfbyte.errors import InvalidArgument, check
from halfbyte_lab.options import Html, check_page, check_writable

if TYPE_CHECKING:
    import torch

    from halfbyte.text import Tokenizer
    from halfbyte_lab.evals.calibrate import Calibrated


def calibrate(
    model: Model,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The plan to write (several get their size in their names), or calibrated keys."),
    ],
    bits: Annotated[
        str, typer.Option(help="Size of the cache in bits per element, scales included; several make a plan each. None: keys.")
    ] = "",
    text: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 text that resembles the model's inputs; default: the shipped held-out text.", callback=readable),
    ] = None,
    formats: Annotated[str, typer.Option(help="Formats to choose from, separated by commas; default: all that fit.")] = "",
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to measure on.")] = 4,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens in a window; default: 256, of keys 2048.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Tokens fed at a time; default: 16, of keys 256.")] = None,
    sink_tokens: SinkTokens = 0,
    recent_tokens: RecentTokens = 0,
    calibration: Calibration = None,
    search: Annotated[
        bool,
        typer.Option("--search", help="Also choose sink and recent tokens, which --bits counts, and whether to use --calibration."),
    ] = False,
    dtype: Dtype = settings.HALVES[0],
    device: Where = None,
    html: Html = None,
) -> None:
    """Choose formats of the KV cache layer by layer, the lowest KL divergence for a number of bits; or, without --bits, calibrate
    keys: a center and a matrix by KV head, with which 4-bit and 2-bit keys lose less (--calibration of other commands).

    Measures each layer's keys and values in each format, finds the best assignment and compares it with the best uniform choices.
    Measurements are kept next to the plan: an interrupted run resumes, and another size is quick.
    """
    check_writable(output, "output")
    if not bits:
        options = {
            "--formats": formats,
            "--sink-tokens": sink_tokens,
            "--recent-tokens": recent_tokens,
            "--html": html,
            "--calibration": calibration,
            "--search": search,
        }
        names = [option for option, value in options.items() if value]
        check(not names, f"{', '.join(names)}: about formats by layer; name --bits as well, or leave it out")
        _keys(model, output, text, (windows, length or 2048, chunk or 256), (device, dtype))
        return
    length, chunk = length or 256, chunk or 16
    sizes, exact = _sizes(bits), (sink_tokens, recent_tokens)
    for option, count in (("--sink-tokens", sink_tokens), ("--recent-tokens", recent_tokens)):
        check(count >= 0, f"{option} {count}; expected a number of tokens, 0 or more")
    check(not (search and any(exact)), "--search chooses sink and recent tokens; leave --sink-tokens and --recent-tokens out")
    check_page(html, "html")
    from halfbyte.formats import key_format
    from halfbyte_lab.evals.quality import check_exact

    check_exact(exact, length)
    for name in words(formats):
        key_format(name, "formats")
    keys = "" if calibration is None else str(calibration)
    cut = (windows, length, chunk)
    results = _calibrated(model, sizes, output, text, words(formats), cut, None if search else exact, (device, dtype), keys)
    paths = [output if len(sizes) == 1 else output.with_stem(f"{output.stem}-{size:g}") for size in sizes]
    for one, path in zip(results, paths, strict=True):
        one.plan.write(path)
    _show(model, results, paths)
    if html is not None:
        from halfbyte_lab.evals.pages import write_calibration

        write_calibration(model, results, html)


def _keys(model: str, output: Path, text: Path | None, cut: tuple[int, int, int], where: tuple[str | None, str]) -> None:
    """Calibrate keys and write them. where: the device, and the 16-bit type."""
    from halfbyte.text import read_text
    from halfbyte_lab.evals.calibrate_keys import calibrate_keys
    from halfbyte_lab.evals.model import model_of, tokenizer_of
    from halfbyte_lab.progress import progress

    content, (count, length, chunk) = read_text(text), cut
    ids = _windows(tokenizer_of(model), content, length, count)
    lm = model_of(model, *where)
    with progress(console(stderr=True)) as bar:
        task = bar.add_task("reading", total=count * -(-length // chunk))
        keys = calibrate_keys(lm, ids, chunk, lambda: bar.advance(task))
    path = keys.write(output)
    print_table(
        f"{model}: calibrated keys",
        ("file", "layers", "tokens", "MB"),
        [(path.name, f"{len(keys.layers)}", f"{ids.numel():,}", f"{path.stat().st_size / 1e6:.1f}")],
        text_columns=1,
    )


def _windows(tokenizer: Tokenizer, content: str, length: int, count: int) -> torch.Tensor:
    """Windows int64 [count, length] of a text, all of them."""
    from halfbyte.text import windows

    ids = windows(tokenizer.encode(content), length, count, tokenizer.bos)
    if ids.shape[0] < count:
        raise InvalidArgument(
            f"text has {ids.shape[0]} windows of {length} tokens, too short to calibrate on {count}; give a longer one, or fewer "
            f"--windows"
        )
    return ids


def _sizes(bits: str) -> list[float]:
    try:
        sizes = [float(word) for word in words(bits)]
    except ValueError:
        sizes = []
    good = bool(sizes) and all(0 < b <= 16 for b in sizes) and len(set(sizes)) == len(sizes)
    check(good, f"--bits {bits!r}; give a number of bits up to 16, or several different ones separated by commas")
    return sizes


def _calibrated(
    model: str,
    sizes: list[float],
    output: Path,
    text: Path | None,
    formats: list[str],
    cut: tuple[int, int, int],
    exact: tuple[int, int] | None,
    where: tuple[str | None, str],
    keys: str,
) -> list[Calibrated]:
    """Load, measure what is not known yet, choose. exact: None to choose these, too; where: the device, and the 16-bit type; keys:
    the file of calibrated ones."""
    from halfbyte.text import read_text
    from halfbyte_lab.evals import calibrate as steps
    from halfbyte_lab.evals.assignment import candidates
    from halfbyte_lab.evals.model import model_of, tokenizer_of
    from halfbyte_lab.progress import progress

    content, (count, length, chunk) = read_text(text), cut
    ids = _windows(tokenizer_of(model), content, length, count)
    lm = model_of(model, *where)
    ways = steps.ways(lm, formats, keys, length)
    if exact is not None:
        ways = [steps.Way(exact, keys, candidates(lm, formats, any(exact), bool(keys)))]
        steps.check_sizes(lm, ways[0].choices, sizes)
    paths = [steps.measurements_path(output.with_stem(output.stem + way.name * (exact is None))) for way in ways]
    ids_of = [steps.fingerprint(lm, ids, chunk, way.exact, way.calibration) for way in ways]
    stores = [steps.Measurements(path, mine) for path, mine in zip(paths, ids_of, strict=True)]
    every, layers = [*zip(ways, stores, strict=True)], steps.sizes_of(lm).layers
    with progress(console(stderr=True)) as bar:
        task = bar.add_task("16-bit run", total=sum(steps.runs(way.choices, store, layers, sizes) for way, store in every))

        def on_step(what: str) -> None:
            bar.update(task, advance=1, description=what)

        divergence = steps.Divergence(lm, ids, chunk, *((exact, keys) if exact is not None else ()))
        if exact is None:
            return steps.search(divergence, every, sizes, on_step)
        return steps.calibrate(divergence, ways[0].choices, stores[0], sizes, on_step)


def _show(model: str, made: list[Calibrated], paths: list[Path]) -> None:
    """One row a plan: its size and divergence, and the best uniform choice of no more bytes."""
    from halfbyte_lab.evals.quality import Setting

    rows = []
    for one, path in zip(made, paths, strict=True):
        alike = min(one.uniform, key=lambda plan: (plan.measured["kl"], plan.bits))
        kl, its = (f"{plan.measured['kl']:.2e}" for plan in (one.plan, alike))
        rows.append((path.name, Setting.of_uniform(alike).kv, f"{one.plan.bits:.2f}", kl, its))
    print_table(f"{model}: formats by layer", ("plan", "best uniform choice", "bits", "KL mean", "its KL"), rows, text_columns=2)

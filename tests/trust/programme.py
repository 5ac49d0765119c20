"""The programme of `make trust`: what is tried, how often, and with which promise in mind.

A row draws from a seed with the generators of the ordinary suites, and raises where a promise does not hold. Importing this module
imports none of them: a row runs in a process of its own (see run.py), some with Triton's interpreter, some only with a GPU.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Environment of the processes of a place.
PLACES = {"cpu": {"HALFBYTE_GPU_TESTS": "dry"}, "gpu": {"HALFBYTE_GPU_TESTS": "1"}}
PLACES["interpreter"] = {**PLACES["cpu"], "TRITON_INTERPRET": "1"}


@dataclass(frozen=True)
class Row:
    """`check(seed, folder)` tries some of `unit`, says how many, and raises if one of them breaks the promise.

    goal       how many are wanted
    seconds    most that one seed may take
    megabytes  most that the memory of a process may grow by after its first seed, with what the float64 reference takes
    """

    name: str
    promise: str
    unit: str
    goal: int
    check: Callable[[int, Path], int]
    place: str = "cpu"
    seconds: int = 300
    megabytes: int = 1000


def attention(levels: tuple[str, ...], count: int, longest: int, elements: int, batch: int = 32) -> Callable[[int, Path], int]:
    """`count` calls and a few more, each of a variant of its own, of at most `batch` sequences."""

    def check(seed: int, folder: Path) -> int:
        import gpu_cases as cases

        grids = [make(n, seed) for make, n in ((cases.variants, count), (cases.narrow_variants, 2), (cases.exact_variants, 2))]
        grids = [[replace(variant, batch=min(variant.batch, batch)) for variant in grid] for grid in grids]
        drawn = [case for grid in grids for case in cases.draw(len(grid), grid, longest=longest, elements=elements, seed=seed)]
        return judged(drawn, levels, seed)

    return check


def attention_on_gpu(seed: int, folder: Path) -> int:
    """50 calls of one of 200 variants, of which a GPU compiles the kernels once; one is long."""
    import gpu_cases as cases
    from gpu_place import PLACE

    grid = [*cases.variants(150), *cases.narrow_variants(25), *cases.exact_variants(25)]
    sizes = {"longest": PLACE.size(8192, 512), "elements": PLACE.size(2**25, 2**17)}
    return judged(cases.draw(100, [grid[seed % len(grid)]], **sizes, seed=seed)[50:], PLACE.impls, seed)


def judged(drawn: list[Any], levels: tuple[str, ...], seed: int) -> int:
    """How many calls kept the promise: all that a level accepts. A quarter has keys or values at the ends of their types."""
    import gpu_cases as cases
    from gpu_place import PLACE

    rng, count = random.Random(seed), 0
    for i, case in enumerate(drawn):
        case = replace(case, seed=100 * seed + i)
        if rng.random() < 0.25:
            case = replace(case, key_bias=rng.choice((30.0, -300.0, 1000.0)), v_scale=rng.choice((1.0, 1e-6, 3e3)))
            case = replace(case, k_scale=rng.choice((1.0, 1e-6, 30.0)))
        call = cases.build(case, PLACE.device)
        for level in levels:
            outcome = accepted(lambda call=call, level=level: call.run(level))
            if outcome is not None:
                wrong = call.wrong(*outcome, kernel=level != "cpu")
                assert not wrong, f"{level}: {wrong}: {case}"
                count += 1
    return count


def products(levels: tuple[str, ...]) -> Callable[[int, Path], int]:
    """24 products, every weight format alone, some three at once."""

    def check(seed: int, folder: Path) -> int:
        import test_gpu_linear as linear

        return judged_products(linear.drawn(24, seed), levels, seed)

    return check


def products_on_gpu(seed: int, folder: Path) -> int:
    """One of 24 products with 40 draws of its numbers: a GPU compiles its kernels once."""
    import test_gpu_linear as linear
    from gpu_place import PLACE

    return judged_products([linear.drawn(24, seed // 24)[seed % 24]] * PLACE.size(40, 2), PLACE.impls, seed)


def judged_products(drawn: list[Any], levels: tuple[str, ...], seed: int) -> int:
    """How many products kept the promise: all that a level accepts."""
    import test_gpu_linear as linear
    from gpu_cases import poisoned

    count = 0
    for i, case in enumerate(drawn):
        call = linear.build(replace(case, seed=100 * seed + i))
        for level in levels:
            with poisoned():
                outs = accepted(lambda call=call, level=level: call.run(level))
            if outs is not None:
                call.check(outs)
                count += 1
    return count


def accepted(run: Callable[[], Any]) -> Any:
    """The result; None for what a level refuses."""
    from halfbyte.errors import InvalidArgument, Unsupported

    try:
        return run()
    except (Unsupported, InvalidArgument):
        return None


def cache_lives(seed: int, folder: Path) -> int:
    """One format after the other, contiguous and paged."""
    import torch

    import test_cache as cache

    keys, steps = cache.KEYS[seed % len(cache.KEYS)], 100
    life = cache.life_of_lists if keys in cache.ALONE else cache.life_in_pages
    with torch.inference_mode():
        life(keys, random.Random(seed), steps)
    return 2 * steps


def slots(seed: int, folder: Path) -> int:
    import test_engine as engine

    pairs, steps = engine.PAIRS, 50
    engine.life_in_slots(*pairs[seed % len(pairs)], random.Random(seed), steps)
    return steps


def cuts(seed: int, folder: Path) -> int:
    import test_cache as cache

    rng = random.Random(seed)
    for _ in range(10):
        dim = rng.choice(cache.DIMS)
        keys, values = (rng.choice([name for name in known if cache.fits(name, dim)]) for known in (cache.KEYS, cache.VALUES))
        scales = {f"{side}_scale": 0.1 for side, name in (("k", keys), ("v", values)) if name.endswith("_tensor")}
        layout = {"batch": rng.randint(0, 4), "heads": rng.randint(1, 3), "dim": dim, "capacity": 70}
        places = [rng.randint(0, 40) for _ in range(rng.randint(0, 5))]
        cache.check_cut(layout | scales | {"keys": keys, "values": values}, places, rng.random() < 0.5, seed)
    return 10


def chunks(seed: int, folder: Path) -> int:
    """A prompt at once, twice in chunks and other pages, and in a batch."""
    import torch

    from halfbyte.engine import PAGE_FORMATS
    from test_attention_varlen import OPTIONS, assert_same, in_chunks
    from varlen_cases import batch_of

    rng = random.Random(seed)
    formats = [rng.choice(list(PAGE_FORMATS)) for _ in range(2)]
    given = {"impl": "cpu", **OPTIONS[rng.choice(list(OPTIONS))]}
    made: dict[str, Any] = {"seed": seed, "dtype": rng.choice((torch.float32, torch.bfloat16)), "rotate_keys": rng.random() < 0.5}
    length = rng.randint(1, 600)
    prompts = [(length, length), (rng.randint(0, 9), 40), (1, rng.randint(1, 300))]
    whole = batch_of(prompts[:1], *formats, **made).attend(**given)
    for _ in range(2):
        batch = batch_of(prompts[:1], *formats, page=rng.choice((16, 48, 512)), **made)
        assert_same(in_chunks(batch, rng.randint(1, length), **given), whole)
    mixed = batch_of(prompts, *formats, **made).attend(**given)
    assert_same(tuple(x[:length] for x in mixed), whole)
    return 3


def batch_invariance(seed: int, folder: Path) -> int:
    """8 sequences, each alone and in another batch with memory of another capacity."""
    import torch

    import test_trust_determinism as determinism
    from halfbyte.formats import KV_FORMATS

    rng = random.Random(seed)
    values = [name for name, fmt in KV_FORMATS.items() if not fmt.token_block]
    kind, keys = rng.choice(("contiguous", "paged")), rng.choice(list(KV_FORMATS))
    heads, dim, group = rng.choice((1, 2, 3)), rng.choice((64, 128)), rng.choice((1, 3, 4))
    cache = determinism.filled(kind, heads, dim, keys, rng.choice(values))
    q = torch.randn(8, heads * group, rng.choice((1, 2)), dim, generator=torch.Generator().manual_seed(seed)).half()
    determinism.check_alone(cache, q, window=rng.choice((None, 100, 900)), softcap=rng.choice((None, 20.0)), impl="cpu")
    return 16


def batch_invariance_on_gpu(seed: int, folder: Path) -> int:
    """6 sequences in another order, with more capacity, and alone; out and lse."""
    import gpu_cases as cases
    import pytest
    import test_gpu_determinism as determinism
    from gpu_place import PLACE

    try:
        determinism.test_a_row_does_not_depend_on_its_batch(cases.variants(1, seed)[0], PLACE.impls[0])
    except pytest.skip.Exception:
        return 0
    return 36


def repeats(seed: int, folder: Path) -> int:
    """One call of attention and one product, many times each; compared where they lie, so that on a GPU they overlap."""
    import gpu_cases as cases
    import test_gpu_linear as linear
    import torch
    from gpu_place import PLACE

    count = PLACE.size(1000, 20)
    case = cases.draw(1, cases.variants(1, seed), longest=PLACE.size(8192, 512), elements=PLACE.size(2**25, 2**17), seed=seed)[0]
    calls = (cases.build(case, PLACE.device), linear.build(linear.drawn(1 + seed % 24, seed)[-1]))
    for call in calls:
        first, different = call.run("auto"), torch.zeros((), dtype=torch.bool, device=PLACE.device)
        for _ in range(count):
            for a, b in zip(call.run("auto"), first, strict=True):
                different |= cases.differs(a, b)
        assert not different, call
    return count * len(calls)


def damaged_layers(seed: int, folder: Path) -> int:
    return _fuzzed("test_checkpoints", "test_fuzzed_layers", seed, folder, 500)


def damaged_folders(seed: int, folder: Path) -> int:
    return _fuzzed("test_hf_external", "test_fuzzed_folders", seed, folder, 60)


def _fuzzed(module: str, test: str, seed: int, folder: Path, count: int) -> int:
    os.environ |= {"HALFBYTE_FUZZ": str(count), "HALFBYTE_FUZZ_SEED": str(1000 + seed)}
    getattr(__import__(module), test)(folder)
    return count


def guided(seed: int, folder: Path) -> int:
    """Inputs of one target, in a process that coverage guides where atheris is installed."""
    from guided import TARGETS

    name, count = list(TARGETS)[seed % len(TARGETS)], 5000 if seed else 200  # few in `make slow-test`, which tries the first seed
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("guided.py")), name, str(count), str(seed), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name}: {done.stderr[-1500:]}"
    return count


def kills(seed: int, folder: Path) -> int:
    """A writer, killed in several processes, each of which begins with what the last has left; then one that is not."""
    import time

    from writers import WRITERS, files, finished, killed

    rng, name = random.Random(seed), list(WRITERS)[seed % len(WRITERS)]
    undisturbed, work = folder / "undisturbed", folder / "work"
    undisturbed.mkdir()
    work.mkdir()
    start = time.perf_counter()
    expected = finished(name, undisturbed)
    took, count = time.perf_counter() - start, 0
    for _ in range(5):
        ends = time.perf_counter() + rng.uniform(0, took)
        count += killed(lambda: WRITERS[name](work), lambda ends=ends: time.perf_counter() > ends)
    WRITERS[name](work)
    assert files(work) == expected
    assert not list(work.rglob("*.partial"))
    return count


def killed_commands(seed: int, folder: Path) -> int:
    """A command of the command line, killed three times at any moment; then it runs to its end."""
    import shutil
    import time

    from commands import COMMANDS, check_clean, check_left, command, seconds_of
    from writers import killed

    rng, name = random.Random(seed), list(COMMANDS)[seed % len(COMMANDS)]
    undisturbed, work = folder / "undisturbed", folder / "work"
    undisturbed.mkdir()
    work.mkdir()
    took, count = seconds_of(command(name, undisturbed)), 0
    check_left(name, undisturbed, whole=True)
    for _ in range(3):
        ends = time.perf_counter() + rng.uniform(0, took)
        early = killed(command(name, work), lambda ends=ends: time.perf_counter() > ends)
        count, took = count + early, took if early else took / 2  # it ended first: the machine is less busy than it was
        check_left(name, work, whole=False)
        if name == "model" and (work / name).exists():  # a whole one, which `quantize` would not overwrite
            shutil.rmtree(work / name)
    seconds_of(command(name, work))
    check_left(name, work, whole=True)
    check_clean(name, work)
    return count


def soak(seed: int, folder: Path) -> int:
    """Two threads decode with a cache each, which grows and is cropped: the same bits in every round."""
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from gpu_place import PLACE

    import halfbyte as hb

    @torch.inference_mode()
    def decode(thread: int) -> list[torch.Tensor]:
        rng = torch.Generator().manual_seed(thread)
        k, v, q = torch.randn(3, 1, 1, 1, 64, generator=rng).half().to(PLACE.device).unbind(0)
        cache, last = hb.KVCache(1, 1, 64, 128, keys="int8", values="int4_g32", device=PLACE.device), []
        for _ in range(5):
            for step in range(100):
                cache.append(k * (step + 1) / 100, v)
                out = hb.decode_attention(q, cache)
            last.append(out)
            cache.crop(0)
        return last

    with ThreadPoolExecutor(2) as pool:
        rounds = list(pool.map(decode, range(2)))
    for outs in rounds:
        assert all(torch.equal(out, outs[0]) for out in outs)
    return 1000


def soak_of_graphs(seed: int, folder: Path) -> int:
    """Steps from graphs beside the same steps without, in two threads on two streams, twice."""
    import test_gpu_graphs as graphs
    from gpu_place import PLACE

    steps = PLACE.size(1250, 35)
    graphs.grow_in_threads(steps, PLACE.impls[0], PLACE.size(250, 5), seed)
    return 8 * steps


def mutants(seed: int, folder: Path) -> int:
    """Every twentieth of them, and their tests without a fault, each in a process of its own: minutes."""
    sys.path.insert(0, f"{ROOT}/tests/mutants")
    from test_mutants import CONTROLS, MUTANTS, outcomes_of

    mine = MUTANTS[seed % 20 :: 20]
    outcomes = outcomes_of(mine, folder)
    wrong = {name: log for name, (status, log) in outcomes.items() if status != int(name not in CONTROLS)}
    assert not wrong, wrong
    return len(mine)


def orders(seed: int, folder: Path) -> int:
    """The suites of `make test`, each in one process and in an order of its own."""
    interpreted, dry = (
        {name: PLACES[place][name]} for place, name in (("interpreter", "TRITON_INTERPRET"), ("cpu", "HALFBYTE_GPU_TESTS"))
    )
    for tests, more in ((["tests"], {}), (["tests/interpreted"], interpreted), (["tests/emulated", "tests/gpu"], dry)):
        variables = {name: value for name, value in os.environ.items() if name not in PLACES["interpreter"]}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "not slow", *tests],
            cwd=ROOT,
            env=variables | more | {"HALFBYTE_ORDER": str(seed + 1)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-40:])
    return 1


def sanitizers(seed: int, folder: Path) -> int:
    done = subprocess.run(
        ["make", "gpu-sanitize", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, "\n".join([*done.stdout.splitlines(), *done.stderr.splitlines()][-40:])
    return 4


_ACCURATE = "Within twice the error of eager 16-bit PyTorch, whatever lies beyond a length"
_PRODUCT = "Within twice the error of a 16-bit GEMM"
_WATCHED = "memcheck, racecheck (but for `linear_large`), initcheck and synccheck report nothing"
_DAMAGED = "Finite weights or the library's own error, in bounded time and memory"
_GUIDED = "Untrusted files are read as safetensors reads them, or refused"
_REPEATS = "The same inputs give the same bits"
_INVARIANT = "`deterministic_batch`: a sequence has the same bits in every batch"
_SOAK = "The same bits in every round, no drift of memory"

ROWS = {
    row.name: row
    for row in (
        Row("attention, CPU", _ACCURATE, "calls", 20_000, attention(("cpu",), 16, 512, 2**17), megabytes=500),
        Row("attention, interpreter", _ACCURATE, "calls", 2_000, attention(("triton",), 3, 40, 2**12, batch=4), "interpreter"),
        Row("attention, GPU", _ACCURATE, "calls", 10_000, attention_on_gpu, "gpu", 600, 20_000),
        Row("linear, CPU", _PRODUCT, "GEMMs and projections", 20_000, products(("cpu",))),
        Row("linear, interpreter", _PRODUCT, "GEMMs and projections", 1_000, products(("triton",)), "interpreter"),
        Row("linear, GPU", _PRODUCT, "GEMMs and projections", 10_000, products_on_gpu, "gpu", 600, 20_000),
        Row("cache", "A cache is a list of tokens, contiguous and in pages", "operations", 1_000_000, cache_lives),
        Row("cache, slots", "A token is where its slot says, nothing else changes", "appends", 200_000, slots),
        Row("cut prompts", "Stored bits do not depend on how tokens are split into appends", "prompts", 5_000, cuts),
        Row("chunks", "The bits of a prompt do not depend on its chunks, its pages or its batch", "comparisons", 1_000, chunks),
        Row("batch invariance, CPU", _INVARIANT, "comparisons", 5_000, batch_invariance),
        Row("batch invariance, GPU", _INVARIANT, "comparisons", 5_000, batch_invariance_on_gpu, "gpu", 600, 20_000),
        Row("repeats, CPU", _REPEATS, "repeats", 20_000, repeats),
        Row("repeats, GPU", _REPEATS, "repeats", 20_000, repeats, "gpu", 600, 20_000),
        Row("damaged layers", _DAMAGED, "layers of every checkpoint kind", 100_000, damaged_layers, megabytes=300),
        Row("damaged folders", _DAMAGED, "folders through `hf.load`", 100_000, damaged_folders, megabytes=500),
        Row("guided fuzz", _GUIDED, "headers, indexes and configurations", 200_000, guided),
        Row("kills", "A killed writer loses no old file and leaves no trace after the next run", "kills", 500, kills),
        Row(
            "killed commands",
            "What a killed command leaves can be read or is not there; the next run is whole",
            "kills",
            100,
            killed_commands,
        ),
        Row("soak, CPU", _SOAK, "decode steps", 1_000_000, soak, megabytes=10),
        Row("soak, GPU", _SOAK, "decode steps", 1_000_000, soak, "gpu", 600, 10),
        Row("soak of graphs and streams, GPU", _SOAK, "decode steps", 1_000_000, soak_of_graphs, "gpu", 600, 100),
        Row("mutants", "A fault seeded in a named function is noticed by the tests", "faults", 150, mutants, seconds=3600),
        Row("orders", "No test depends on the order of the others", "runs of the fast suite", 50, orders, seconds=3600),
        Row("sanitizers", _WATCHED, "tools", 4, sanitizers, "gpu", 4 * 3600),
    )
}

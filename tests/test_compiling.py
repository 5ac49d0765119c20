"""What `make compile-check` refuses: toy kernels that spill, add atomically, or want more shared memory than there is."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

import halfbyte  # noqa: E402
from halfbyte.formats import KV_FORMATS  # noqa: E402
from halfbyte.kernels.compiling import (  # noqa: E402
    TARGETS,
    Configuration,
    build,
    compiled,
    divisible_by_16,
    float_atomics,
    parallel,
    recorded,
    serialised,
)
from halfbyte.plans import compiled_for  # noqa: E402
from halfbyte.plans.decode_attention import gluon_plan  # noqa: E402
from halfbyte.plans.decode_problem import dense_problem, problem_of  # noqa: E402
from halfbyte.plans.decode_spec import DecodePlan  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
compile_check: Any = importlib.import_module("compile_check")
inputs: Any = importlib.import_module("inputs")
manifest: Any = importlib.import_module("manifest")
sample: Any = importlib.import_module("variants.decode_sample").sample


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def sum_of(x, y):  # type: ignore[no-untyped-def]
    return x + y


def _add_in_other_words() -> Any:
    @triton.jit
    def add(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, sum_of(tl.load(x + at, at < n), tl.load(y + at, at < n)), at < n)

    return add


add_moved = _add_in_other_words()


@triton.jit
def atomic(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + i % 8, tl.load(x + i, i < n))


@gluon.jit
def copy(x, out, n, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, LAYOUT)
    gl.store(out + i, gl.load(x + i, i < n), i < n)


@gluon.jit
def through_shared(x, out, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, SHARED: gl.constexpr):  # type: ignore[no-untyped-def]
    i = gl.arange(0, BLOCK, LAYOUT)
    memory = gl.allocate_shared_memory(gl.float32, [BLOCK], SHARED)
    memory.store(gl.load(x + i))
    gl.store(out + i, memory.load(LAYOUT))


def configuration(**changes: Any) -> Configuration:
    pointers = {"x": "*fp32", "y": "*fp32", "out": "*fp32"}
    return Configuration(
        **{"name": "toy", "kernel": add, "signature": {**pointers, "n": "i32"}, "constexprs": {"BLOCK": 1024}} | changes
    )


def two_pointers(kernel: Any, signature: dict[str, str] | None = None, **constexprs: Any) -> Configuration:
    return configuration(kernel=kernel, signature={"x": "*fp32", "out": "*fp32", **(signature or {})}, constexprs=constexprs)


def found(c: Configuration, capability: int = 90) -> list[str]:
    target = next(t for t in TARGETS if t.capability == capability)
    return list(compile_check.problems(build(c, target), c, target))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_triton_and_gluon_compile_without_a_gpu(target: Any) -> None:
    layout = gl.BlockedLayout([1], [32], [4], [0])
    for c in (configuration(), two_pointers(copy, {"n": "i32"}, BLOCK=1024, LAYOUT=layout)):
        binary = build(c, target)
        assert 0 < binary.registers < 64
        assert not list(compile_check.problems(binary, c, target))
        assert target.name in binary.ptx


def test_what_is_known_of_alignment_changes_the_code() -> None:
    aligned = build(configuration(attrs=divisible_by_16("x", "y", "out", "n")), TARGETS[1])
    assert "ld.global.v4" in aligned.ptx
    assert "ld.global.v4" not in build(configuration(), TARGETS[1]).ptx


def test_spills_are_refused_unless_there_is_a_reason() -> None:
    c = configuration(constexprs={"BLOCK": 2048}, options={"num_warps": 1, "maxnreg": 24})
    assert "spilled" in found(c)[0]
    assert not found(configuration(constexprs=c.constexprs, options=c.options, may_spill="a toy"))


def test_floating_point_atomics_are_refused() -> None:
    assert "atom" in found(two_pointers(atomic, {"n": "i32"}, BLOCK=1024))[0]
    counters = configuration(kernel=atomic, signature={"x": "*i32", "out": "*i32", "n": "i32"})
    assert not found(counters)


def test_atomics_are_told_apart_in_ptx() -> None:
    ptx = """
    // atom.global.add.f32 in a comment
    @%p1 red.global.gpu.relaxed.add.noftz.f16x2 [%rd1], %r1;
    atom.acq_rel.gpu.global.inc.u32 %r1, [%rd1], 3;
    redux.sync.min.f32 %f1, %f2, 0xffffffff;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd2], [%r3], 16;
    atom.global.add.f64 %fd1, [%rd1], %fd2; mov.f32 %f1, %f2;
    """
    assert [name.split(".")[0] for name in float_atomics(ptx)] == ["atom", "cp", "red"]


PRODUCT = """
.version 8.4
.target sm_90a
.address_size 64
.visible .entry product(.param .u64 out) {
  .reg .b64 %rd<3>; .reg .f32 %f<5>; .reg .pred %p;
  ld.param.u64 %rd1, [out];
  mov.b64 %rd2, 0;
  mov.f32 %f1, 0f00000000; mov.f32 %f2, 0f00000000; mov.f32 %f3, 0f00000000; mov.f32 %f4, 0f00000000;
  setp.ne.b32 %p, 1, 0;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd2, %rd2, %p, 1, 1, 0, 0;
  MEANWHILE
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  st.global.f32 [%rd1], %f1;
  ret;
}
"""


def test_products_that_wait_for_each_other_are_seen() -> None:
    assert not serialised(PRODUCT.replace("MEANWHILE", ""))
    assert "(C75" in serialised(PRODUCT.replace("MEANWHILE", "add.f32 %f1, %f1, 0f3F800000;"))[0]


def test_a_tuned_kernel_whose_products_wait_is_refused() -> None:
    tuned = two_pointers(copy, {"n": "i32"}, BLOCK=1024, LAYOUT=gl.BlockedLayout([4], [32], [4], [0]))
    slow = replace(build(tuned, TARGETS[1]), serialised=("(C7514) wgmma.mma_async instructions are serialized",))
    assert "wait for each other" in next(compile_check.problems(slow, tuned, TARGETS[1]))
    assert not list(compile_check.problems(slow, configuration(), TARGETS[1]))


def test_more_shared_memory_than_a_block_has_is_refused() -> None:
    layout, shared = gl.BlockedLayout([1], [32], [4], [0]), gl.SwizzledSharedLayout(1, 1, 1, [0])
    c = two_pointers(through_shared, BLOCK=65536, LAYOUT=layout, SHARED=shared)
    c = Configuration(**{**c.__dict__, "may_spill": "a toy"})
    assert "shared memory" in found(c)[0]
    small = two_pointers(through_shared, BLOCK=1024, LAYOUT=layout, SHARED=shared)
    assert build(small, TARGETS[1]).shared_bytes == 4096


def test_arguments_that_are_forgotten_are_named() -> None:
    with pytest.raises(ValueError, match="without a type or a value: n"):
        build(configuration(signature={"x": "*fp32", "y": "*fp32", "out": "*fp32"}), TARGETS[0])
    with pytest.raises(ValueError, match="no arguments called z"):
        build(configuration(attrs=divisible_by_16("z")), TARGETS[0])


def test_a_sample_is_spread_evenly() -> None:
    names = [str(i) for i in range(10)]
    assert compile_check.spread(names, 4) == ["0", "3", "6", "9"]
    assert compile_check.spread(names, 0) == names
    assert compile_check.spread(names, 1) == ["0"]


class Both(NamedTuple):
    """Pointers in a tuple, one of which may be absent."""

    x: Any
    y: Any


@triton.jit
def add_both(both, out, stride, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(both.x + i * stride, i < n)
    if both.y is not None:
        x += tl.load(both.y + i, i < n)
    tl.store(out + i, x, i < n)


@pytest.mark.parametrize("absent", [False, True])
def test_a_launch_can_be_recorded_instead_of_written_down(absent: bool) -> None:
    """Types, ones, what is absent and what is aligned, as the JIT sees them; in tuples too."""
    t = torch.empty(4096, dtype=torch.float16, device="meta")
    both = Both(t, None if absent else t)
    (c,) = recorded("toy", lambda: add_both[(8,)](both, t, 1, 4096, BLOCK=512, num_warps=2), targets=(90,))
    assert c.name == "toy add_both"
    assert c.options["num_warps"] == 2
    assert c.targets == (90,)
    binary = build(c, TARGETS[1])
    assert binary.ptx.count("ld.global.v4") == (1 if absent else 2)


@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_every_format_that_the_tuned_kernel_takes_is_compiled(fmt: str) -> None:
    """As keys, and as values of its own or other keys, over heads that it takes."""
    dtype = fmt if fmt in ("fp16", "bf16") else "bf16"
    wanted = dense_problem(dtype, 16, 8, 4, 1, 128, 4096, fmt, fmt if not KV_FORMATS[fmt].token_block else "int8")
    if not isinstance(gluon_plan(wanted, 132, (9, 0), True), DecodePlan):
        pytest.skip("the portable kernel reads it alone")
    problems = [problem_of(one.call) for one in sample()]
    tuned = [p for p in problems if isinstance(gluon_plan(p, 132, (9, 0), True), DecodePlan)]
    assert fmt in {p.keys for p in tuned}
    assert KV_FORMATS[fmt].token_block or fmt in {p.values for p in tuned}


def test_a_variant_is_compiled_again_when_anything_that_it_is_made_from_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    c = next(iter(compile_check.configurations("variants.decode").values()))
    spec = next(value for value in c.constexprs.values() if "halfbyte.plans.decode_spec" in str(type(value)))
    name = next(name for name, value in c.constexprs.items() if value is spec)
    others = [
        inputs.digest(c, TARGETS[2]),
        inputs.digest(replace(c, options={**c.options, "maxnreg": 64}), TARGETS[1]),
        inputs.digest(replace(c, constexprs={**c.constexprs, name: replace(spec, stages=spec.stages + 1)}), TARGETS[1]),
        inputs.digest(configuration(), TARGETS[1]),
        inputs.digest(configuration(attrs=divisible_by_16("x")), TARGETS[1]),
    ]
    same = inputs.digest(c, TARGETS[1])
    text = compiled_for.text

    def changed(module: str) -> str:
        compiled_for._digest.cache_clear()
        monkeypatch.setattr(compiled_for, "text", lambda name: text(name) + "#" * (name == module))
        return inputs.digest(c, TARGETS[1])

    others += map(changed, ("halfbyte.plans.decode_spec", "halfbyte.plans.kv_codec", "halfbyte.formats"))  # their properties
    assert changed("halfbyte.cli") == same
    compiled_for._digest.cache_clear()
    assert len({same, *others}) == len(others) + 1
    code = text("halfbyte.plans.kv_codec")
    assert "class KVCodec" in code
    assert '"""' not in code  # words change no machine code


def test_the_code_of_constants_is_found_in_a_zip(tmp_path: Path) -> None:
    modules = ("halfbyte.plans.gemm_spec",)
    archive = shutil.make_archive(str(tmp_path / "all"), "zip", Path(halfbyte.__file__).parents[1], "halfbyte")
    code = f"import halfbyte; from halfbyte.plans.compiled_for import _digest; print(halfbyte.__file__, _digest({modules}))"
    found = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": archive}, check=True, capture_output=True)
    place, digest = found.stdout.decode().split()
    assert place.startswith(archive)
    assert digest == compiled_for._digest(modules)


def test_what_was_recorded_is_held_to_the_limits_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    c, job = configuration(), compile_check.Job("module", "toy", TARGETS[1], True)
    monkeypatch.setattr(compile_check, "configurations", lambda module: {"toy": c})
    entry = manifest.Entry(triton.__version__, "sm_90", "toy", "digest", 8, 30, 0, 16, inputs.digest(c, TARGETS[1]))
    assert compile_check.unchanged(job, entry).problems == ("16 bytes of registers spilled to memory",)
    for stale in (replace(entry, inputs=""), replace(entry, inputs="of another day"), None):
        assert compile_check.unchanged(job, stale) is None


def test_only_another_intermediate_code_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From other sources with the same code, as after a move, the recorded row stays, with the digest of the new sources."""
    c, job = configuration(), compile_check.Job("module", "toy", TARGETS[1], True)
    monkeypatch.setattr(compile_check, "configurations", lambda module: {"toy": c})
    entry = compile_check.check(job).entry
    old = replace(entry, inputs="of another day", registers=77)
    assert compile_check.check(job, old).entry == replace(entry, registers=77)
    assert compile_check.check(job, replace(old, code="other")).entry == entry
    other = [configuration(constexprs={"BLOCK": 512}), configuration(options={"maxnreg": 64}), configuration(kernel=add_moved)]
    assert [inputs.code(one, TARGETS[1]) == entry.code for one in other] == [False, False, True]
    assert inputs.digest(other[2], TARGETS[1]) != entry.inputs
    assert inputs.code(c, TARGETS[2]) != entry.code


def test_only_a_variant_without_problems_is_recorded_with_what_it_is_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    job = compile_check.Job("module", "toy", TARGETS[1], True)
    spilling = configuration(constexprs={"BLOCK": 2048}, options={"num_warps": 1, "maxnreg": 24})
    for c in (configuration(), spilling):
        monkeypatch.setattr(compile_check, "configurations", lambda module, c=c: {"toy": c})
        result = compile_check.check(job)
        assert bool(result.problems) == (c is spilling)
        assert result.entry.inputs == ("" if c is spilling else inputs.digest(c, TARGETS[1]))


def test_other_processes_compile_what_a_launch_then_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if something names another assembler once Triton has asked for the version of its own, as vLLM does."""
    target = next(t for t in TARGETS if t.capability == 90)
    some = [c for c in importlib.import_module("variants.block").configurations() if target.capability in c.targets][:2]
    ours = parallel._assembler(90)
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho another assembler\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))
    assert parallel._assembler(90) == ours
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    ahead = parallel.Ahead((9, 0))
    for c in (*some, *some):
        ahead.add(c)
    assert len(ahead.jobs) == 2
    ahead.begin()
    assert len(list(ahead.results())) == 2
    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    for c in some:
        compiled(c, target)
    assert hits == [True, True]
    later = parallel.Ahead((9, 0))
    for c in some:
        later.add(c)
    assert not later.jobs
    assert later.compilers is None


def test_a_block_that_only_compiles_loads_what_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of this thread do not run; each variant is compiled once, and loaded at the end."""
    runs: list[tuple[bool, int]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        runs.append((warmup, kwargs["BLOCK"]))

    monkeypatch.setattr(type(add), "run", run)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(parallel, "cores", lambda: 1)
    x = torch.zeros(64)
    with parallel.compile_only(wait=True):
        for block in (64, 64, 128):
            add[(1,)](x, x, x, 64, BLOCK=block)
        assert not runs
    assert runs == [(True, 64), (True, 128)]


def slow_variants(count: int) -> list[Configuration]:
    """Some that take seconds each."""
    return [c for c in importlib.import_module("variants.linear").configurations() if 90 in c.targets][:count]


def is_running(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def ends(group: int) -> bool:
    """Whether no process of a group is left within ten seconds."""
    deadline = time.monotonic() + 10
    while is_running(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(group)


CALLER = """
import sys, time
sys.path[:0] = {path!r}
from test_compiling import parallel, slow_variants
parallel.cores = lambda: 2
ahead = parallel.Ahead((9, 0))
for c in slow_variants(4):
    ahead.add(c)
ahead.begin()
ahead.wait(1)
print(ahead.compilers.process.pid, flush=True)
{then}
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["sys.exit()", "time.sleep(60)"])
def test_compilers_end_with_their_caller(then: str, tmp_path: Path) -> None:
    """However it ends; and Ctrl-C, which a terminal sends to all processes of a group, does not reach them."""
    script = CALLER.format(path=sys.path, then=then)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as caller:
        assert caller.stdout is not None
        group = int(caller.stdout.readline())
        if "sleep" in then:
            assert is_running(group)
            assert group != os.getpgid(caller.pid)
            caller.kill()
    assert ends(group)


def test_compilers_are_ended_by_an_error_where_kernels_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    run, groups = type(add).run, list[int]()

    def interrupted() -> None:
        with parallel.compile_only(wait=False) as ahead:
            for c in slow_variants(2):
                ahead.add(c)
            assert ahead.compilers is not None
            groups.append(ahead.compilers.process.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ends(groups[0])
    assert type(add).run is run


def test_blocks_that_do_not_wait_share_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has one for each shape of its linear layers; the next block that waits, waits for all of them."""
    started: list[Any] = []

    class Compilers:
        def __init__(self) -> None:
            self.messages: list[parallel.Message] = []
            self.counts: list[int] = []
            self.send, self.wait, self.close = self.messages.append, self.counts.append, lambda: None
            started.append(self)

    monkeypatch.setattr(parallel, "Compilers", Compilers)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    monkeypatch.setattr(parallel, "folder", lambda: Path("/nowhere"))
    some = slow_variants(5)
    for variants in (some[:2], some[1:4], some[4:]):
        with parallel.compile_only(wait=False) as ahead:
            for c in variants:
                ahead.add(c)
    with parallel.compile_only(wait=True):
        pass
    (compilers,) = started
    assert [(len(m.jobs), m.is_last) for m in compilers.messages] == [(2, False), (2, False), (1, False), (0, True)]
    assert compilers.counts == [1, 2, 3, 4, 5, 6]
    assert not parallel._open
    assert not parallel._begun


@pytest.mark.slow
def test_a_stamp_says_that_all_were_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even in two parts; the first of them can be waited for alone. A fork of this process that ends leaves the compilers alone."""
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    stamp = tmp_path / "stamp"
    for expected in (3, 0):
        ahead = parallel.Ahead((9, 0), stamp)
        for c in slow_variants(2):
            ahead.add(c)
        ahead.begin(is_last=False)
        ahead.add(slow_variants(3)[2])
        assert len(ahead.jobs) == expected
        ahead.begin()
        if expected:
            ahead.wait(1)
            assert ahead.jobs[0].stamp.exists()
            assert not stamp.exists()
            assert ahead.compilers is not None
            parallel._end(ahead.compilers.process, os.getpid() + 1)
        ahead.wait(expected + 1)
        assert stamp.exists()
        stamp.unlink()


def test_where_no_process_starts_launches_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel.sys, "executable", "")
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    ahead = parallel.Ahead((9, 0))
    for c in [c for c in importlib.import_module("variants.block").configurations() if 90 in c.targets][:2]:
        ahead.add(c)
    ahead.begin()
    assert len(ahead.jobs) == 2
    assert not list(ahead.results())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ahead.finish()
    assert all(job.stamp.exists() for job in ahead.jobs)

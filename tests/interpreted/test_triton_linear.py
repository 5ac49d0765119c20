"""The portable Triton level of `linear` and `qkv_projection`, run in the interpreter: within the promise of every level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

import halfbyte as hb
from accuracy import check_product, linear_accuracy, products
from gpu.gpu_gemms import build
from halfbyte.device import GPU
from halfbyte.errors import Unsupported
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kernels.linear.portable import launch
from halfbyte.kernels.linear.portable_weight import look_up_ptx
from halfbyte.ops._linear_on_gpu import LINEAR
from halfbyte.plans.gemm_portable import PortableTiles, portable_tiles
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.reference.dequantize import dynamic_map
from halfbyte.reference.linear import LinearCall
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import QuantTensor
from linear_levels import CALLS, DRAWN

#: numpy warns of what a GPU computes silently, and as meant: NaN that was put there.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.float16, torch.bfloat16]
FORMATS = list(WEIGHT_FORMATS)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(name: str, n: int, k: int, seed: int = 0, act_order: bool = False) -> QuantTensor:
    made = quantize(normal(n, k, seed=seed) * 0.1, name)
    perm = torch.randperm(k, generator=torch.Generator().manual_seed(seed)).int()
    return replace(made, perm=perm) if act_order else made


@dataclass
class Product:
    """x [M, K] with some weights: launched into memory that holds NaN, and judged one weight after the other."""

    x: torch.Tensor
    weights: Sequence[QuantTensor]
    biases: Sequence[torch.Tensor | None] = (None, None, None)

    def run(self, tiles: PortableTiles) -> list[torch.Tensor]:
        features, rows = [w.shape[0] for w in self.weights], self.x.shape[0]
        outs = [torch.full((rows, n), torch.nan, dtype=self.x.dtype) for n in features]
        workspace = torch.full((tiles.floats(features, rows),), torch.nan)
        counters = torch.zeros(tiles.count(features, rows), dtype=torch.int32)
        launch([self.x] * len(features), self.weights, self.biases[: len(features)], outs, tiles, workspace, counters)
        assert not counters.any(), "counters are zero again"
        return outs

    def check(self, tiles: PortableTiles) -> list[torch.Tensor]:
        outs = self.run(tiles)
        for out, w, bias in zip(outs, self.weights, self.biases, strict=False):
            check_product(out, self.x, w, bias)
        return outs


def tiles(k: int, block_k: int = 64, splits: int = 1, *, fold: bool = False, n: int = 64, m: int = 16) -> PortableTiles:
    steps = -(-k // block_k)
    share = -(-steps // splits)
    return PortableTiles(n, m, block_k, -(-steps // share), share, fold, num_warps=1, num_stages=1)


# --------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_with_exact_sums(name: str, dtype: torch.dtype) -> None:
    """Scales on fp32 sums, a step in one group; K in parts."""
    step = min(64, max(32, WEIGHT_FORMATS[name].group_size(384)))
    Product(normal(3, 384).to(dtype), [weight(name, 37, 384)], [normal(37)]).check(tiles(384, step, 2))


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_folded(name: str, dtype: torch.dtype) -> None:
    """Scales on 16-bit numbers; K is not a multiple of the step, and some steps hold several groups."""
    Product(normal(17, 384).to(dtype), [weight(name, 33, 384)]).check(tiles(384, 256, fold=True))
    Product(normal(5, 256).to(dtype), [weight(name, 37, 256)]).check(tiles(256, 64, 2, fold=True))


@pytest.mark.parametrize("name", FORMATS)
def test_the_plan_keeps_the_promise(name: str) -> None:
    """Rows 1, 65 and in between, N odd, K one group and three, whatever tiles that leads to."""
    group = WEIGHT_FORMATS[name].group_size(128)
    for rows, n, width, dtype in ((1, 1, group, DTYPES[0]), (65, 67, 3 * group, DTYPES[1])):
        w = weight(name, n, width)
        chosen = portable_tiles(GemmProblem(((w.format, n),), rows, width, "bf16"), GPU("", 4, (9, 0)))
        Product(normal(rows, width).to(dtype), [w], [normal(n)]).check(chosen)


def test_every_code_of_a_nested_scale() -> None:
    """bitsandbytes' dynamic map is arithmetic in the kernel and a table in the specification."""
    w = weight("nf4_dq", 64, 256)
    codes = torch.full_like(w.codes, 0xFF)  # the level 1
    scales = torch.arange(256, dtype=torch.uint8).view(64, 4)
    x = torch.zeros(4, 256, dtype=torch.float16)
    x[range(4), range(0, 256, 64)] = 2.0**15
    for absmax, mean in ((2.0, 0.5), (1.0, 0.0)):
        changed = replace(w, codes=codes, scales=scales, nested=torch.tensor([absmax, mean]))
        (out,) = Product(x, [changed]).run(tiles(256))
        expected = (dynamic_map(torch.device("cpu")).view(64, 4) * absmax + mean) * 2.0**15
        torch.testing.assert_close(out.mT.float(), expected.half().float(), rtol=1e-3, atol=0)


def test_every_e8m0_scale() -> None:
    """2^-127, which is a subnormal, to 2^127, and NaN for its own row only."""
    w = weight("mxfp4", 256, 32)
    w = replace(w, codes=torch.full_like(w.codes, 0x22), scales=torch.arange(256, dtype=torch.uint8).view(256, 1))
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    x[:, 5] = torch.tensor([1, 2])
    for fold in (False, True):
        (out,) = Product(x, [w]).run(tiles(32, 32, fold=fold))
        assert torch.equal(out[0, 1:-1].double(), 2.0 ** (torch.arange(1, 255).double() - 127))
        assert out[1, 0].item() == 2.0**-126  # twice it: the interpreter has no bf16 that small
        assert out[:, -1].isnan().all()


def executed(ptx: str, word: int) -> list[int]:
    """The registers $0 to $3 after the instructions of `look_up_ptx` have run on the word $4."""
    registers = {"$4": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in ptx.strip("{} ").split(";"):
        op, _, rest = line.strip().partition(" ")
        if not op or op == ".reg":
            continue
        target, *names = [name.strip() for name in rest.split(",")]
        a, b, *more = [value(name) for name in names]
        if op == "prmt.b32":
            made = 0
            for i in range(4):
                pick = more[0] >> (4 * i) & 15
                byte = ((b << 32) | a) >> (8 * (pick & 7)) & 0xFF
                made |= (byte if pick < 8 else 0xFF * (byte >> 7)) << (8 * i)
        elif op == "lop3.b32":
            c, table = more
            bits = [table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1 for i in range(32)]
            made = sum(bit << i for i, bit in enumerate(bits))
        else:
            made = {"and.b32": a & b, "or.b32": a | b, "shr.u32": a >> b, "sub.u32": a - b}[op]
        registers[target] = made & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_instructions_of_a_table(dtype: torch.dtype) -> None:
    """What a GPU runs instead of what the interpreter does: every code in every place."""
    levels = WEIGHT_FORMATS["nf4"].code.codebook().to(dtype)
    ptx = look_up_ptx(levels)
    for word in (0x76543210, 0xFEDCBA98, 0x0F1E2D3C, 0xC3D2E1F0, 0xFFFFFFFF, 0, 0x89ABCDEF):
        codes = [word >> (4 * i) & 15 for i in range(8)]
        made = torch.tensor([r >> s & 0xFFFF for r in executed(ptx, word) for s in (0, 16)], dtype=torch.int32).to(torch.int16)
        assert torch.equal(made.view(dtype), levels[codes[::2] + codes[1::2]])


# ------------------------------------------------------------------------------------------------------ shapes and strides


CASES = [*CALLS.values(), *DRAWN]


@pytest.mark.slow(sample=60)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[*CALLS, *map(str, range(len(DRAWN)))])
def test_every_call(number: int) -> None:
    """Scales on 16-bit numbers, or on fp32 sums; K in parts."""
    case = CASES[number]
    fold = number % 2 == 0 and case.layout != "expanded"  # whose numbers are few, so that rounding is luck
    call, group = build(case), WEIGHT_FORMATS[case.formats[0]].group_size(2)
    step = (32, 64, 256)[number % 3] if fold else max(32, min(group, 64))
    Product(call.x, call.weights, call.biases).check(tiles(case.width, step, 1 + number % 4, fold=fold))


def test_nothing_outside_of_x_is_read_in_a_broken_order() -> None:
    """Only a file's reader checks that it is a permutation; out of range it means the nearest column."""
    w = weight("int4_g64", 16, 128)
    x = torch.cat([torch.full((1, 128), torch.nan), normal(1, 128), torch.full((1, 128), torch.nan)]).half()[1:2]
    perm = torch.tensor([2**31 - 1, -(2**31)] * 64, dtype=torch.int32)
    (out,) = Product(x, [replace(w, perm=perm)]).run(tiles(128))
    columns = torch.tensor([127, 0] * 64)
    check_product(out, x[:, columns], w)


@pytest.mark.parametrize("names", [("int4_g64", "nf4", "nvfp4"), ("int4_g128",) * 4, ("mxfp4", "int8_col", "int4_sym_g32")])
def test_several_weights_in_one_launch(names: tuple[str, ...]) -> None:
    """Each with its own size, scales, tensor scale, order, bias and format."""
    weights = [weight(name, n, 256, i, act_order=i == 1) for i, (name, n) in enumerate(zip(names, (70, 33, 130, 4), strict=False))]
    biases = [normal(70), None, normal(130).half(), None][: len(names)]
    for chosen in (tiles(256, 32), tiles(256, 128, 2, fold=True, m=32)):
        Product(normal(20, 256).bfloat16(), weights, biases).check(chosen)


def test_a_weight_without_rows_among_others() -> None:
    weights = [weight("nf4", n, 64) for n in (3, 0, 70)]
    outs = Product(normal(2, 64).half(), weights).run(tiles(64))
    assert outs[1].shape == (2, 0)
    for out, w in zip(outs, weights, strict=True):
        if out.numel():
            check_product(out, normal(2, 64).half(), w)


# ------------------------------------------------------------------------------------------------------------- same bits


@pytest.mark.parametrize("name", ["int4_g64", "nf4", "nvfp4"])
def test_nothing_but_its_own_row_reaches_a_row(name: str) -> None:
    w, x = weight(name, 20, 192), normal(5, 192).bfloat16()
    (expected,) = Product(x, [w]).check(tiles(192, 64, 2, fold=True))
    x = x.clone()
    x[1], x[3, 7] = torch.nan, torch.inf
    (out,) = Product(x, [w]).run(tiles(192, 64, 2, fold=True))
    assert torch.equal(out[[0, 2, 4]], expected[[0, 2, 4]])
    assert out[1].isnan().all()
    assert not out[3].isfinite().all()


@pytest.mark.parametrize("name", ["int4_g32", "int8_g128", "mxfp4"])
def test_a_row_alone_and_among_others(name: str) -> None:
    w = quantize(normal(70, 1280) * 0.1, name)
    x = normal(66, 1280).half()
    together = hb.linear(x, w, impl="triton", row_invariant=True)
    check_product(together, x, w)
    for rows in (slice(0, 1), slice(65, 66), slice(3, 20)):
        assert torch.equal(hb.linear(x[rows], w, impl="triton", row_invariant=True), together[rows])


def test_splits_are_added_in_their_order() -> None:
    """Sums of parts that do not commute: 2^24 + 1 - 2^24 is 0 in fp32, 2^24 - 2^24 + 1 is not."""
    w = weight("int4_sym_col", 2, 128)
    w = replace(w, codes=torch.full_like(w.codes, 0x99), scales=torch.ones_like(w.scales))  # type: ignore[arg-type]
    x = torch.zeros(2, 128, dtype=torch.bfloat16)
    x[0, [0, 32, 64]] = torch.tensor([2.0**24, 1, -(2.0**24)]).bfloat16()
    x[1, [0, 32, 64]] = torch.tensor([2.0**24, -(2.0**24), 1]).bfloat16()
    (out,) = Product(x, [w]).run(tiles(128, 32, 4))
    assert out.tolist() == [[0, 0], [1, 1]]


# -------------------------------------------------------------------------------------------------------------- public


def test_public_calls() -> None:
    names = ("int4_g32", "nf4", "int8_col")
    weights = tuple(weight(name, n, 128, i) for i, (name, n) in enumerate(zip(names, (40, 8, 9), strict=True)))
    x, biases = normal(2, 3, 128).bfloat16(), (normal(40), None, normal(9))
    got = hb.qkv_projection(x, weights, biases, impl="triton")  # type: ignore[arg-type]
    for out, w, bias in zip(got, weights, biases, strict=True):
        assert out.shape == (2, 3, w.shape[0])
        assert out.is_contiguous()
        check_product(out.flatten(0, 1), x.flatten(0, 1), w, bias)
        check_product(hb.linear(x[0, 1], w, bias, impl="triton").unsqueeze(0), x[0, 1:2], w, bias)
    for call in (LinearCall(x, weights[:1], biases[:1], "triton", row_invariant=True), LinearCall(x, weights, biases, "triton")):
        torch.library.opcheck(torch.ops.halfbyte.linear.default, LINEAR.flat(call))


@pytest.mark.parametrize("act_order", [False, True])
def test_many_rows_are_copied_into_the_stored_order(act_order: bool) -> None:
    w, x = weight("int4_g64", 33, 128, act_order=act_order), normal(128, 66).half().mT
    for rows in (1, 17, 66):
        check_product(hb.linear(x[:rows], w, impl="triton"), x[:rows], w)


def test_nothing_to_add_up() -> None:
    w = weight("int4_col", 40, 128)
    for shape in ((0, 128), (2, 0, 128)):
        assert hb.linear(normal(*shape).half(), w, impl="triton").shape == (*shape[:-1], 40)
    assert hb.linear(normal(3, 128).half(), weight("int4_col", 0, 128), impl="triton").shape == (3, 0)
    bias, none = normal(40), weight("int4_col", 40, 0)
    assert torch.equal(hb.linear(normal(3, 0).half(), none, bias, impl="triton"), bias.half().expand(3, 40))
    assert not hb.linear(normal(3, 0).half(), none, impl="triton").any()


def test_what_cannot_run_here_is_refused() -> None:
    w = weight("nf4", 8, 64)
    with pytest.raises(Unsupported, match=r"x is torch\.float32; the triton kernel takes float16 and bfloat16"):
        hb.linear(normal(2, 64), w, impl="triton")


def test_the_bound_of_one_number_is_not_luck() -> None:
    """Twice eager's error is none: of 40 folded products of one number, several are off by more. A wrong last bit is noticed."""
    lucky = 0
    for seed in range(40):
        w, x = weight("int4_g32", 1, 64, seed=seed), normal(1, 64, seed=1000 + seed).bfloat16()
        (out,) = Product(x, [w]).check(tiles(64, 64, fold=True))
        truth, base = products(x, w)
        lucky += linear_accuracy(out, base, truth).ok
        one = torch.zeros_like(x)
        one[0, seed] = 1
        (out,) = Product(one, [w]).check(tiles(64, 64, fold=True))
        if out.any():
            with pytest.raises(AssertionError):
                check_product(out * (1 + 2**-5), one, w)
    assert lucky < 40

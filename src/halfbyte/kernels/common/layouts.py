"""Layouts of the tuned decode kernel, and how stored words become operands of the tensor cores."""

# ruff: noqa: RET505, RUF005
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def mma_layout(C):
    """mma.m16n8k16 of fp16 or bf16: streams of tokens along the batch axis, query rows divided over `warps_q` warps.

    Warps beyond one for 8 rows divide dims of the output instead; scores of the 16 tokens are the same in all of them.
    """
    rows = min(C.warps_q, C.padded_rows // 8)
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[C.kv_warps, C.warps_q // rows, rows], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def code_copy_layout(C, words):
    """One lane copies 16 bytes of a row: of a token's codes of all heads of a work item."""
    lanes = min(words // 8, 32)
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [C.runs, C.heads * C.warps_q, 1], [2, 1, 0])


@gluon.constexpr_function
def scale_copy_layout(C, S):
    """Scales of a token lie side by side; one lane copies 8 bytes (4 if a warp has only 64 scales).

    In pairs, tokens are not contiguous: neighbouring lanes copy neighbouring tokens, 4 bytes at a time.
    """
    columns = S.scale_columns
    per_lane = columns if S.paired else max(1, C.tokens * columns // 32)
    if not (S.staged or S.paired):
        per_lane = min(8, max(2, per_lane))
    inner = min(columns, per_lane)
    outer = max(1, per_lane // inner)
    lanes = max(1, columns // inner)
    order = [2, 1, 0] if columns > 1 else [1, 2, 0]
    return gl.BlockedLayout([1, outer, inner], [1, 32 // lanes, lanes], [C.runs, C.heads * C.warps_q, 1], order)


@gluon.constexpr_function
def code_ring_layout(words, rank=3):
    """Rows of 16-byte pieces, swizzled so that the eight rows of an ldmatrix fall into different banks."""
    pieces = words // 8
    per_phase = max(1, 8 // pieces)
    return gl.SwizzledSharedLayout(8, per_phase, min(8, pieces), list(range(rank))[::-1])


PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.constexpr_function
def latent_layout(C):
    """Outputs over latents: dims are the M axis, which warps divide, query rows the N axis."""
    return _latent_mma(C, C.wgmma_values)


@gluon.constexpr_function
def latent_scores_layout(C):
    """Scores over latents: tokens are the M axis."""
    return _latent_mma(C, C.wgmma)


@gluon.constexpr_function
def _latent_mma(C, wgmma):
    if wgmma:
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[C.warps, 1], instr_shape=[16, C.padded_rows, 16])
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[C.warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def _latent_sums(S, C):
    """Outputs in `latent_layout`, by code of a word, as one tensor."""

    def steps(axis, first, size):
        return [[step if a == axis else 0 for a in range(3)] for step in (first << i for i in range(16)) if step < size]

    down = 16 * C.warps
    registers = steps(2, 1, S.operands) + [[0, 1, 0], [8, 0, 0]] + steps(1, 8, C.padded_rows) + steps(0, down, S.rows)
    lanes = [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[step[0] % S.rows, 0, 0] for step in steps(0, 16, down)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [S.rows, C.padded_rows, S.operands])


@gluon.constexpr_function
def sum_layout(S, C):
    """[rows of an operand, query rows, operands of a group] over all threads of the block."""
    if C.latent:
        return _latent_sums(S, C)
    lanes = min(32, C.padded_rows)
    return gl.BlockedLayout([1, 1, S.operands], [32 // lanes, lanes, 1], [C.warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def lengths_layout(C):
    """Every warp holds all sequences, so that sums over them need no barrier."""
    return gl.BlockedLayout([max(1, C.batch // 32)], [32], [C.warps], [0])


# --------------------------------------------------------------------------------------------------- unpacking by masks


@gluon.constexpr_function
def _registers(results, operands):
    return ",".join(["=&r"] * results + ["r"] * operands)


@gluon.jit
def by_pairs(text: gl.constexpr, results: gl.constexpr, dtype: gl.constexpr, operands, registers: gl.constexpr = 1):
    """So many tensors of "fp16" or "bf16", two numbers at a time, by PTX: $0 .. are the results, registers of operands follow."""
    names: gl.constexpr = _registers(results, registers)
    if dtype == "bf16":
        return gl.inline_asm_elementwise(text, names, operands, dtype=(gl.bfloat16,) * results, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise(text, names, operands, dtype=(gl.float16,) * results, is_pure=True, pack=2)


@gluon.jit
def unpack_bytes(x):
    """16-bit words of two int8 codes -> two fp16 tensors, n + 128 times 2^-24: subnormals."""
    return by_pairs(
        """{
        .reg .b32 h;
        shr.u32 h, $2, 8;
        lop3.b32 $0, $2, 0x00FF00FF, 0x00800080, 0x6A;
        lop3.b32 $1, h, 0x00FF00FF, 0x00800080, 0x6A;
        }""",
        2,
        "fp16",
        (x,),
    )


@gluon.jit
def unpack(x, S: gl.constexpr):
    """16-bit words -> one fp16 (or bf16) tensor a code, times 2^-24: int4: n0, 16 n1, n2, 16 n3; int8: n + 128. e4m3: x / 256.

    int2: n0, 4 n1, 16 n2, 64 n3, and the same of the second byte.
    """
    if S.bits == 2:
        return by_pairs(
            """{
            .reg .b32 h;
            prmt.b32 h, $8, 0, 0x4341;
            and.b32 $0, $8, 0x00030003;
            and.b32 $1, $8, 0x000C000C;
            and.b32 $2, $8, 0x00300030;
            and.b32 $3, $8, 0x00C000C0;
            and.b32 $4, h, 0x00030003;
            and.b32 $5, h, 0x000C000C;
            and.b32 $6, h, 0x00300030;
            and.b32 $7, h, 0x00C000C0;
            }""",
            8,
            "fp16",
            (x,),
        )
    elif S.bits == 4:
        return by_pairs(
            """{
            .reg .b32 h;
            shr.u32 h, $4, 8;
            and.b32 $0, $4, 0x000F000F;
            and.b32 $1, $4, 0x00F000F0;
            and.b32 $2, h, 0x000F000F;
            and.b32 $3, h, 0x00F000F0;
            }""",
            4,
            "fp16",
            (x,),
        )
    elif S.kind == "signed":
        return unpack_bytes(x)
    elif S.kind == "e4m3":
        # s eeee mmm -> s 0 eeee mmm 0000000, an fp16 of the same value times 2^-8 (subnormals included)
        return by_pairs(
            """{
            .reg .b32 l, s, t;
            shl.b32 l, $2, 8;
            shr.u32 s, l, 1;
            shr.u32 t, $2, 1;
            and.b32 s, s, 0x3F803F80;
            and.b32 t, t, 0x3F803F80;
            lop3.b32 $0, l, 0x80008000, s, 0xEA;
            lop3.b32 $1, $2, 0x80008000, t, 0xEA;
            }""",
            2,
            "fp16",
            (x,),
        )
    elif S.kind == "fp16":
        return (x.to(gl.float16, bitcast=True),)
    else:
        return (x.to(gl.bfloat16, bitcast=True),)


@gluon.jit
def unpack_values(x, S: gl.constexpr):
    """As `unpack`, with the whole second byte as the last tensor of int4 and int2: one instruction less, undone once at the end."""
    if S.bits == 2:
        return by_pairs(
            """{
            and.b32 $0, $8, 0x00030003;
            and.b32 $1, $8, 0x000C000C;
            and.b32 $2, $8, 0x00300030;
            and.b32 $3, $8, 0x00C000C0;
            prmt.b32 $7, $8, 0, 0x4341;
            and.b32 $4, $7, 0x00030003;
            and.b32 $5, $7, 0x000C000C;
            and.b32 $6, $7, 0x00300030;
            }""",
            8,
            "fp16",
            (x,),
        )
    elif S.bits == 4:
        return by_pairs(
            """{
            and.b32 $0, $4, 0x000F000F;
            and.b32 $1, $4, 0x00F000F0;
            prmt.b32 $3, $4, 0, 0x4341;
            and.b32 $2, $3, 0x000F000F;
            }""",
            4,
            "fp16",
            (x,),
        )
    else:
        return unpack(x, S)


@gluon.jit
def planes_of(x, S: gl.constexpr):
    """The last axis of x, the codes of a word, as tensors of their own."""
    planes = (x,)
    for bit in gl.static_range(3):
        if 2 << bit <= S.codes_per_word:  # by one more bit of the code's number, the lowest first
            even = ()
            odd = ()
            for j in gl.static_range(gl.constexpr(1 << bit)):
                a, b = _split(planes[j])
                even = even + (a,)
                odd = odd + (b,)
            planes = even + odd
    return planes


@gluon.jit
def _split(x):
    """The last axis of x as two tensors: its even numbers and its odd ones."""
    if x.shape[-1] > 2:
        x = gl.reshape(x, x.shape[:-1] + [x.shape[-1] // 2, 2])
    return gl.split(x)


@gluon.jit
def with_planes(like, S: gl.constexpr):
    """A tensor with an axis for the codes of a word behind those of `like`, in the layout that splits into layouts of `like`."""
    like = gl.join(like, like)
    for bit in gl.static_range(1, 3):
        if 2 << bit <= S.codes_per_word:
            like = gl.join(like, like)
            like = gl.reshape(like, like.shape[:-2] + [2 << bit])
    return like


@gluon.jit
def movmatrix(x):
    """Transposes 8 x 8 tiles of 16-bit numbers across the lanes: from accumulator layout to operand layout."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
    )


@gluon.constexpr_function
def words_at_once(S):
    """Words loaded at a time: a section, but at least the depth of an mma."""
    return max(16, S.padded // S.sections)


@gluon.jit
def _key_words(ring, c: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Chunk c of a ring of keys as each stream reads it, [W, T, n]."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    if C.heads == 1:
        return ring.slice(c * words_at_once(S), words_at_once(S), dim=2).load(la)
    else:  # rows hold the words of all heads: each stream's own are where its operand's layout, turned the same way, has them
        like = gl.reshape(gl.full([C.kv_warps, C.tokens, S.padded], 0, gl.int16, la), [C.runs, C.heads, C.tokens, S.padded])
        like = gl.reshape(gl.permute(like, [0, 2, 1, 3]), [C.runs, C.tokens, C.heads * S.padded])
        words = gl.reshape(ring.load(like.type.layout), [C.runs, C.tokens, C.heads, S.padded])
        words = gl.reshape(gl.permute(words, [0, 2, 1, 3]), [C.kv_warps, C.tokens, S.padded])
        return gl.convert_layout(words, la, assert_trivial=True)


@gluon.jit
def _value_words(ring, c: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Chunk c of a ring of values, its rows turned to columns, as each stream reads it, [W, n, T]."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    if C.heads == 1:
        return ring.slice(c * words_at_once(S), words_at_once(S), dim=1).load(la)
    else:
        like = gl.full([C.kv_warps, S.padded, C.tokens], 0, gl.int16, la)
        like = gl.reshape(like, [C.runs, C.heads * S.padded, C.tokens])
        words = gl.reshape(ring.load(like.type.layout), [C.kv_warps, S.padded, C.tokens])
        return gl.convert_layout(words, la, assert_trivial=True)


@gluon.jit
def key_operands(ring, S: gl.constexpr, C: gl.constexpr):
    """Words [W, T, n] as mma operands: by section, then by code of a word."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    made = ()
    for c in gl.static_range(gl.constexpr(S.padded // words_at_once(S))):
        words = _key_words(ring, c, S, C)
        if S.halved:
            halves = gl.split(gl.permute(gl.reshape(words, [C.kv_warps, C.tokens, 2, 8]), [0, 1, 3, 2]))
            for half in gl.static_range(2):
                n = unpack(halves[half], S)
                for j in gl.static_range(gl.constexpr(S.operands)):
                    pair = gl.permute(gl.join(n[2 * j], n[2 * j + 1]), [0, 1, 3, 2])
                    made = made + (gl.convert_layout(gl.reshape(pair, [C.kv_warps, C.tokens, 16]), la, assert_trivial=True),)
        else:
            made = made + unpack(words, S)
    return made


@gluon.jit
def value_operands(ring, S: gl.constexpr, C: gl.constexpr):
    """Words [W, n, T] as mma operands, by section. Codes in one operand have the same place in their bytes, so one post-scale."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    made = ()
    for c in gl.static_range(gl.constexpr(S.padded // words_at_once(S))):
        words = _value_words(ring, c, S, C)
        if S.halved:
            halves = gl.split(gl.permute(gl.reshape(words, [C.kv_warps, 2, 8, C.tokens]), [0, 2, 3, 1]))
            for half in gl.static_range(2):
                n = unpack_values(halves[half], S)
                for j in gl.static_range(gl.constexpr(S.operands)):
                    pair = gl.permute(gl.join(n[j], n[j + S.operands]), [0, 3, 1, 2])
                    made = made + (gl.convert_layout(gl.reshape(pair, [C.kv_warps, 16, C.tokens]), la, assert_trivial=True),)
        else:
            made = made + unpack_values(words, S)
    return made


@gluon.constexpr_function
def first_dim(S, section, operand):
    """The first dim of an operand of keys."""
    words = 8 if S.halved else S.rows
    return section * words * S.codes_per_word + (2 * operand if S.halved else operand)


@gluon.constexpr_function
def operand_of(S, group, operand):
    """The number of an operand of keys, values or loaded queries: of the section that a group is in."""
    return group // S.sharing * S.operands + operand


@gluon.constexpr_function
def step_of_bit(S, bit):
    """The distance of dims that differ in one bit, (in operands of keys or queries, in rows of one); one of the two is 0."""
    words = 8 if S.halved else S.rows
    for step in (1 << k for k in range(8)):
        if step < S.sections * S.operands and first_dim(S, step // S.operands, step % S.operands) == 1 << bit:
            return step, 0
        if step < S.rows and S.codes_per_word * (step % words) + step // words == 1 << bit:
            return 0, step
    raise ValueError(f"bit {bit} of a dim is not one of an operand")


@gluon.constexpr_function
def multiple_of(S, code):
    """How much too large a code of a word is when it is masked in place: by its place in its byte."""
    return 2.0 ** (S.bits * (code % S.per_byte))


@gluon.constexpr_function
def post_scale_of(S, operand):
    """What sums over an operand of values are to be multiplied by."""
    return S.step / multiple_of(S, operand)

"""The tuned decode kernel: from the warps to the block, from blocks to a work item, and to the output."""

# ruff: noqa: RET505, RUF005, SIM108, B007, E741
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.compat import barrier, view
from halfbyte.kernels.common.layouts import PLAIN, mma_layout, post_scale_of, sum_layout
from halfbyte.kernels.decode.blocks import real_rows, result_at

#: Partial results of a work item that are added in one step; more are added in two.
ONE_STEP = gl.constexpr(32)


@gluon.constexpr_function
def _bits(n):
    return n.bit_length() - 1


@gluon.jit
def stack(v, n: gl.constexpr):
    """n tensors (a power of two of them) as one with one more dim at its end."""
    shape: gl.constexpr = v[0].shape
    stacked = v
    for level in gl.static_range(gl.constexpr(_bits(n))):
        pairs = ()
        for i in gl.static_range(n >> (level + 1)):
            pairs = pairs + (gl.reshape(gl.join(stacked[i], stacked[i + (n >> (level + 1))]), shape + [2 << level]),)
        stacked = pairs
    return gl.reshape(stacked[0], shape + [n])


@gluon.jit
def sum_warps(ring, state, S: gl.constexpr, C: gl.constexpr):
    """Merge the warps' states through shared memory. For each head: m and l [1, R, 1], values by section [rows, R, operands]."""
    W: gl.constexpr = C.kv_warps
    R: gl.constexpr = C.padded_rows
    N: gl.constexpr = S.operands
    A: gl.constexpr = S.sections * N
    m, l, z, o = state
    shape: gl.constexpr = [S.sections * W * S.rows, R, N]
    if C.reuses_ring:
        barrier()  # other warps may still read their last tile
        red = view(ring, 0, gl.float32, shape, PLAIN)
    else:
        red = gl.allocate_shared_memory(gl.float32, shape, PLAIN)
    red_m = gl.allocate_shared_memory(gl.float32, [W, R, 1], PLAIN)
    red_l = gl.allocate_shared_memory(gl.float32, [W, R, 1], PLAIN)
    red_z = gl.allocate_shared_memory(gl.float32, [W, R, S.groups], PLAIN)
    # One store for all: between two stores to the same memory the compiler puts a barrier.
    red.store(gl.reshape(gl.permute(gl.reshape(stack(o, A), [W * S.rows, R, S.sections, N]), [2, 0, 1, 3]), shape))
    red_m.store(gl.reshape(m, [W, R, 1]))
    red_l.store(gl.reshape(gl.sum(l, axis=1), [W, R, 1]))
    if S.shifted:
        sums = ()
        for g in gl.static_range(gl.constexpr(S.groups)):
            sums = sums + (gl.sum(z[g], axis=1),)
        red_z.store(stack(sums, S.groups))
    barrier()
    heads = ()
    for e in gl.static_range(gl.constexpr(C.heads)):
        heads = heads + (_sum_streams(red, red_m, red_l, red_z, e, S, C),)
    return heads


@gluon.jit
def _sum_streams(red, red_m, red_l, red_z, e: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """The sum over the streams of head e of a work item, of what `sum_warps` has put into shared memory."""
    lo: gl.constexpr = sum_layout(S, C)
    W: gl.constexpr = C.kv_warps
    R: gl.constexpr = C.padded_rows
    N: gl.constexpr = S.operands
    top = red_m.slice(e, 1, dim=0).load(lo)
    for w in gl.static_range(e + C.heads, W, gl.constexpr(C.heads)):
        top = gl.maximum(top, red_m.slice(w, 1, dim=0).load(lo))
    total = gl.full([1, R, 1], 0.0, gl.float32, lo)
    values = ()
    shifts = ()
    for g in gl.static_range(gl.constexpr(S.sections)):
        values = values + (gl.full([S.rows, R, N], 0.0, gl.float32, lo),)
    for g in gl.static_range(gl.constexpr(S.groups)):
        shifts = shifts + (total,)
    for w in gl.static_range(e, W, gl.constexpr(C.heads)):
        f = gl.exp2(red_m.slice(w, 1, dim=0).load(lo) - top)
        total += f * red_l.slice(w, 1, dim=0).load(lo)
        added = ()
        shifted = ()
        for g in gl.static_range(gl.constexpr(S.groups)):
            if g % S.sharing == 0:
                part = red.slice((g // S.sharing * W + w) * S.rows, S.rows, dim=0).load(lo)
                added = added + (values[g // S.sharing] + f * part,)
            if S.shifted:
                shifted = shifted + (shifts[g] + f * red_z.slice(w, 1, dim=0).slice(g, 1, dim=2).load(lo),)
            else:
                shifted = shifted + (shifts[g],)
        values = added
        shifts = shifted
    j = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, lo)))[None, None, :]
    post_scale = gl.full([1, 1, N], post_scale_of(S, 0), gl.float32, lo)
    for k in gl.static_range(1, gl.constexpr(S.per_byte)):
        post_scale = gl.where(j % S.per_byte == k, post_scale_of(S, k), post_scale)
    i = gl.arange(0, S.rows, layout=gl.SliceLayout(1, gl.SliceLayout(2, lo)))[:, None, None]
    whole = ()
    for g in gl.static_range(gl.constexpr(S.sections)):
        shift = shifts[g * S.sharing]
        if S.sharing > 1:
            shift = gl.where(i % 8 < 4, shift, shifts[g * S.sharing + 1])
        whole = whole + (values[g] * post_scale + shift,)
    return top, total, whole


@gluon.jit
def split_planes(o, S: gl.constexpr, C: gl.constexpr):
    """Sums over the codes of a word of values, each alone: the last one of int4 and int2 was over the whole second byte."""
    if S.per_byte == 1:
        return o
    else:
        row = gl.arange(0, S.rows, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma_layout(C))))[None, :, None]
        made = ()
        for g in gl.static_range(gl.constexpr(S.sections)):
            for j in gl.static_range(gl.constexpr(S.operands - 1)):
                made = made + (o[g * S.operands + j],)
            last = o[g * S.operands + S.operands - 1]
            for j in gl.static_range(gl.constexpr(S.operands - S.per_byte), gl.constexpr(S.operands - 1)):
                before = o[g * S.operands + j]
                if S.halved:
                    before = gl.where(row >= 8, before, 0.0)
                last -= before
            made = made + (last,)
        return made


@gluon.jit
def write_rows(call, b, first, head, state, S: gl.constexpr, C: gl.constexpr):
    """Write the rows of a work item of sequence b. first: its first head, counted over all sequences; `head`: in its own."""
    for e in gl.static_range(gl.constexpr(C.heads)):
        m, l, v = state[e]
        _write_head(call, b, first + e, head + e, m, l, v, S, C)


@gluon.jit
def _write_head(call, b, item, head, m, l, v, S: gl.constexpr, C: gl.constexpr):
    """Divide by the softmax's sum, sinks included, and write the rows of a KV head and their log-sum-exp."""
    results = call.results
    R: gl.constexpr = C.padded_rows
    r = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, sum_layout(S, C))))[None, :, None]
    lse = gl.where(l == 0.0, float("-inf"), (m + gl.log2(l)) * 0.6931471805599453)
    gl.store(result_at(results.lse, r, 0, b, item, head, 1, call, C), lse, mask=real_rows(r, b, call, C))
    if call.per_head.sinks is not None:
        sink = gl.load(call.per_head.sinks + head * (C.rows // C.queries) + r // C.queries, mask=r < C.rows, other=0.0)
        l += gl.exp2(sink * 1.4426950408889634 - m)
    scale = 1.0 / gl.where(l == 0.0, 1.0, l)
    if S.scale == "tensor":
        scale = scale * gl.load(call.v.scales).to(gl.float32)
    dims: gl.constexpr = S.rows * S.operands
    size: gl.constexpr = S.words * S.codes_per_word
    for g in gl.static_range(gl.constexpr(S.sections)):
        x = (v[g] * scale).to(results.out.dtype.element_ty)
        if S.halved:
            x = gl.permute(gl.reshape(x, [2, 8, R, S.operands]), [2, 1, 0, 3])
        else:
            x = gl.permute(x, [1, 0, 2])
        x = gl.reshape(x, [R, dims])
        row = gl.arange(0, R, layout=gl.SliceLayout(1, x.type.layout))[:, None]
        d = gl.arange(0, dims, layout=gl.SliceLayout(0, x.type.layout))[None, :] + g * dims
        pointers = result_at(results.out, row, d, b, item, head, size, call, C)
        gl.store(pointers, x, mask=real_rows(row, b, call, C) & (d < size))


@gluon.jit
def _partial_offsets(S: gl.constexpr, C: gl.constexpr):
    """Where a partial result keeps the values of a section, [rows, R, operands], and the number of a query row, [1, R, 1]."""
    lo: gl.constexpr = sum_layout(S, C)
    i = gl.arange(0, S.rows, layout=gl.SliceLayout(1, gl.SliceLayout(2, lo)))[:, None, None]
    r = gl.arange(0, C.padded_rows, layout=gl.SliceLayout(0, gl.SliceLayout(2, lo)))[None, :, None]
    j = gl.arange(0, S.operands, layout=gl.SliceLayout(0, gl.SliceLayout(1, lo)))[None, None, :]
    return (i * C.padded_rows + r) * S.operands + j, r


@gluon.jit
def partial_slot(program, begins):
    """Where a program's partial result of an item lies: in its second slot if the item begins in its share, else in its first."""
    return 2 * program + gl.where(begins, 1, 0)


@gluon.jit
def write_partial(Partial, slot, state, S: gl.constexpr, C: gl.constexpr):
    """A partial result into its slot of the workspace; it goes to L2, where the program that adds the parts up will find it."""
    R: gl.constexpr = C.padded_rows
    size: gl.constexpr = S.rows * R * S.operands
    at, r = _partial_offsets(S, C)
    for e in gl.static_range(gl.constexpr(C.heads)):
        m, l, v = state[e]
        base = Partial + slot.to(gl.int64) * C.partial_floats + e * C.head_floats
        for g in gl.static_range(gl.constexpr(S.sections)):
            gl.store(base + g * size + at, v[g], cache_modifier=".cg")
        gl.store(base + S.sections * size + r, m, cache_modifier=".cg")
        gl.store(base + (S.sections * size + R) + r, l, cache_modifier=".cg")


@gluon.jit
def _load_partial(base, offsets, ok, other, sure: gl.constexpr):
    """Numbers of a part from L2; `other` where not `ok`, which need not be looked at if all are sure to be there."""
    if sure:
        return gl.load(base + offsets, cache_modifier=".cg")
    else:
        return gl.load(base + offsets, mask=(offsets >= 0) & ok, other=other, cache_modifier=".cg")


@gluon.jit
def _load_partials(Partial, begin, step, last, first, many: gl.constexpr, sure: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """m, l and values by section of one head in `many` parts: programs begin, begin + step, ..., as far as `last` (`sure`: all); in
    splits of fixed size slots instead, those from `first` on."""
    R: gl.constexpr = C.padded_rows
    G: gl.constexpr = S.sections
    size: gl.constexpr = S.rows * R * S.operands
    at, r = _partial_offsets(S, C)
    ms = ()
    ls = ()
    vs = ()
    for y in gl.static_range(many):
        program = begin + y * step
        if C.split > 0:
            base = Partial + program.to(gl.int64) * C.partial_floats
            there = (program >= first) & (program <= last)
        else:
            base = Partial + partial_slot(program, program == first).to(gl.int64) * C.partial_floats
            there = program <= last
        ms = ms + (_load_partial(base + G * size, r, there, -3.0e38, sure),)
        ls = ls + (_load_partial(base + (G * size + R), r, there, 0.0, sure),)
        for g in gl.static_range(G):
            vs = vs + (_load_partial(base + g * size, at, there, 0.0, sure),)
    return ms, ls, vs


@gluon.jit
def _add(state, ms, ls, vs, many: gl.constexpr, S: gl.constexpr):
    """One head's state and `many` more parts of it."""
    G: gl.constexpr = S.sections
    m, l, v = state
    top = m
    for y in gl.static_range(many):
        top = gl.maximum(top, ms[y])
    f = gl.exp2(m - top)
    l = l * f
    kept = ()
    for g in gl.static_range(G):
        kept = kept + (v[g] * f,)
    v = kept
    for y in gl.static_range(many):
        f = gl.exp2(ms[y] - top)
        l += f * ls[y]
        added = ()
        for g in gl.static_range(G):
            added = added + (v[g] + f * vs[y * G + g],)
        v = added
    return top, l, v


@gluon.jit
def _add_partials(
    state, Partial, begin, step, last, first, many: gl.constexpr, sure: gl.constexpr, S: gl.constexpr, C: gl.constexpr
):
    """The heads' states and `many` more parts, all loads in flight."""
    loaded = ()
    for e in gl.static_range(gl.constexpr(C.heads)):
        loaded = loaded + (_load_partials(Partial + e * C.head_floats, begin, step, last, first, many, sure, S, C),)
    added = ()
    for e in gl.static_range(gl.constexpr(C.heads)):
        ms, ls, vs = loaded[e]
        added = added + (_add(state[e], ms, ls, vs, many, S),)
    return added


@gluon.jit
def _nothing(S: gl.constexpr, C: gl.constexpr):
    """The m, l and values of no tokens, for each head."""
    lo: gl.constexpr = sum_layout(S, C)
    v = ()
    for g in gl.static_range(gl.constexpr(S.sections)):
        v = v + (gl.full([S.rows, C.padded_rows, S.operands], 0.0, gl.float32, lo),)
    state = ()
    for e in gl.static_range(gl.constexpr(C.heads)):
        m = gl.full([1, C.padded_rows, 1], -3.0e38, gl.float32, lo)
        state = state + ((m, gl.full([1, C.padded_rows, 1], 0.0, gl.float32, lo), v),)
    return state


@gluon.constexpr_function
def _at_a_time(S, C):  # as many parts as 64 registers hold, 8 heads' at most
    return max(2, min(8 // C.heads, 2048 * C.warps // (C.heads * S.sections * S.rows * C.padded_rows * S.operands)))


@gluon.jit
def _sum_partials(Partial, begin, step, count, first, S: gl.constexpr, C: gl.constexpr):
    """Merge the parts of `count` programs begin, begin + step, ... of one work item, in that order."""
    many: gl.constexpr = _at_a_time(S, C)
    half: gl.constexpr = many // 2  # of what is left over
    state = _nothing(S, C)
    rest = begin + count // many * many * step
    last = begin + (count - 1) * step
    for program in range(begin, rest, many * step):
        state = _add_partials(state, Partial, program, step, last, first, many, True, S, C)
    for program in range(rest, last + 1, half * step):
        state = _add_partials(state, Partial, program, step, last, first, half, False, S, C)
    return state


@gluon.jit
def _last_of(Semaphore, count, mine=1):
    """Count `mine` parts in, all of whose stores come before that; whether they are the last of `count`. Leaves zero behind."""
    barrier()
    last = gl.atomic_add(Semaphore, mine, sem="acq_rel", scope="gpu") == count - mine
    if last:
        gl.store(Semaphore, 0)
    return last


@gluon.jit
def add_partials(call, item, items, first, last, S: gl.constexpr, C: gl.constexpr):
    """Whoever of programs first..last is the last to have written its partial result of a work item adds all of them up.

    Many are added in two steps: the last of `C.reduce_fanin` neighbours to arrive adds theirs, puts the sum in place of the first
    of them, and only then counts in at the item. Arrival decides who adds, and never in which order.
    Returns (whether this program has the whole item, and for each head its m, l and values).
    """
    results = call.results
    program = gl.program_id(0)
    state = _nothing(S, C)
    semaphore = item
    count = last - first + 1
    begin = first
    two_steps = count > ONE_STEP
    if two_steps:
        begin = first + (program - first) // C.reduce_fanin * C.reduce_fanin
        count = gl.minimum(last - begin + 1, C.reduce_fanin)
        # Where neighbourhoods begin, C.reduce_fanin programs lie between them, unless one is the first of its item: it has its own.
        semaphore = items + 2 * (begin // C.reduce_fanin) + gl.where(begin == first, 1, 0)
    whole = _last_of(results.semaphores + semaphore, count)
    if whole:
        state = _sum_partials(results.partial, begin, 1, count, first, S, C)
        if two_steps:
            barrier()  # all have read the part that the sum takes the place of
            write_partial(results.partial, partial_slot(begin, begin == first), state, S, C)
            sums = (last - first + C.reduce_fanin) // C.reduce_fanin
            whole = _last_of(results.semaphores + item, sums)
            if whole:
                state = _sum_partials(results.partial, first, C.reduce_fanin, sums, first, S, C)
    return whole, state


@gluon.jit
def _sum_slots(Partial, slot, first, last, S: gl.constexpr, C: gl.constexpr):
    """Merge the parts first .. last behind `slot`, in that order. Which are added at a time does not depend on which are there, so
    that parts of no tokens change no bit."""
    many: gl.constexpr = _at_a_time(S, C) // 2
    state = _nothing(S, C)
    base = Partial + slot.to(gl.int64) * C.partial_floats
    for part in range(first // many * many, last + 1, many):
        state = _add_partials(state, base, part, 1, last, first, many, False, S, C)
    return state


@gluon.jit
def add_split(call, item, split, all, mine, owner, merged, S: gl.constexpr, C: gl.constexpr):
    """As `add_partials`, of one split of a work item. The item has splits `all`, and splits `mine` of them are this program's.

    The last of the programs of C.reduce_fanin neighbours, a group, adds these up; who brings a group's last sum, those. Groups of
    one program lie in slots of its own, others with the `owner`, in whose share they begin: only one group leaves a share.
    """
    N: gl.constexpr = C.reduce_fanin
    results = call.results
    group = split // N
    first = gl.maximum(all[0], group * N)
    last = gl.minimum(all[1], group * N + N)
    end = gl.minimum(last, mine[1])
    count = end - gl.maximum(first, mine[0])
    shared = count < last - first  # with other programs
    slot = gl.where(shared, 2 * owner + 1, 2 * gl.program_id(0)) * N
    write_partial(results.partial, slot + split % N, merged, S, C)
    state, whole = _nothing(S, C), split + 1 == end
    if whole:
        if shared:
            whole = _last_of(results.semaphores + call.batch * (call.heads // C.heads) + owner, last - first, count)
        else:
            barrier()
        if whole:
            state = _sum_slots(results.partial, slot, first % N, (last - 1) % N, S, C)
            first, last = all[0] // N, (all[1] - 1) // N
            if first < last:
                slot = 2 * N * gl.num_programs(0) + item * ((call.capacity + (C.split * N - 1)) // (C.split * N))
                write_partial(results.partial, slot + group, state, S, C)
                whole = _last_of(results.semaphores + item, last + 1 - first)
                if whole:
                    state = _sum_slots(results.partial, slot, first, last, S, C)
    return whole, state

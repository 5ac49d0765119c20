"""Loops that are bound to their arguments: a call converts nothing, and torch's own threads share its rows.

The arguments lie in a block of 8-byte words; a function of LLVM reads them from there, and calls the loop for rows `first` to
`last`. A list of bound loops is int64 [n, 3]: the address of that function, that of the block, and a count of rows. Each thread of
a parallel region of OpenMP runs its share of the rows of each loop.

A region of few microseconds pays, because torch's threads spin for a while after their last one; other threads would have to wait
for a core of theirs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic
from numba.np.numpy_support import as_dtype

from halfbyte.cpu.compiled import callback, loop
from halfbyte.cpu.compiled.linear import Array

_WORD, _INT, _VOID = ir.IntType(64), ir.IntType(32), ir.VoidType()
_WORDS = _WORD.as_pointer()
#: A bound loop; what a region runs; `GOMP_parallel`; a question about a region.
_LOOP, _BODY = ir.FunctionType(_VOID, [_WORDS, _WORD, _WORD]), ir.FunctionType(_VOID, [_WORDS])
_PARALLEL, _ASK = ir.FunctionType(_VOID, [_BODY.as_pointer(), _WORDS, _INT, _INT]), ir.FunctionType(_INT, [])
_FUNCTIONS: dict[tuple[Any, ...], tuple[Any, int]] = {}


def bind(function: Any, arguments: Sequence[Any]) -> tuple[int, Array]:
    """The address of a function that calls a loop with arguments and rows, and its block, which does not keep arrays alive.

    Raises `TypeError` for an array that the loop was not compiled for; nothing is converted.
    """
    if function._can_compile:
        kinds = *map(typeof, arguments), types.int64, types.int64
        if kinds not in function.overloads:
            function.compile(kinds)
    else:
        (kinds,) = function.overloads
    if (entry := _FUNCTIONS.get((function, kinds))) is None:
        entry = _FUNCTIONS[function, kinds] = _function(function.overloads[kinds])
    words = (word for kind, value in zip(kinds[:-2], arguments, strict=True) for word in _words(kind, value))
    return entry[1], np.frombuffer(b"".join(words), np.int64).copy()


def _words(kind: Any, value: Any) -> Iterator[bytes]:
    """A value of a type of numba's: 8 bytes for each scalar of its form in memory."""
    if isinstance(kind, types.Array):
        fits = value.ndim == kind.ndim and value.dtype == as_dtype(kind.dtype)
        if not fits or (kind.layout == "C" and not value.flags.c_contiguous):
            raise TypeError(f"an array [{value.shape}] of {value.dtype}, strides {value.strides}, for a loop that takes {kind}")
        numbers = 0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides
        yield struct.pack(f"<{len(numbers)}q", *numbers)
    elif isinstance(kind, types.BaseTuple):
        for each_kind, each in zip(kind, value, strict=True):
            yield from _words(each_kind, each)
    elif isinstance(kind, types.Float):
        yield struct.pack("<d" if kind.bitwidth == 64 else "<f4x", value)
    else:
        yield struct.pack("<q", 0 if value is None else int(value))


def _function(compiled: Any) -> tuple[Any, int]:
    """What keeps a `_LOOP` for a compiled loop in memory, and its address."""
    context, kinds, result = compiled.target_context, compiled.signature.args, compiled.signature.return_type
    library = context.codegen().create_library("bound")
    module = library.create_ir_module("bound")
    function = ir.Function(module, _LOOP, "bound")
    builder = ir.IRBuilder(function.append_basic_block())
    words, *rows = function.args
    packer, scalars = context.get_arg_packer(kinds[:-2]), []
    for i, kind in enumerate(packer.argument_types):
        scalars.append(builder.load(builder.bitcast(builder.gep(words, [ir.Constant(_WORD, i)]), kind.as_pointer())))
    address = ir.Constant(_WORD, compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
    target = builder.inttoptr(address, context.call_conv.get_function_type(result, kinds).as_pointer())
    context.call_conv.call_function(builder, target, result, kinds, [*packer.from_arguments(builder, scalars), *rows])
    builder.ret_void()
    with global_compiler_lock:
        library.add_ir_module(module)
        library.finalize()
    return library, library.get_pointer_to_function("bound")


@intrinsic
def _word(typing: Any, address: Any, index: Any) -> Any:
    """The int64 at an address."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.load(builder.gep(builder.inttoptr(arguments[0], _WORDS), [arguments[1]]))

    return types.int64(types.int64, types.int64), code


@intrinsic
def _ask(typing: Any, address: Any) -> Any:
    """What the function at an address says."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.sext(builder.call(builder.inttoptr(arguments[0], _ASK.as_pointer()), []), _WORD)

    return types.int64(types.int64), code


@intrinsic
def _call(typing: Any, address: Any, words: Any, first: Any, last: Any) -> Any:
    """A bound loop, for rows first to last."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        function = builder.inttoptr(arguments[0], _LOOP.as_pointer())
        builder.call(function, [builder.inttoptr(arguments[1], _WORDS), *arguments[2:]])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 4), code


@intrinsic
def _parallel(typing: Any, address: Any, body: Any, words: Any) -> Any:
    """A region of as many threads as the caller may use, each of which runs `body` of `words`."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        function, default = builder.inttoptr(arguments[0], _PARALLEL.as_pointer()), ir.Constant(_INT, 0)
        body, words = builder.inttoptr(arguments[1], _BODY.as_pointer()), builder.inttoptr(arguments[2], _WORDS)
        builder.call(function, [body, words, default, default])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3), code


@loop
def share(entries: int, length: int, part: int, parts: int) -> None:
    """One of the parts of a list of bound loops, at an address."""
    for i in range(length):
        rows = _word(entries, 3 * i + 2)
        _call(_word(entries, 3 * i), _word(entries, 3 * i + 1), rows * part // parts, rows * (part + 1) // parts)


def _body(words: int) -> None:
    part, parts = _ask(_word(words, 2)), _ask(_word(words, 3))
    share(_word(words, 0), _word(words, 1), part, parts)


@loop
def region(parallel: int, body: int, words: int) -> None:
    """Run a list of bound loops in a region of as many threads as the caller may use.

    parallel  the address of `GOMP_parallel`
    body      `BODY`
    words     the address of int64 [4]: that of the list, its length, and those of `omp_get_thread_num` and `omp_get_num_threads`
    """
    _parallel(parallel, body, words)


#: The address of what each thread of a region runs.
BODY = callback(_body, types.void(types.int64)).address

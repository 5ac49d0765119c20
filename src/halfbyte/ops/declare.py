"""One declaration an op: the class of its calls, a NamedTuple. From its fields and their types `Op` derives

    schema      the arguments of the op in torch.library, and their flat form: of nested objects such as `KVBuffer` each field,
                `keys_codes`; of a weight its tensors and the name of its format
    signature   by which the launch cache finds an earlier call that was launched in the same way: facts of tensors, formats, and
                what a kernel is compiled for. Of a number that a kernel takes (a float, or an int that may be None) only whether
                it is given
    twin        a call of the same signature without memory, of which the launch cache learns where addresses and numbers go
    parts       the flat form by name, for compiled code: each object that Dynamo traces would be a guard

What types do not say is in `Annotated`, see `arguments.Mark`. The functions that read a call are generated, as those of a
NamedTuple are: a cached call runs them each time.
"""

from __future__ import annotations

import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import forward_ad as _forward

from halfbyte.arguments import Mark, Without
from halfbyte.cpu.profiled import profiled
from halfbyte.formats import Format, kv_format, weight_format
from halfbyte.ops._library import can_bypass_on_cpu, define
from halfbyte.ops.launch_cache import PLAIN, Number, Signature, replay
from halfbyte.settings import as_set
from halfbyte.tensors import QuantTensor, weight_of
from halfbyte.transforms import no_memory

#: Bound once: attribute lookups dominate a cached call.
_Tensor, _compiler, _is_grad_enabled = torch.Tensor, torch.compiler, torch.is_grad_enabled
_types_and_shapes, _alignment = operator.attrgetter("dtype", "shape"), (16).__rmod__
CallT = TypeVar("CallT", bound=Any)
#: Levels that are torch code, or compiled loops.
_TORCH_CODE = ("cpu", "reference")
_SCALARS: dict[Any, str] = {torch.Tensor: "Tensor", bool: "bool", int: "int", float: "float", str: "str", Format: "str"}
_RESULTS = {None: "()", type(None): "()", torch.Tensor: "Tensor", list[torch.Tensor]: "Tensor[]"}


@dataclass(frozen=True)
class Argument:
    """One argument of the schema.

    path     where it comes from in a call: "keys.codes"
    encoded  Python that makes the argument of the field there, of a call `c`
    guard    Python ahead of that, where an object on the path may be None
    """

    name: str
    type: str
    path: str
    encoded: str
    guard: str
    kind: Any
    marks: frozenset[Any]
    default: Any

    @property
    def value(self) -> str:
        """Python that reads the argument from a call `c`."""
        return f"{self.guard}{self.encoded},"

    @property
    def raw(self) -> str:
        """Python that reads the field from a call `c`."""
        return f"{self.guard}c.{self.path}"

    @property
    def is_number(self) -> bool:
        """Whether kernels take it, whatever it is."""
        return Mark.COMPILED not in self.marks and (self.kind is float or (self.kind is int and self.type == "int?"))

    def schema(self, alias: str) -> str:
        """`Tensor(a!)? name`."""
        is_written = self.kind is torch.Tensor and self.marks & {Mark.WRITTEN, Mark.RESULT}
        return f"{self.type.replace('Tensor', f'Tensor({alias}!)') if is_written else self.type} {self.name}"


class _Flat(tuple[Any, ...]):
    """The arguments of an op, as compiled code passes them. Formats are names."""

    replayable = True


class Signatures:
    """Of unchecked calls.

    facts: reads options, formats and tensors of a call; differentiable: tensors that may want a gradient.
    """

    def __init__(
        self, name: str, facts: Callable[[Any], tuple[Any, ...]], differentiable: Callable[[Any], tuple[Any, ...]]
    ) -> None:
        self._name, self._facts, self._differentiable = name, facts, differentiable

    def of(self, call: Any) -> Signature | None:
        """The signature; None if the call cannot be launched like an earlier one, or the dispatcher must see it."""
        if _compiler.is_compiling() or _forward._current_level >= 0:
            return None
        try:
            if not call[0].is_cuda or not call.replayable or (_is_grad_enabled() and self._wants_gradient(call)):
                return None
            options, formats, tensors = self._facts(call)
        except (AttributeError, TypeError):
            return None  # an argument of another type, which the checks of the op name
        kinds = tuple(map(type, tensors))
        if kinds[0] is not _Tensor or not PLAIN.issuperset(kinds):
            return None
        try:
            tensors = [t for t in tensors if t is not None]
            addresses = [*map(_Tensor.data_ptr, tensors)]
        except RuntimeError as error:
            raise no_memory() from error
        # In C: a loop over tensors would take as long as the launch.
        memory = *map(_types_and_shapes, tensors), *map(_Tensor.stride, tensors), *map(_Tensor.get_device, tensors)
        key = (self._name, *as_set(), kinds, *options, *map(id, formats), *memory, *map(_alignment, addresses))
        return Signature(key, tensors, addresses, formats)

    def _wants_gradient(self, call: Any) -> bool:
        return any(t is not None and t.requires_grad for t in self._differentiable(call))


class Op(Generic[CallT]):
    """An op, called with one object, whose `replayable` says whether an unchecked call could be one launch like an earlier one."""

    def __init__(self, name: str, call: type[CallT]) -> None:
        self.name, self._names = name, dict[str, Any]()
        self.arguments: list[Argument] = []
        construction = self._construct(call, "c", "", frozenset(), "")
        arguments, names = self.arguments, ", ".join(one.name for one in self.arguments)
        #: From a call to the op's arguments, and back.
        self.flat: Callable[[CallT], tuple[Any, ...]] = self._read(one.value for one in arguments)
        self.call: Callable[..., CallT] = eval(f"lambda {names}: {construction}", self._names)
        facts = [one for one in arguments if Mark.RESULT not in one.marks]
        self.tensors: Callable[[CallT], tuple[Any, ...]] = self._read(_tensors_of(one) for one in facts)
        readers = (_options_of, _formats_of, _tensors_of)
        differentiable = self._read(_tensors_of(one) for one in facts if Mark.DIFFERENTIABLE in one.marks)
        self.signature = Signatures(name, self._read(f"({''.join(map(reader, facts))})," for reader in readers), differentiable).of
        flat = [("Tensor" in one.type, f"*c[{i}]," if "[]" in one.type else f"c[{i}],") for i, one in enumerate(arguments)]
        options, tensors = ("".join(text for is_tensor, text in flat if is_tensor is wanted) for wanted in (False, True))
        of_flat = self._read((f"({options}), (), ({tensors}),",))
        self._signature_of_flat = Signatures(f"{name} of parts", of_flat, lambda c: ()).of

    def register(self, run: Callable[..., Any], fake: Callable[[CallT], Any], replays: bool = False) -> None:
        """Register the op with torch.library, see `_library.define`.

        run: of a call, for every device; its annotated result is that of the schema. fake: its shape rule. replays: calls of
        compiled code are launched like earlier ones; `run` gets the signature by which to store the launch, too.
        """

        def replayed(*flat: Any) -> Any:
            signature = self._signature_of_flat(_Flat(flat))
            results = None if signature is None else replay(signature)
            if results is None:
                return run(self.call(*flat), signature)
            return results[0] if one_result else list(results)

        self._run, one_result = run, typing.get_type_hints(run)["return"] is torch.Tensor
        arguments = ", ".join(one.schema(f"a{i}") for i, one in enumerate(self.arguments))
        schema = f"{self.name}({arguments}) -> {_results_of(run)}"
        runs = replayed if replays else lambda *flat: run(self.call(*flat))
        self._op = define(schema, runs, lambda *flat: fake(self.call(*flat)))
        named = ", ".join(f"{one.name}=defaults[{i}]" for i, one in enumerate(self.arguments))
        names, defaults = ", ".join(one.name for one in self.arguments), [one.default for one in self.arguments]
        #: The op by names. Dynamo traces one call of it in a model with hundreds of layers: a loop over names takes seconds there.
        self._by_name: Callable[..., Any] = eval(f"lambda {named}, **others: op({names})", {"op": self._op, "defaults": defaults})

    def __call__(self, call: CallT) -> Any:
        """Through the dispatcher, but for torch code on a CPU where nothing there has anything to do: it would take longer."""
        if call.impl in _TORCH_CODE and can_bypass_on_cpu(*self.tensors(call)):
            return profiled(self.name, self._run, call)
        return self._op(*self.flat(call))

    # --------------------------------------------------------------------------------------------------- compiled code

    def parts(self, **fields: Any) -> dict[str, Any]:
        """The arguments that these fields of a call are, by name."""
        c: Any = SimpleNamespace(**fields)
        some = [one for one in self.arguments if one.path.split(".")[0] in fields]
        return dict(zip((one.name for one in some), self._read(one.value for one in some)(c), strict=True))

    def of_parts(self, parts: Mapping[str, Any]) -> Any:
        """The op of arguments by name; those left out have the defaults of their fields, those of other ops are ignored."""
        return self._by_name(**parts)

    # ----------------------------------------------------------------------------------------------------- launch cache

    def twin(self, call: CallT) -> CallT:
        """The same call on the meta device, each tensor with a storage of its own, and with a `Number` for each number."""
        values = zip(self.arguments, self.flat(call), strict=True)
        return self.call(*[Number.of(value) if one.is_number else _without_memory(value) for one, value in values])

    # ------------------------------------------------------------------------------------------------------- generation

    def _read(self, expressions: Any) -> Callable[[CallT], tuple[Any, ...]]:
        """A function from a call to a tuple of these."""
        function: Callable[[CallT], tuple[Any, ...]] = eval(f"lambda c: ({''.join(expressions)})", self._names)
        return function

    def _construct(self, kind: Any, path: str, prefix: str, marks: frozenset[Any], owner: str) -> str:
        """Python that makes an object of this kind from the arguments of its fields, which are added.

        owner: the object that this one is, or is part of, if that may be None.
        """
        self._names[kind.__name__], fields = kind, []
        missing = {mark.field for mark in marks if isinstance(mark, Without)}
        for field, hint in typing.get_type_hints(kind, include_extras=True).items():
            if field in missing:
                continue
            hint, own = _marked(hint)
            default = getattr(kind, "_field_defaults", vars(kind)).get(field)
            inner = marks - {Without(name) for name in missing} | own
            fields.append(f"{field}={self._field(hint, f'{path}.{field}', prefix + field, inner, owner, default)}")
        return f"{kind.__name__}({', '.join(fields)})"

    def _field(self, hint: Any, path: str, name: str, marks: frozenset[Any], owner: str, default: Any) -> str:
        """Python that makes a field from its arguments, which are added."""
        kind, optional = _optional(hint)
        kind = str if typing.get_origin(kind) is typing.Literal else kind
        guard = f"None if {owner} is None else " if owner else ""
        mark = "?" if optional or owner else ""

        def add(suffix: str, type: str, value: str, kind: Any = kind) -> str:
            self.arguments.append(Argument(name + suffix, type, path[2:], value, guard, kind, marks, default))
            return name + suffix

        if kind in _SCALARS:
            encoding = f"{path}.name" if kind is Format else path
            argument = add("", _SCALARS[kind] + mark, encoding)
            self._names["_kv_format"] = kv_format
            return f"_kv_format({argument})" if kind is Format else argument
        if kind is QuantTensor:
            self._names |= {"_weight_of": weight_of, "_weight_format": weight_format}
            parts = add("", "Tensor[]", f"[*{path}.parts().values()]")
            return f"_weight_of(_weight_format({add('_format', 'str', f'{path}.format.name', str)}), {parts})"
        if kind == Sequence[QuantTensor]:
            self._names["_weights"] = _weights
            parts = add("", "Tensor[]", f"[t for w in {path} for t in w.parts().values()]")
            counts = add("_counts", "int[]", f"[len(w.parts()) for w in {path}]", list[int])
            formats = add("_formats", "str", f"','.join([w.format.name for w in {path}])", str)
            return f"_weights({parts}, {counts}, {formats})"
        if kind == Sequence[torch.Tensor | None]:
            return add("", "Tensor?[]", f"[*{path}]")
        if kind == list[torch.Tensor]:
            return add("", "Tensor[]", path)
        first = len(self.arguments)
        construction = self._construct(kind, path, f"{name}_", marks, path if optional else owner)
        return f"None if {self.arguments[first].name} is None else {construction}" if optional else construction


def _marked(hint: Any) -> tuple[Any, frozenset[Any]]:
    return (hint.__origin__, frozenset(hint.__metadata__)) if typing.get_origin(hint) is typing.Annotated else (hint, frozenset())


def _optional(hint: Any) -> tuple[Any, bool]:
    """A type without None, and whether None is one of its values."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    assert len(kinds) == 1, f"{hint} is no field of a call"
    return kinds[0], True


def _results_of(run: Callable[..., Any]) -> str:
    """The results of a schema, from the annotation of its implementation."""
    hint = typing.get_type_hints(run)["return"]
    if typing.get_origin(hint) is tuple:
        return f"({', '.join(_RESULTS[kind] for kind in typing.get_args(hint))})"
    return _RESULTS[hint]


def _tensors_of(one: Argument) -> str:
    """Its tensors in a signature."""
    if one.kind is torch.Tensor:
        return f"{one.raw},"
    if one.kind in (Sequence[torch.Tensor | None], list[torch.Tensor]):
        return f"*{one.raw},"
    if one.kind == Sequence[QuantTensor]:
        return f"*[t for w in {one.raw} for t in (w.codes, w.scales, w.offsets, w.tensor_scale, w.nested, w.perm)],"
    return ""


def _formats_of(one: Argument) -> str:
    if one.kind == Sequence[QuantTensor]:
        return f"*[w.format for w in {one.raw}],"
    return f"{one.raw}," if one.kind is Format else ""


def _options_of(one: Argument) -> str:
    """What of it is part of the key."""
    if one.is_number:
        return f"({one.raw}) is None," if one.type.endswith("?") else ""
    return f"{one.raw}," if one.kind in (bool, int, float, str) and one.encoded == f"c.{one.path}" else ""


def _without_memory(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_memory(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _weights(parts: Sequence[torch.Tensor], counts: Sequence[int], formats: str) -> list[QuantTensor]:
    """Weights from the tensors of all, how many each has, and the names of their formats."""
    weights, first = [], 0
    for count, name in zip(counts, formats.split(","), strict=True):
        weights.append(weight_of(weight_format(name), parts[first : first + count]))
        first += count
    return weights

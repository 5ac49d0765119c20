"""Forward-mode gradients and torch.func: refused by name, where they used to be silently missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import halfbyte as hb
from halfbyte import engine
from halfbyte.nn import QuantLinear
from halfbyte.ops._library import can_bypass_dispatcher
from halfbyte.ops._linear_on_gpu import LINEAR
from halfbyte.reference.linear import LinearCall

Function = Callable[[torch.Tensor], torch.Tensor]


def cache() -> hb.KVCache:
    made = hb.KVCache(1, 2, 32, 64)
    made.append(torch.ones(1, 2, 5, 32), torch.ones(1, 2, 5, 32))
    return made


def functions() -> dict[str, tuple[Function, torch.Tensor]]:
    held = cache()
    weight, q, k = hb.quantize(torch.randn(32, 64), "int4_g32"), torch.randn(1, 4, 1, 32), torch.randn(1, 2, 1, 32)

    def append(k: torch.Tensor) -> torch.Tensor:
        made = cache()
        made.append(k, k)
        return made.dequantized()[0]

    keys, values = engine.PageLayout("int8", "int8", 32).buffers(torch.zeros(1, 2, 16, 68, dtype=torch.uint8))

    def append_slots(k: torch.Tensor, **options: object) -> torch.Tensor:
        rotated = engine.append_slots(k, k, keys, values, torch.tensor([3]), **options)  # type: ignore[arg-type]
        return keys.codes.float() if rotated is None else rotated

    def rotated(cos: torch.Tensor) -> torch.Tensor:
        made = hb.KVCache(1, 2, 32, 64)
        return made.append(k, k, rope=(cos, cos), q=q)

    def varlen(q: torch.Tensor, **options: object) -> torch.Tensor:
        return engine.attention_varlen(q, held, torch.tensor([0, 1], dtype=torch.int32), 1, **options)  # type: ignore[arg-type,return-value]

    experts = hb.quantize(torch.randn(4, 32, 64), "int4_g32")
    return {
        "quantize": (lambda x: hb.quantize(x, "int4_sym_g32_fp32").scales, torch.randn(32, 64)),  # type: ignore[dict-item]
        "experts": (lambda x: hb.experts_linear(x, experts, torch.tensor([[0], [1], [3]])), torch.randn(3, 64)),
        "varlen": (varlen, q[:, :, 0]),
        "exact varlen": (lambda k: varlen(q[:, :, 0], prefill="exact", k=k, v=k), k[:, :, 0]),
        "prefill": (lambda q: hb.prefill_attention(q, k, k, held), q),  # type: ignore[dict-item]
        "slots": (append_slots, k[:, :, 0]),
        "rope of q": (rotated, torch.ones(1, 16)),
        "rope of slots": (lambda cos: append_slots(k[:, :, 0], rope=(cos, cos), q=q[:, :, 0]), torch.ones(1, 16)),
        "sinks": (lambda sinks: hb.decode_attention(q, held, sinks=sinks), torch.ones(4)),  # type: ignore[dict-item]
        "linear": (lambda x: hb.linear(x, weight), torch.randn(3, 64)),
        "a bias": (lambda bias: hb.linear(torch.ones(3, 64), weight, bias), torch.randn(32)),
        "qkv": (lambda x: hb.qkv_projection(x, (weight, weight, weight))[1], torch.randn(3, 64)),
        "attention": (lambda q: hb.decode_attention(q, held), q),  # type: ignore[dict-item]
        "lse": (lambda q: hb.decode_attention(q, held, return_lse=True)[1], q),
        "append": (append, k),
    }


def dual(f: Function, x: torch.Tensor) -> torch.Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS: dict[str, Callable[[Function, torch.Tensor], object]] = {
    "dual": dual,
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "jacrev": lambda f, x: jacrev(f)(x),
    "grad": lambda f, x: grad(lambda t: f(t).sum())(x),
    "vmap": lambda f, x: vmap(f)(torch.stack([x, x])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", functions())
@pytest.mark.parametrize("no_grad", [False, True])
def test_no_gradient_is_silently_missing(name: str, transform: str, no_grad: bool) -> None:
    f, x = functions()[name]
    with torch.set_grad_enabled(not no_grad), pytest.raises(hb.HalfbyteError, match=r"torch\.func|tangent"):
        TRANSFORMS[transform](f, x)


#: What changes memory in place, and what makes codes: their results have no gradient, which torch itself says in backward.
DATA = ("append", "slots", "quantize")


@pytest.mark.parametrize("name", functions())
def test_reverse_mode_is_refused_too(name: str) -> None:
    f, x = functions()[name]
    if name in DATA:
        assert not f(x.requires_grad_()).requires_grad
        return
    with pytest.raises(hb.HalfbyteError, match="no gradient"):
        f(x.requires_grad_()).sum().backward()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_layer_has_gradients_of_autograd_alone(transform: str) -> None:
    layer, x = QuantLinear(hb.quantize(torch.randn(32, 64), "int4_g32")), torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.weight.dequantize().sum(0).expand(3, -1), atol=1e-5)  # type: ignore[arg-type]
    with pytest.raises(hb.HalfbyteError, match=r"torch\.func|tangent"):
        TRANSFORMS[transform](layer, x)


def test_states_are_merged_inside_of_a_transform() -> None:
    """It is torch code on a CPU."""
    outs, lses = torch.randn(2, 1, 2, 3, 8), torch.randn(2, 5, 1, 2, 3)
    batched = vmap(lambda a, b: hb.merge_states([*outs], [a, b])[0])(*lses)
    assert torch.equal(batched, torch.stack([hb.merge_states([*outs], [a, b])[0] for a, b in lses.unbind(1)]))


def test_calls_without_a_tangent_are_not_refused() -> None:
    with forward_ad.dual_level():
        for f, x in functions().values():
            f(x)
    for f, x in functions().values():
        f(x)


def test_a_graphics_processor_is_not_launched_past_a_tangent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.randn(3)
    assert can_bypass_dispatcher(x, None)
    with forward_ad.dual_level():
        assert not can_bypass_dispatcher(forward_ad.make_dual(x, x))
    monkeypatch.undo()

    def signed(x: torch.Tensor) -> torch.Tensor:
        LINEAR.signature(LinearCall(x, [], []))
        return x

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(hb.HalfbyteError, match="no memory of its own"):
        vmap(signed)(torch.randn(2, 3))

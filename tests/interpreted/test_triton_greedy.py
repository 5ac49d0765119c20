"""The greedy choice of tokens, interpreted, against torch."""

from __future__ import annotations

import pytest
import torch

from halfbyte.errors import InvalidArgument
from halfbyte.ops.block import greedy
from halfbyte.reference.greedy import Ends, Held

#: Columns of a program of the kernel, and numbers of them around it.
BLOCK = 4096
WIDTHS = (1, 77, BLOCK, BLOCK + 1, 3 * BLOCK + 50)
NAN, INF = torch.nan, torch.inf


def held(batch: int, columns: int = 12, dtype: torch.dtype = torch.int64) -> Held:
    """Sequences of 3, 4, ... tokens, of which every third has ended."""
    lengths = 3 + torch.arange(batch)[:, None]
    ids = torch.arange(batch * columns).view(batch, columns).to(dtype)
    return Held(ids, torch.full((batch, 1), -1), lengths, torch.arange(batch) % 3 != 1)


def ends(*tokens: int, refused: bool = False) -> Ends:
    return Ends(torch.tensor(tokens), torch.tensor(5), refused)


def both(logits: torch.Tensor, ends: Ends | None = None, **given: torch.dtype) -> Held:
    """What the kernel makes of a batch; torch makes the same."""
    found, expected = held(len(logits), **given), held(len(logits), **given)
    greedy(logits, found, ends, impl="triton")
    greedy(logits, expected, ends, impl="reference")
    for name, a, b in zip(Held._fields, found, expected, strict=True):
        assert torch.equal(a, b), name
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_of_a_row(width: int, dtype: torch.dtype) -> None:
    """Values that occur once, and many that are equal, in every block; negative ones alone, too."""
    rng = torch.Generator().manual_seed(width)
    distinct, few = torch.randn(4, width, generator=rng), torch.randint(-2, 3, (4, width), generator=rng).float()
    for logits in (distinct, few, -few.abs() - 1):
        found = both(logits.to(dtype))
        assert torch.equal(found.last[:, 0], logits.to(dtype).float().argmax(-1))


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ((0.0, -0.0, -1.0), 0),
        ((-0.0, 0.0, -1.0), 0),
        ((-INF, -INF, -INF), 0),
        ((1.0, INF, INF), 1),
        ((INF, -NAN, NAN), 1),
        ((NAN, INF, NAN), 0),
        ((-1e-45, -1e-40, -1.0), 0),
        ((-3e38, -1.0, -2.0), 1),
    ],
)
@pytest.mark.parametrize("apart", [1, BLOCK])
def test_ties_zeros_infinities_and_nan(values: tuple[float, ...], column: int, apart: int) -> None:
    logits = torch.full((1, 2 * apart + 1), -INF)
    logits[0, ::apart] = torch.tensor(values)
    assert both(logits).last.item() == column * apart


@pytest.mark.parametrize("tokens", [(7,), (7, 2, 99, 10**6)])
def test_sequences_end(tokens: tuple[int, ...]) -> None:
    """At the first of `tokens`; finished ones are given padding, even where that ends a sequence."""
    logits = torch.zeros(4, 100)
    logits[0, 7], logits[1, 7], logits[2, 8], logits[3, 7] = 1, 1, 1, 1
    found = both(logits, ends(*tokens))
    assert found.last.flatten().tolist() == [7, 5, 8, 7]
    assert found.unfinished.tolist() == [False, False, True, False]
    assert found.lengths.flatten().tolist() == [4, 4, 6, 7]
    both(logits, ends(5))


def test_refused_tokens_are_not_chosen() -> None:
    """Not even where they are NaN; where nothing else is there, the first column is."""
    logits = torch.randn(3, BLOCK + 9, generator=torch.Generator().manual_seed(0))
    logits[0, 7], logits[1, BLOCK + 2], logits[2] = NAN, 100.0, -INF
    found = both(logits, ends(7, BLOCK + 2, 10**6, refused=True))
    assert found.last[0].item() not in (7, BLOCK + 2)
    assert found.unfinished.tolist() == [True, False, True]


def test_rows_with_gaps_and_int32_ids() -> None:
    wide = torch.randn(3, 2, 2 * BLOCK, generator=torch.Generator().manual_seed(1))
    both(wide[:, -1], dtype=torch.int32)
    both(wide[:, -1, ::2])


def test_a_full_row_of_ids_stays_as_it_is() -> None:
    """The length grows on; nothing beyond the row is written, nor before one of a negative length."""
    memory = torch.full((2, 8), -7)
    found = Held(memory[:, :4], torch.zeros(2, 1, dtype=torch.long), torch.tensor([[4], [-1]]), torch.ones(2, dtype=torch.bool))
    greedy(torch.eye(2), found, impl="triton")
    assert memory.eq(-7).all()
    assert found.last.flatten().tolist() == [0, 1]
    assert found.lengths.flatten().tolist() == [5, 0]


def test_what_is_refused() -> None:
    logits, good = torch.zeros(2, 5), held(2)
    greedy(torch.zeros(0, 5), held(0))
    for bad, name in (
        ((logits.long(), good, None), "logits"),
        ((logits[0], good, None), "logits"),
        ((logits[:, :0], good, None), "logits"),
        ((logits, held(3), None), "held.ids"),
        ((logits, good._replace(last=good.last[:, 0]), None), "held.last"),
        ((logits, good._replace(lengths=good.lengths.float()), None), "held.lengths"),
        ((logits, good._replace(unfinished=good.unfinished.long()), None), "held.unfinished"),
        ((logits, good, ends(1)._replace(tokens=torch.tensor(1))), "ends.tokens"),
        ((logits, good, ends(1)._replace(padding=torch.tensor([1]))), "ends.padding"),
    ):
        with pytest.raises(InvalidArgument, match=name):
            greedy(*bad)

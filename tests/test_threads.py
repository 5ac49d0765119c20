"""Threads that call torch: each runs torch's operators by itself, so that none waits for another one's threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from halfbyte import threads
from halfbyte.formats import EVERY_WEIGHT_FORMAT
from halfbyte.reference.quantize import quantize


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def no_function() -> Callable[[int], None] | None:
    """As for a torch whose threads are of another kind."""
    return None


@pytest.mark.usefixtures("three_threads")
def test_pieces_run_on_threads_that_have_no_others() -> None:
    met = threading.Barrier(3, timeout=60)

    def of(piece: int) -> tuple[int, int, str]:
        if piece < 3:
            met.wait()  # three threads at once, or an error
        nested = threads.each(lambda i: threading.get_ident(), range(4))
        assert set(nested) == {threading.get_ident()}  # no more than that
        return piece, torch.get_num_threads(), threading.current_thread().name

    for _ in range(2):  # the second time on threads that are there
        found = threads.each(of, range(20))
        assert [(piece, count) for piece, count, _ in found] == [(i, 1) for i in range(20)]
        assert sum(name.startswith("halfbyte") for name in {name for *_, name in found}) == 2
        assert torch.get_num_threads() == 3
        met.reset()


@pytest.mark.usefixtures("three_threads")
def test_alone_is_about_the_calling_thread() -> None:
    seen: list[int] = []
    with threads.alone():
        assert torch.get_num_threads() == 1
        others = [threading.Thread(target=lambda: seen.append(torch.get_num_threads())) for _ in range(2)]
        for thread in others:
            thread.start()
            thread.join()
        met = threading.Barrier(3, timeout=60)
        assert len({*threads.each(lambda i: (met.wait(), threading.get_ident())[1], range(3))}) == 3  # which `each` may have
    assert seen == [3, 3]
    with pytest.raises(ValueError, match="inside"), threads.alone():
        raise ValueError("inside")
    assert torch.get_num_threads() == 3
    assert threads.each(len, []) == []


@pytest.mark.usefixtures("three_threads")
def test_an_error_in_a_piece_is_raised() -> None:
    def of(piece: int) -> int:
        if piece == 7:
            raise ValueError("the eighth")
        return piece

    with pytest.raises(ValueError, match="the eighth"):
        threads.each(of, range(9))
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("clip", [None, "search"])
@pytest.mark.parametrize("name", EVERY_WEIGHT_FORMAT)
def test_weights_have_the_same_bits_on_any_number_of_threads(name: str, clip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = EVERY_WEIGHT_FORMAT[name]
    x = torch.randn(3, 22, 256, generator=torch.Generator().manual_seed(5)).mul_(torch.linspace(0.1, 9, 22)[:, None])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # on this thread
    whole = quantize(x, fmt, clip=clip).parts()
    monkeypatch.undo()
    monkeypatch.setattr("halfbyte.reference.quantize.AT_ONCE_ON_CPU", 5 * 256)  # with pieces of two matrices
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for given in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
                own = quantize(given, fmt, clip=clip).parts()
                assert all(torch.equal(whole[part], own[part]) for part in whole)
            with monkeypatch.context() as without, torch.inference_mode():
                without.setattr(threads, "_set_threads", no_function)
                own = quantize(x, fmt, clip=clip).parts()
                assert all(torch.equal(whole[part], own[part]) for part in whole)
    finally:
        torch.set_num_threads(before)

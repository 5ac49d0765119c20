"""Full disks, cut writes, failing disks, kills: a file is the old one or the new one, and the next run leaves no trace of them."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from writers import WRITERS, files, finished, killed

from halfbyte.paths import new_folder, write_whole


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, bytes]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in WRITERS}
    return lambda name: finished(name, folders[name])


def check_unfinished(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """Files are whole, or the first lines of those that are written line by line."""
    for name, content in found.items():
        assert name in expected, f"{name} is left"
        assert content == expected[name] or name == "plans.json" or (name.endswith(".jsonl") and content[-1:] in (b"", b"\n")), name


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.7, 0.99])
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk(name: str, share: float, tmp_path: Path, whole: Any) -> None:
    """A limit on the size of files cuts writes short, in whatever language they are made, and then refuses more."""
    expected = whole(name)
    limit, before = int(share * max(map(len, expected.values()))), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match=r"written|large") as raised:
            WRITERS[name](tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(raised.value)
    check_unfinished(files(tmp_path), expected)
    WRITERS[name](tmp_path)
    assert files(tmp_path) == expected


def caught(write: Callable[[Path], None], folder: Path) -> OSError | None:
    try:
        write(folder)
    except OSError as error:
        return error
    return None


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["fsync", "replace", "rename"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_fails(name: str, call: str, code: int, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third call of its kind fails, so something may have been written; or the first, if there are fewer."""
    expected, calls, real = whole(name), [0], getattr(os, call)

    def fails(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] in turns:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    for turns in ({3}, {1}):
        monkeypatch.setattr(os, call, fails)
        calls[0] = 0
        raised = caught(WRITERS[name], tmp_path)
        assert calls[0] or call != "fsync" or turns == {1}, "nothing was brought to the disk"
        if turns & set(range(calls[0] + 1)):
            assert raised is not None, "the error was swallowed"
            assert raised.errno == code
            assert str(tmp_path) in str(raised)
        monkeypatch.undo()
        check_unfinished(files(tmp_path), expected)
    WRITERS[name](tmp_path)
    assert files(tmp_path) == expected


def test_what_a_kill_leaves_goes_with_the_next_write(tmp_path: Path) -> None:
    def stuck() -> None:
        with new_folder(tmp_path / "model") as folder:
            (folder / "half").write_text("x")
            time.sleep(600)

    assert killed(stuck, lambda: any(tmp_path.glob(".model.*/model/half")))
    assert [p.name[:7] for p in tmp_path.iterdir()] == [".model."]
    with new_folder(tmp_path / "model") as folder:
        (folder / "whole").write_text("x")
    assert files(tmp_path) == {"model/whole": b"x"}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_another_writer_at_work_is_left_alone(tmp_path: Path) -> None:
    """Also one of a name that begins alike, and one whose name holds wildcards."""
    with new_folder(tmp_path / "a[*]") as one:
        (one / "x").write_text("first")
        write_whole(tmp_path / "a[*]", "x")
        write_whole(tmp_path / "a", "x")
        (tmp_path / "a[*]").unlink()
        assert (one / "x").exists()
    assert files(tmp_path) == {"a[*]/x": b"first", "a": b"x"}

"""The file of measured plans that `halfbyte tune` adds to, while other processes may add to it too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from halfbyte.device import Device
from halfbyte.errors import InvalidArgument
from halfbyte.plans.decode_attention import DecodeProblem
from halfbyte.plans.tuning_cache import DamagedPlans, Entry, LinearProblem, Table, check_gpu, key_of, read, write


class Store:
    """The file that entries go to, each at once, beside those that it holds of the same GPU; other processes may write to it too.

    `anew`: whether a file that is no table of this GPU is replaced, else refused.
    """

    def __init__(self, file: Path, table: Table, anew: bool = False) -> None:
        self.file, self.table, self._anew = file, table, anew

    @staticmethod
    def open(file: Path, device: Device, versions: dict[str, str], anew: bool) -> Store:
        """A file that is not there yet, or holds a table of this GPU."""
        store = Store(file, Table(device.name, device.sm_count or 1, {}, versions | {"driver": device.driver}), anew)
        store.table = replace(store.table, entries=store._stored())
        return store

    def add(self, problem: LinearProblem | DecodeProblem, entry: Entry) -> None:
        """Store an entry in place of an older one of the same problem, and keep what others have stored since."""
        with _alone_with(self.file):
            self.table = replace(self.table, entries={**self.table.entries, **self._stored(), key_of(problem): entry})
            write(self.file, self.table)

    def _stored(self) -> Mapping[str, Entry]:
        """What the file holds now. Raises `InvalidArgument` for one that is to be kept and cannot be added to."""
        if not self.file.exists():
            return {}
        try:
            table = read(self.file)
            check_gpu(table, self.table.gpu, self.table.num_sms, str(self.file))
        except DamagedPlans as error:
            if not self._anew:
                raise InvalidArgument(f"output={str(self.file)!r} is kept as it is: {error}; name another file") from error
            return {}
        return table.entries


@contextlib.contextmanager
def _alone_with(file: Path) -> Iterator[None]:
    """No other process that asks for the same file is in such a block at the same time."""
    import fcntl  # POSIX has it, and every system with a GPU that this runs on; --dry-run does not come here

    file.parent.mkdir(parents=True, exist_ok=True)
    # A file beside it: the table itself is another file after every write.
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: what was measured is stored all the same
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield

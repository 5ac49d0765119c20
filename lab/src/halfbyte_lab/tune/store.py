"""Where measured plans are stored: the files that `halfbyte.plans.tuning_cache` reads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from halfbyte.errors import InvalidArgument
from halfbyte.paths import write_whole
from halfbyte.plans.linear_spec import LinearProblem
from halfbyte.plans.tuning_cache import VERSION, DamagedPlans, Table, TunedEntry, check_gpu, key_of, read


def write(file: Path, table: Table) -> None:
    """Store a table, one entry a line, in place of what was there: at once, so that a kill leaves the old file or the new one."""
    lines = [json.dumps(_plain(key, entry), sort_keys=True) for key, entry in sorted(table.entries.items())]
    head = {"halfbyte plans": VERSION, "gpu": table.gpu, "multiprocessors": table.num_sms, "made with": dict(table.made_with)}
    text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "entries": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
    write_whole(file, text)


def _plain(key: str, entry: TunedEntry) -> dict[str, Any]:
    choice = None if entry.choice is None else asdict(entry.choice)
    times = {"us": round(1e6 * entry.seconds, 3), "analytic us": round(1e6 * entry.analytic_seconds, 3)}
    return {"problem": json.loads(key), "choice": choice, **times, "date": entry.date}


@dataclass(frozen=True)
class Store:
    """The file that measured plans go to, each at once, behind those that it holds; other processes may add to it too.

    head  the table without its entries; anew: whether a file that is no table of this GPU is replaced, else refused
    """

    file: Path
    head: Table
    anew: bool = False

    def entries(self) -> Mapping[str, TunedEntry]:
        """What the file holds now. Raises `InvalidArgument` for one that is to be kept and cannot be added to."""
        if not self.file.exists():
            return {}
        try:
            table = read(self.file)
            check_gpu(table, self.head.gpu, self.head.num_sms, str(self.file))
        except DamagedPlans as error:
            if not self.anew:
                raise InvalidArgument(f"output={str(self.file)!r} is kept as it is: {error}; name another file") from error
            return {}
        return table.entries

    def add(self, problem: LinearProblem, entry: TunedEntry) -> None:
        """Store an entry in place of an older one of the same problem."""
        import fcntl  # POSIX has it, and every system with a GPU that this runs on

        self.file.parent.mkdir(parents=True, exist_ok=True)
        # The lock lies in a file of its own: the table is another file after every write.
        with self.file.with_name(f".{self.file.name}.lock").open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: what was measured is stored all the same
                fcntl.flock(lock, fcntl.LOCK_EX)
            write(self.file, replace(self.head, entries={**self.entries(), key_of(problem): entry}))

"""The suite with other versions of Python, torch, transformers and Triton: `make versions`, or `versions.py [CORNER ...]`.

A corner has a virtual environment of its own and a record in results/trust.jsonl. CI runs what constraints.txt pins, with pinned
seeds; the others are for a nightly job, with seeds that their records name. torch's CUDA builds are several GB, and a corner whose
Python is not on this machine is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOOLS = ("matplotlib", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "ruff>=0.9", "mypy>=1.14")
#: Folders of this machine, in what a test says.
FOLDERS = re.compile(r"(?:/[\w.+-]+)+/")
#: What torch warns of on the first patch release of Python 3.13, and Triton 3.9 of a default that 3.10 will change; another warning
#: fails a test.
WARNINGS = ("Guards may run slower on Python 3.13.0:RuntimeWarning", "TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
#: What a record of a corner holds of it, printed by the corner's own Python.
ENVIRONMENT = """
import json, transformers
from dataclasses import asdict
from halfbyte.device import describe
from halfbyte_lab.measure.environment import environment
made = asdict(environment(describe("cpu"), 1))
made["versions"]["transformers"] = transformers.__version__
print(json.dumps(made))
"""


@dataclass(frozen=True)
class Corner:
    """Versions that go together; `when` says who runs them."""

    python: str
    torch: str
    transformers: str
    triton: str
    when: str = "nightly"


CORNERS = {
    "pinned": Corner("3.11", "2.13.0", "5.23.0", "3.7.1", "CI"),
    "oldest": Corner("3.13", "2.11.0", "5.18.0", "3.6.0"),
    "old": Corner("3.12", "2.12.0", "5.20.0", "3.7.0"),
    "new": Corner("3.13", "2.14.1", "5.22.0", "3.8.0"),
    "newest": Corner("3.14", "2.15.0", "5.24.0", "3.9.0"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corners", nargs="*", metavar="CORNER", help=f"default: those of the nightly job ({', '.join(CORNERS)})")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what to run; default: the whole suite but the GPU's")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-versions", help="where the environments are")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 2**31), help="of what tests draw")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "trust.jsonl")
    given = parser.parse_args()
    if unknown := set(given.corners) - set(CORNERS):
        parser.error(f"no corner is called {', '.join(sorted(unknown))}; there are: {', '.join(CORNERS)}")
    failed = False
    for name in given.corners or [name for name, corner in CORNERS.items() if corner.when == "nightly"]:
        corner = CORNERS[name]
        python = shutil.which(f"python{corner.python}")
        if python is None:
            print(f"{name}: not run, there is no python{corner.python} here")
            continue
        record = tried(name, installed(corner, python, given.folder / name), given.tests, given.seed)
        with given.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{name}: {record['count']} passed, {len(record['failures'])} failed in {record['seconds']} s")
        failed |= bool(record["failures"])
    return int(failed)


def installed(corner: Corner, python: str, folder: Path) -> Path:
    """The Python of an environment with a corner's packages; halfbyte itself is read from src/."""
    made = folder / "bin" / "python"
    if not made.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    pins = (f"torch=={corner.torch}", f"transformers=={corner.transformers}", f"triton=={corner.triton}")
    needed = ("numpy>=1.26", "safetensors>=0.6", "rich>=13", "typer>=0.15", *TOOLS)
    pip = [made, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *pins, *needed], check=True)
    subprocess.run([*pip, "--no-deps", "-e", ROOT], check=True)  # for the versions that it declares
    return made


def tried(name: str, python: Path, tests: list[str], seed: int) -> dict[str, Any]:
    """A record of these tests with this Python, which draw from `seed`."""
    start, path = time.monotonic(), os.pathsep.join(str(ROOT / part) for part in ("src", "lab/src", ""))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HALFBYTE_SEED": str(seed)}
    made = subprocess.run(
        [python, "-W", "ignore", "-c", ENVIRONMENT], cwd=ROOT, env=env, check=True, capture_output=True, text=True
    )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(option for warning in WARNINGS for option in ("-W", f"ignore:{warning}")),
            f"--junitxml={report}",
            f"--hypothesis-seed={seed}",
            *tests,
        ]
        status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        passed, failures = outcome(report) if report.exists() else (0, [])
    if status and not failures:
        failures = [{"test": "", "error": f"pytest ended with status {status}"}]
    return {
        "row": f"versions: {name}",
        "tests": tests,
        "seed": seed,
        "count": passed,
        "failures": failures,
        "seconds": round(time.monotonic() - start, 1),
        "version": json.loads(made.stdout.splitlines()[-1])["versions"]["halfbyte"],
        "environment": json.loads(made.stdout.splitlines()[-1]),
    }


def outcome(report: Path) -> tuple[int, list[dict[str, str]]]:
    """How many tests of a JUnit report passed, and which failed."""
    passed, failures = 0, []
    for case in ET.parse(report).iter("testcase"):
        wrong = [part for part in case if part.tag in ("failure", "error")]
        passed += not wrong and case.find("skipped") is None
        failures += [
            {"test": f"{case.get('classname')}::{case.get('name')}", "error": FOLDERS.sub("", w.get("message") or "")[:300]}
            for w in wrong[:1]
        ]
    return passed, failures


if __name__ == "__main__":
    sys.exit(main())

"""Every seeded fault."""

from __future__ import annotations

from pathlib import Path

from mutant import faults

MUTANTS = [mutant for file in sorted(Path(__file__).parent.glob("faults_*.txt")) for mutant in faults(file.read_text())]

"""Every seeded fault."""

from __future__ import annotations

from faults_blocks import BLOCK
from faults_experts import EXPERTS
from faults_files import FILE_FAULTS
from faults_linear import LINEAR
from faults_numerics import NUMERICS
from faults_state import STATE

MUTANTS = [*NUMERICS, *STATE, *LINEAR, *EXPERTS, *BLOCK, *FILE_FAULTS]

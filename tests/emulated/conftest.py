"""Tuned kernels without a GPU: what Triton compiles for one runs on the CPU (machine/). A process of its own: see `make test`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HALFBYTE_GPU_TESTS"] = "dry"  # cases of the GPU's suite, on the CPU
sys.path.insert(1, str(Path(__file__).parents[1] / "gpu"))

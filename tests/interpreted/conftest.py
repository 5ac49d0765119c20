"""Kernels in Triton's interpreter, on a CPU. It has to be asked for before triton is imported, so these tests run by themselves."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

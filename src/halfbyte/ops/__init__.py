"""The public functions, one file an op: check, choose a level, allocate, run."""

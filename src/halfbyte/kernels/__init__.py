"""Device code: one file, one kernel and its `launch()`. Nothing here allocates, validates or chooses; `halfbyte.ops` does."""

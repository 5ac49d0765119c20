"""Attention over a packed KV cache."""

"""Quantize-and-append of new keys and values."""

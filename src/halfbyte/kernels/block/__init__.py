"""The small launches of a decoder block: sums and norms at its borders, the activation between its projections."""

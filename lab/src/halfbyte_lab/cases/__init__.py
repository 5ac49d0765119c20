"""What is measured: cases with targets, layers, ranks, and figures from the literature."""

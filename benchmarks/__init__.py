"""Studies, targets, baselines and figures from the literature. Run from a checkout: `python -m benchmarks`."""

"""The search for GEMM plans that are faster than the analytic ones."""

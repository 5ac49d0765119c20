"""GEMMs with quantised weights."""

"""Every variant of every kernel that ships, as launches on tensors without memory: what `make compile-check` compiles."""

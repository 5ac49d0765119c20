"""The specification, in plain torch, written to be read. Every other level of an op is tested against it."""

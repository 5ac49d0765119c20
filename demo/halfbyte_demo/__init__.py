"""A byte-level Llama of 5.6 million parameters, in the folder `tiny`. `halfbyte.paths.shipped_model()` finds it."""

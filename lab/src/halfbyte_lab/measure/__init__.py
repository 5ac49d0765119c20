"""Measuring: timing, the roofline of the memory, accuracy checks before any figure, records, and one file per benchmark."""

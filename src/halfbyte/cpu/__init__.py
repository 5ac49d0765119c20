"""The level that runs anywhere: blocked plain torch, on any device, with the reference's meaning."""

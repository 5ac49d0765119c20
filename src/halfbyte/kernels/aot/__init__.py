"""Every kernel compiled ahead of its first launch, without a GPU. Nothing here is imported at run time."""

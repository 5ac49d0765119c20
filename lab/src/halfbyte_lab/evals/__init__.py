"""The demo, its playground, pages of evaluations, and variants of the shipped model with outliers."""

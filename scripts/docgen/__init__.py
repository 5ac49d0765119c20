"""What the documentation takes from records, formats and signatures: every generated table, chart and figure."""

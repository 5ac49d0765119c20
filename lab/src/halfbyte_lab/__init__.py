"""The laboratory of halfbyte: measuring, studies, baselines, pages, tuning and the demo. halfbyte imports nothing of it."""

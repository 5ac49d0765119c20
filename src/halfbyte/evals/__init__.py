"""Quality: perplexity, KL divergence and agreement of a quantized model with its 16-bit run."""

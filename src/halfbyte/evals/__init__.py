"""What the bits cost: perplexity, KL divergence and agreement of a quantized model with its 16-bit self."""

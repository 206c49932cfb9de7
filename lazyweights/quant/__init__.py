"""Other weights for the same model: quantizers and importers, and the writing of GGUF files with tensors replaced."""

"""Quantizers of this package and what steers them.

- `rate_control`: which global step meets a budget of perplexity or of bytes.
"""

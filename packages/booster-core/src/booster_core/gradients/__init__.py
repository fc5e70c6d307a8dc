"""Norms and clipping of gradients that may be spread over ranks."""

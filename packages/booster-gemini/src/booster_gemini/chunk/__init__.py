"""Parameters in chunks: what one is, which there are, and when each is here as a whole."""

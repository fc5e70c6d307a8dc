"""Where chunks are and when they move, decided from a recorded step; pure functions without ranks or tensors."""

"""Booster: one call makes a PyTorch training script distributed; the strategy is a plugin."""

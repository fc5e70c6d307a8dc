"""Layers split over ranks: local tensors, explicit differentiable collectives, and the policy's rules applied to a model."""

"""Layers split over ranks: local tensors, explicit collectives, and a policy's rules applied to a model."""

"""Proposing a sharding policy for a model of one's own, from what one forward computes."""

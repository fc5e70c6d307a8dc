"""Mutation testing: plant one small fault at a time in a module of arithmetic, and see which ones its tests miss."""

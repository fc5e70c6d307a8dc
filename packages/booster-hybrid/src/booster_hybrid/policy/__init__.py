"""Sharding as data: for a model class, which modules are split how, and where its pipeline may be cut."""

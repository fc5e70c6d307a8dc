"""Which part of which tensor of the user's model lies on this rank: shards, and the adapters that list them."""

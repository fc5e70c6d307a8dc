"""Finding out before training whether split layers compute what the whole ones do."""

"""Names that have moved to distributions of their own."""

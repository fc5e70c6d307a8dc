"""The kinds of files: how each is laid out, written and read, and the names of a checkpoint's files."""

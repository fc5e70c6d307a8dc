"""Other libraries' training loops under any plugin; each sub-package is for one library, which is an extra."""

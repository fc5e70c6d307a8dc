"""How a load goes: finding the files, comparing them with the model, reading each rank's ranges."""

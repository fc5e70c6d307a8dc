"""Where chunks are: on the device, in the host's memory, on a disk; and the copies between these."""

"""The engine of ZeRO, which Gemini and hybrid parallelism share: buckets, their layout, reduction, steps and state."""

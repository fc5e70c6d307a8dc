"""Pictures of what lay where during a step, drawn from the records of a run."""

"""Pictures of where everything was during a step, drawn from the records of a run."""

"""Pictures of what pipelines did, drawn from the records of their ranks."""

"""Pictures of any run."""

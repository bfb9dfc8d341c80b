"""Pictures that any run can have."""

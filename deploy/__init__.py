"""Scripts for real deployments; ``docs/deployment.md`` goes through them."""

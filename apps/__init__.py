"""The Flower app: reads the config, builds, starts."""

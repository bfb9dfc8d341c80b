"""Federated learning on graphs whose clients are tiny, as strategies and clients for Flower."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout `strategies`, `apps` and `conf` lie beside this package; a wheel installs them
# inside it. Looking in the parent folder too makes `flower_graph.strategies` the one name for both.
__path__.append(str(Path(__file__).resolve().parent.parent))

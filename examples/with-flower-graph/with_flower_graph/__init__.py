"""with-flower-graph: A Flower / PyTorch app."""

try:
    import flower_graph  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "flower-graph is not installed where this app runs, which is where its SuperLink was "
        "started: see the first lines of the app's README.md"
    ) from error

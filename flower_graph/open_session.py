"""What every server's talk with its clients begins with: a grid that comes when the run starts."""

from __future__ import annotations

from flwr.serverapp import Grid

from flower_graph.exchange import Exchange


class OpenSession:
    """A session that has no exchange until it is given a grid."""

    def __init__(self) -> None:
        self.timeout, self.rounds = 600.0, 0
        self._exchange: Exchange | None = None

    @property
    def exchange(self) -> Exchange:
        """The exchange, once the session is open."""
        assert self._exchange is not None
        return self._exchange

    @property
    def is_open(self) -> bool:
        """Whether the session has a grid."""
        return self._exchange is not None

    def open(self, grid: Grid, timeout: float, rounds: int = 0) -> None:
        """Take a grid, the seconds that an exchange may take, and the rounds if they are known."""
        self._exchange, self.timeout, self.rounds = Exchange(grid), timeout, rounds

"""What a SuperNode with a key of its own accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flower_graph.errors import RefusedError

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.client import NumPyClient

KEYS = ("identity-key", "registry")  # node config, as `TrustSettings` reads it


def refuse_less(client: NumPyClient, context: Context) -> None:
    """Refuse to work where the node config has a key and the client trusts the server all the same.

    Parameters
    ----------
    client : NumPyClient
        Made for the message; one that does not trust the server has ``trust``, a `TrustSettings`.
    context : Context
        Its node config decides. The run's config has no say, as the server may have written it.

    Raises
    ------
    RefusedError
        Before the client has seen the message.
    """
    if any(key in context.node_config for key in KEYS) and getattr(client, "trust", None) is None:
        raise RefusedError(
            "this SuperNode has a key of its own (identity-key) and takes part in no run whose "
            "clients trust the server, as this one's do"
        )

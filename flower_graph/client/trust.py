"""What a SuperNode with a key of its own accepts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flower_graph.errors import RefusedError

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.client import NumPyClient

LOG = logging.getLogger(__name__)
KEYS = ("identity-key", "registry", "block-cap")  # node config, as `TrustSettings` reads it


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
    given = [key for key in context.node_config if key in KEYS or key.startswith("trust-")]
    if not given or getattr(client, "trust", None) is not None:
        return
    from flower_graph.secure.identity import TrustSettings  # loads cryptography

    try:
        TrustSettings.of(context.node_config)
    except ValueError as error:
        # For whoever started the SuperNode: the server is told no path.
        LOG.error("%s", error)
        raise RefusedError(
            "this SuperNode has a key of its own, or should have: its node config's "
            f"{', '.join(given)} cannot be used; its own log says why"
        ) from None
    raise RefusedError(
        "this SuperNode has a key of its own (identity-key) and takes part in no run whose "
        "clients trust the server, as this one's do"
    )

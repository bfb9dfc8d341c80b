"""A Flower mod for machines whose clocks disagree."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable


def servers_time(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Have a reply expire when its message does, by the clock of the server that sent it.

    Flower works out how long a reply is valid from the message's time, which is the server's, and
    from the client's own. A client whose clock is ahead by more than the message's lifetime would
    answer with what has expired already, and the SuperLink would drop it.

    Parameters
    ----------
    message, context, call_next : Message, Context, callable
        As Flower gives them to a mod.

    Returns
    -------
    Message
        The reply, dated as the message was and valid for as long.
    """
    reply = call_next(message, context)
    asked = message.metadata
    reply.metadata.created_at, reply.metadata.ttl = asked.created_at, asked.ttl
    return reply

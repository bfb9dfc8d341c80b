"""From saved weights to the module that they are of."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torch import nn

from flower_graph.errors import OutputError

if TYPE_CHECKING:
    from flower_graph.outputs.files import SavedModels


def build_module(saved: SavedModels, client: int | None = None) -> nn.Module:
    """Build one client's model, in evaluation mode; with one client, or one model, that is it."""
    client = saved.clients[0] if client is None else client
    place, _, name = saved.module.rpartition(".")
    try:
        kind = getattr(import_module(place), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise OutputError(f"the model is a {saved.module}, which is not there: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise OutputError(f"the model is a {saved.module}, which is no torch.nn.Module")
    state = saved.state_dict(client)
    try:
        module: nn.Module = kind(**saved.arguments)
        module.load_state_dict(state)
    except (TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise OutputError(
            f"the weights are not those of a {saved.module}: {reason:.300}"
        ) from error
    return module.eval()

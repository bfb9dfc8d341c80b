"""Messages about a run's outputs: the server's request and the clients' reply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from flower_graph.config.common import ALL, LAST
from flower_graph.wire.codec import Message
from flower_graph.wire.fields import Numbers, Said, Whole, Word
from flower_graph.wire.keys import RUN_TOKEN, SERVER_ROUND

BEGIN, SNAPSHOT, FINISH = ACTIONS = ("begin", "snapshot", "finish")
TYPE = "query.keep"


@dataclass
class KeepRequest(Message, down=TYPE):
    """The outputs that clients are to keep on their machines."""

    run: Annotated[str, Word(RUN_TOKEN, "of the run")]
    server_round: Annotated[
        int, Whole(SERVER_ROUND, "the last round that was measured; 0 at first", least=0)
    ]
    best_round: Annotated[
        int,
        Whole("best-round", "of the best validation so far; 0: none yet", least=0),
    ]
    action: Annotated[
        str,
        Word(
            "keep-action",
            "`begin`: note what is measured; `snapshot`: hold predictions and models as of this "
            "round; `finish`: write what stays",
        ),
    ]
    save: Annotated[str, Word("save", "`all`, or `predictions` without models")] = ALL
    keep: Annotated[str, Word("keep", "of which round: the `last` or the `best`")] = LAST
    every: Annotated[int, Whole("keep-every", "rounds between points of curves; 0: none")] = 0
    protected: Annotated[
        list[int],
        Numbers(
            "protected-rounds",
            "rounds whose snapshots a resumed run may need",
            whole=True,
            optional=True,
            shape="p",
        ),
    ] = field(default_factory=list)


@dataclass
class KeepReply(Message, up=TYPE):
    """The answer to a ``KeepRequest``."""

    not_kept: Annotated[
        str, Said("not-kept", "why it could not be done; left out if it could", optional=True)
    ] = ""

"""Outputs of a party, kept on its machine: messages, tables, the folder during a run.

The server asks for outputs with ``query.keep``; before that nothing is written. The folder is the
SuperNode's own, ``<data-folder>/outputs/<run token>``, or ``outputs/<run token>/<SuperNode>`` in
its ``state-dir``; in a simulation ``clients/<SuperNode>`` of the run's output folder.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from flower_graph.config.common import ALL, BEST, CHECKPOINTS, KEEP, LAST
from flower_graph.config.foreign import IN_RUN
from flower_graph.errors import OutputError, StateLostError
from flower_graph.outputs.files import SAID, Snapshot, role_of, write_table
from flower_graph.storage import files
from flower_graph.storage.checkpoint import keep_rounds, round_folder
from flower_graph.storage.reading import MOST_GRAPH, MOST_TENSORS, open_regular, read_text, reading
from flower_graph.wire.codec import Message, Numbers, RunToken, Said, Whole, Word
from flower_graph.wire.keys import ROLES, RUN_TOKEN, SERVER_ROUND
from flower_graph.wire.ledger import count_bytes

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.app import Message as FlowerMessage

    from flower_graph.flower_compat import ClientAppCallable


BEGIN, SNAPSHOT, FINISH = "begin", "snapshot", "finish"
TYPE = "query.keep"


class KeepRequest(Message, down=TYPE):
    """The outputs that clients are to keep on their machines."""

    run: Annotated[str, RunToken(RUN_TOKEN)]  # of the run
    # the last round that was measured; 0 at first
    server_round: Annotated[int, Whole(SERVER_ROUND, least=0)]
    best_round: Annotated[int, Whole(least=0)]  # of the best validation so far; 0: none yet
    # `begin`: note what is measured; `snapshot`: hold predictions and models as of this round;
    # `finish`: write what stays
    action: Annotated[str, Word("keep-action")]
    save: Annotated[str, Word()] = ALL  # `all`, or `predictions` without models
    keep: Annotated[str, Word()] = LAST  # of which round: the `last` or the `best`
    every: Annotated[int, Whole("keep-every")] = 0  # rounds between points of curves; 0: none
    # rounds whose snapshots a resumed run may need
    protected: Annotated[list[int], Numbers("protected-rounds", whole=True, shape="p")] = field(
        default_factory=list
    )


class KeepReply(Message, up=TYPE):
    """The answer to a ``KeepRequest``."""

    not_kept: Annotated[str, Said()] = ""  # why it could not be done; left out if it could


# Measurements and tables --------------------------------------------------------------------------

CLIENTS, CURVES = "clients.csv", "curves.csv"
MOST_COLUMNS = 1000  # of a table that is read
SHARES = [f"{role}-accuracy" for role in ROLES]
MEASURED = ("nodes", "loss", *SHARES)
BYTES = ("bytes-up", "bytes-down")
HEAD = ("client", "at", "round", *MEASURED, "rounds-measured", *BYTES)
ROW = np.dtype(
    [(name, "<i8") for name in ("round", "client", "nodes")]
    + [(name, "<f8") for name in ("loss", *SHARES, *BYTES)]
)


class FigureLog:
    """A file of clients' rows to which rows are appended; of two rows the later counts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, *columns: Any) -> None:  # numbers, or arrays of them
        """Append a round's rows: columns as in ``ROW``, or what all rows have."""
        rows = np.zeros(len(columns[1]), ROW)
        for name, values in zip(ROW.names or (), columns, strict=True):
            rows[name] = values
        with files.append(self._path, 0o600) as file:
            os.fchmod(file.fileno(), 0o600)
            rows.tofile(file)

    def read(self, last: float = math.inf) -> Any:  # a data frame
        """Return the rows up to a round, by round and client; ``OutputError`` if it is damaged."""
        import pandas as pd

        rows = np.zeros(0, ROW)
        if self._path.exists():
            with reading(self._path, OutputError), open_regular(self._path, MOST_TENSORS) as stream:
                # The process may have died while it wrote a row
                rows = np.fromfile(stream, ROW, os.fstat(stream.fileno()).st_size // ROW.itemsize)
        key, table = ["round", "client"], pd.DataFrame(rows)
        table = table[table["round"] <= last].drop_duplicates(key, keep="last")
        return table.sort_values(key, kind="stable")

    def cut(self, last: int) -> None:
        """Remove the rows after a round: the run resumes there, or starts anew."""
        if self._path.exists():
            rows = self.read(last).to_records(index=False).astype(ROW)
            with files.replaced(self._path) as stream:
                rows.tofile(stream)


# Any: a data frame
def write_figures(folder: Path, table: Any, at: dict[str, int], every: int) -> None:
    """Write ``clients.csv``, and with `every` ``curves.csv``; ``at``: rounds by their names."""
    import pandas as pd

    table = table.replace([math.inf, -math.inf], math.nan)
    each = table.groupby("client")
    whole = {name: each[name].transform("sum").round().astype(int) for name in BYTES}
    whole["rounds-measured"] = each["round"].transform("size")
    known = table.assign(**whole)
    ends = pd.concat(known[table["round"] == number].assign(at=name) for name, number in at.items())
    write_table(folder / CLIENTS, ends.sort_values("client", kind="stable")[[*HEAD]])
    if every:
        chosen = (table["round"] % every == 0) | (table["round"] == table["round"].max())
        write_table(folder / CURVES, table.loc[chosen, ["round", "client", *MEASURED]])


# Any: arrays or tensors
def node_figures(
    known: Any, masks: Mapping[str, Any], rounds: Sequence[tuple[str, int, Any]], traffic: Any
) -> Iterator[list[str]]:
    """Give the lines of ``clients.csv`` where clients are nodes and the server measures.

    ``known``, ``masks`` by role ``[n]``; ``rounds``: name, number, and which nodes were predicted
    right ``[n]``, or None; ``traffic`` ``[n, 3]``: rounds that each answered, bytes up and down.
    """
    role = role_of(*(masks[name] for name in ROLES))
    texts = [(at, str(n), right.cpu().tolist()) for at, n, right in rounds if right is not None]
    for user in known.nonzero().flatten().tolist():
        counts = [str(count) for count in traffic[user].tolist()]
        for at, number, right in texts:
            accuracy = ["", "", ""]
            if role[user]:
                accuracy[role[user] - 1] = "1.0" if right[user] else "0.0"
            yield [str(user), at, number, "1", "", *accuracy, *counts]


def merge_clients(out: Path) -> dict[str, object]:
    """Join the tables of a simulation's clients; return how clients differ."""
    import pandas as pd

    for name, order in ((CLIENTS, ["client"]), (CURVES, ["round", "client"])):
        if found := sorted((out / IN_RUN).glob(f"*/{name}")):
            with reading(out / IN_RUN, OutputError, f"a client's {name} is no such table"):
                table = pd.concat([read_table(file, order) for file in found])
                whole = table.sort_values(order, key=lambda cells: cells.astype(int), kind="stable")
            write_table(out / name, whole)
    return spread(out / CLIENTS)


def read_table(path: Path, columns: Sequence[str]) -> Any:  # a data frame
    """Read a table of clients as text; ``OutputError`` if it lacks a column, or is damaged."""
    import pandas as pd

    with reading(path, OutputError, "no such table"):
        text = read_text(path, MOST_GRAPH)
        # pandas makes objects for each column of the first line, which may be millions
        if (width := text.partition("\n")[0].count(",") + 1) > MOST_COLUMNS:
            raise ValueError(f"{width} columns, at most {MOST_COLUMNS} are read")
        table = pd.read_csv(
            io.StringIO(text), dtype=str, na_filter=False, quoting=csv.QUOTE_NONE
        )  # no cell of such a table is quoted; a quote may hide millions of lines in a cell
        table[[*columns]]
        return table


def spread(path: Path) -> dict[str, object]:
    """Return how much the clients of a ``clients.csv`` differ in accuracy.

    By ``last`` and ``best`` and by role: ``worst-tenth``, the mean accuracy of the worst tenth of
    the clients that have such nodes, at least one; ``deviation``, the standard deviation.
    ``OutputError`` if the file is no such table.
    """
    result = dict[str, dict[str, dict[str, float]]]()
    if not path.exists():
        return {}
    table = read_table(path, ["at", *SHARES])
    for at in KEEP:
        for role, name in zip(ROLES, SHARES, strict=True):
            texts = table.loc[(table["at"] == at) & (table[name] != ""), name]
            with reading(path, OutputError):
                values = np.sort(texts.to_numpy(float))
            if values.size:
                worst = float(values[: math.ceil(values.size / 10)].mean())
                entry = {"worst-tenth": worst, "deviation": float(values.std())}
                result.setdefault(at, {})[role] = entry
    return dict(result)


# The folder --------------------------------------------------------------------------------------

LOG = logging.getLogger(__name__)
SNAPSHOTS, CANDIDATE, LOG_FILE = "snapshots", "candidate", "measured.bin"
Take = Callable[[], Snapshot]


class KeptFolder:
    """The outputs of the clients of a SuperNode, or of the server.

    Until the end ``snapshots/round-N`` has the snapshot of round N. A run that is resumed from a
    checkpoint may need the best round of that time: such rounds are protected.
    """

    def __init__(self, folder: Path, save: str) -> None:
        self.folder, self._save = folder, save
        self._snapshots, self.log = folder / SNAPSHOTS, FigureLog(folder / LOG_FILE)

    def begin(self, server_round: int) -> None:
        """Make the folder; remove a stopped run's files after a round."""
        files.private_folder(self.folder)
        self.log.cut(server_round)

    def candidate(self, server_round: int, take: Take) -> None:
        """Keep a snapshot that the server may call the best; only the newest such."""
        for old in self._snapshots.glob(f"{CANDIDATE}-*"):
            files.remove_folder(old)
        self._write(self._snapshots / f"{CANDIDATE}-{server_round}", take)

    def hold(self, request: KeepRequest, take: Take) -> None:
        """Keep the snapshots of the best round so far and of protected rounds."""
        number = request.server_round
        target = round_folder(self._snapshots, number)
        candidate = self._snapshots / f"{CANDIDATE}-{number}"
        files.remove_folder(target)
        if candidate.is_dir():
            files.move(candidate, target)
        else:
            self._write(target, take)
        keep_rounds(self._snapshots, (number, *request.protected))

    def figures(self, request: KeepRequest, traffic: Mapping[str, int]) -> None:
        """Write the measurements; ``traffic``: all clients' bytes since the last ones."""
        table = self.log.read(request.server_round)
        if len(table):
            is_last = table["round"] == table["round"].max()
            for way, count in traffic.items():
                table.loc[is_last, f"bytes-{way}"] += count / is_last.sum()
            at = {"last": request.server_round, "best": request.best_round}
            write_figures(self.folder, table, at, request.every)

    def finish(self, request: KeepRequest, take: Take) -> str:
        """Write the final files; return the difference from the request, or nothing."""
        last, wanted = request.server_round, request.best_round
        held, missing = round_folder(self._snapshots, wanted), ""
        kept = wanted if request.keep == BEST and wanted and held.is_dir() else last
        if kept != last:
            for path in held.iterdir():
                files.copy_file(path, self.folder / path.name)
        else:
            if request.keep == BEST and wanted not in (0, last):
                missing = f"round {wanted}, the best, is not held; what is kept is of round {last}"
                LOG.warning("%s: %s", self.folder, missing)
            self._write(self.folder, take)
        about = {"run": request.run, "round": kept, "last-round": last, "best-round": wanted}
        about |= {"keep": request.keep, "save": request.save}
        with files.replaced(self.folder / SAID) as stream:
            stream.write(f"{json.dumps(about, indent=1)}\n".encode())
        if not request.protected:  # otherwise the run may be resumed
            files.remove_folder(self._snapshots)
            files.remove(self.folder / LOG_FILE)
        return missing

    def _write(self, folder: Path, take: Take) -> None:
        (take() if self._save == ALL else take()._replace(models=())).write(folder)


NAME = "outputs"  # in Context.state
FOLDER = "outputs"  # in the SuperNode's own folder
UP, DOWN = "up", "down"


def client_folders(
    context: Context, out: Path | None, classes: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return where a client of a run keeps checkpoints and outputs."""
    saved = None if out is None else out / CHECKPOINTS
    return {"checkpoint_dir": saved, "outputs": ClientOutputs(context, out, classes)}


class ClientOutputs:
    """Writes the figures, predictions and models of one SuperNode's clients.

    Parameters
    ----------
    context : Context
        The ClientApp's context.
    output_dir : Path or None
        The run's output folder, for SuperNodes without a folder of their own.
    classes : sequence of str, optional
        Names of the classes, for predictions.
    """

    def __init__(
        self,
        context: Context,
        output_dir: Path | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._context, self._shared, self.classes = context, output_dir, classes

    def measured(
        self, server_round: int, clients: object, *, loss: object, accuracy: object, nodes: object
    ) -> None:
        """Record the clients' measurements of a round; a second call replaces them.

        The round is counted as in ``metrics.jsonl``. ``clients``, ``loss`` and ``nodes`` (their
        number) are ``[c]``; ``accuracy`` is ``[c, 3]``, of training, validation and test nodes, NaN
        where a client has none.
        """
        if record := self._record:
            shares = np.asarray(accuracy, np.float64)
            traffic = [int(record[way]) / len(shares) for way in (UP, DOWN)]
            record.update({UP: 0, DOWN: 0})
            log = self._kept(record["run"], record["save"]).log
            log.add(server_round, clients, nodes, loss, *shares.T, *traffic)

    def candidate(self, server_round: int, snapshot: Take) -> None:
        """Keep a snapshot of the round that was just measured, if the run keeps its best round.

        Clients that measure and train in one message call this between the two.
        """
        record = self._record
        if record.get("keep") == BEST:
            self._kept(record["run"], record["save"]).candidate(server_round, snapshot)

    def keep(self, request: KeepRequest, snapshot: Take) -> str:
        """Carry out the server's request; return why it failed, or an empty string."""
        kept = self._kept(request.run, request.save)
        if request.action == BEGIN:
            from flwr.app import ConfigRecord

            kept.begin(request.server_round)
            about = {"run": request.run, "keep": request.keep, "save": request.save}
            self._context.state[NAME] = ConfigRecord({**about, UP: 0, DOWN: 0})
        elif self._record.get("run") != request.run:
            raise StateLostError("the unfinished outputs of this run are gone")
        elif request.action == SNAPSHOT:
            kept.hold(request, snapshot)
        else:
            # Figures first, since they need no model
            kept.figures(request, {way: int(self._record[way]) for way in (UP, DOWN)})
            missing = kept.finish(request, snapshot)
            self._context.state.pop(NAME)
            return missing
        return ""

    @property
    def _record(self) -> Any:  # what began; empty if nothing did
        return self._context.state.config_records.get(NAME, {})

    def _kept(self, run: str, save: str) -> KeptFolder:
        folder = own_outputs(self._context, run)
        if folder is None:
            if self._shared is None:
                raise OutputError("no data-folder, no state-dir and no output folder for outputs")
            folder = self._shared / IN_RUN / files.node_name(self._context)
        return KeptFolder(folder, save)


def own_outputs(context: Context, run: str) -> Path | None:
    """Return the folder of a run's outputs, if the SuperNode has a folder of its own."""
    if data := str(context.node_config.get(files.DATA_FOLDER, "")):
        return Path(data).expanduser() / FOLDER / run
    own = files.own_place(context)
    return None if own is None else own / FOLDER / run / files.node_name(context)


def count_traffic(
    message: FlowerMessage, context: Context, call_next: ClientAppCallable
) -> FlowerMessage:
    """Count the bytes of messages while outputs are kept."""
    reply = call_next(message, context)
    record = context.state.config_records.get(NAME)
    if record is not None and message.metadata.message_type != TYPE:
        for way, one in ((DOWN, message), (UP, reply)):
            if one.has_content():
                record[way] = int(record[way]) + count_bytes(one.content)  # type: ignore[arg-type]
    return reply

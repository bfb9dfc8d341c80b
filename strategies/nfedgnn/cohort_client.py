"""The users of one SuperNode: their half of a round, their state, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.client.state import CohortState, Makers, Tensors
from flower_graph.data.checked import check_rows
from flower_graph.data.graph import row_entries
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import CheckpointError, StateLostError
from flower_graph.flower_compat import NumPyClient
from flower_graph.ops.active_rows import ActiveRows, pack, pack_csr
from flower_graph.outputs.client import ClientOutputs, Snapshot
from flower_graph.outputs.weights import SavedModels
from flower_graph.storage import row_file
from flower_graph.storage.places import node_name, state_key
from flower_graph.storage.reading import Tree
from flower_graph.storage.writing import remove_empty
from flower_graph.strategies.nfedgnn.chosen_users import (
    AVERAGE_ROUND,
    GRADIENT_ROUND,
    ChosenUsers,
)
from flower_graph.strategies.nfedgnn.common_layer import CommonSettings
from flower_graph.strategies.nfedgnn.kept import user_models
from flower_graph.strategies.nfedgnn.messages import (
    EnrolmentReply,
    EnrolmentRequest,
    RelayReply,
    RelayRequest,
)
from flower_graph.strategies.nfedgnn.stored import StoredCohort, stored_state
from flower_graph.strategies.nfedgnn.users import (
    ADAM_TENSORS,
    Cohort,
    LinearCohort,
    ModuleCohort,
    UserSettings,
)
from flower_graph.wire.numpy_client import Answer, Config, Parameters

LOG = logging.getLogger(__name__)
ROWS = "rows"  # in a checkpoint: where each user's rows of weights begin
Opened = tuple[Cohort, Tensors]


class UsersClient(NumPyClient):
    """The users of one SuperNode, as the clients of all forms have them: ``NodeClient``."""

    actions: tuple[str, ...] = ("finish",)
    settings_key = "user-settings"  # in Context.state, where the run keeps something
    _state: CohortState[Any]

    def __init__(
        self,
        context: Context,
        x: Tensor,
        users: Tensor,
        *,
        user_model: nn.Module | None = None,
        device: str = "cpu",
        output_dir: Path | None = None,
    ) -> None:
        if x.shape[0] != users.numel() or users.numel() == 0:
            raise ValueError(f"x has {x.shape[0]} rows for {users.numel()} users; give one each")
        check_rows(x)
        self.users, self._context = users.long().cpu(), context
        self.outputs = ClientOutputs(context, output_dir)
        self._x, self._model, self._device = x, user_model, resolve_device(device)

    # What of a run outlasts its messages

    def _remember(self, settings: UserSettings | CommonSettings) -> None:
        if self.outputs.is_on and self.settings_key not in self._context.state:
            self._context.state[self.settings_key] = ConfigRecord(settings._asdict())

    def _forget(self) -> None:
        self._state.drop()
        self._context.state.pop(self.settings_key, None)

    def snapshot(self) -> Snapshot:
        if self._model is not None:
            LOG.warning("user_model: a module of your own is saved in checkpoints alone")
            return Snapshot(None, [])
        kept = self._context.state.config_records.get(self.settings_key)
        if kept is None:
            raise StateLostError("what was kept of this run is not here")
        return Snapshot(None, [self._halves(dict(kept))])

    def _halves(self, settings: Tree) -> SavedModels:
        raise NotImplementedError

    def _weight_shape(self, latent_size: int, bias: bool) -> list[int]:
        if self._model is not None:
            return [sum(p.numel() for p in self._model.parameters()), 1]
        return [self._x.shape[1] + int(bias), latent_size]

    def _pack(self, x: Tensor, bias: bool) -> ActiveRows:
        if x.layout == torch.sparse_csr:
            parts = x.crow_indices(), x.col_indices(), x.values(), x.shape[1]
            return pack_csr(*parts, bias=bias).to(self._device)
        return pack(x, bias=bias).to(self._device)

    def _places(self, users: NDArray[np.generic]) -> Tensor:
        wanted = torch.from_numpy(np.ascontiguousarray(users))
        if torch.equal(wanted, self.users):
            return torch.arange(wanted.numel())
        order = torch.argsort(self.users)
        result = torch.searchsorted(self.users[order], wanted).clamp(max=order.numel() - 1)
        place = order[result]
        if not torch.equal(self.users[place], wanted):
            raise ValueError("the message names users that this client does not host")
        return place


class NodeClient(UsersClient):
    """The users of one SuperNode: one in a deployment, thousands in a simulation.

    Parameters
    ----------
    context : Context
        The ClientApp's context; the users' weights live behind it (``flower_graph.client.state``).
    x : Tensor
        ``[n_c, f]`` the users' features, dense or sparse CSR.
    users : Tensor
        ``[n_c]`` the users' numbers in the server's graph.
    user_model : Module, optional
        ``f_u``: any module from one user's features to a vector of ``latent_size``. Without it,
        the paper's linear map, stored by active rows. It runs without dropout, since one latent
        vector serves training and evaluation; put dropout into the server's model.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir : Path, optional
        Where to save the users' weights when the server asks for a checkpoint.
    output_dir : Path, optional
        The run's output folder (``flower_graph.outputs.client``).
    rows_dir : Path, optional
        Folder for a file of the users' weights and moments, which are then not in memory; for the
        paper's linear map without averaging. The users are computed on the CPU.

    Raises
    ------
    ValueError
        If users and features do not fit, or ``rows_dir`` is given with a ``user_model`` or for a
        SuperNode whose files are encrypted.
    """

    def __init__(
        self,
        context: Context,
        x: Tensor,
        users: Tensor,
        *,
        user_model: nn.Module | None = None,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
        output_dir: Path | None = None,
        rows_dir: Path | None = None,
    ) -> None:
        if rows_dir is not None:
            device = "cpu"  # what is read from the disk changes there
            if user_model is not None or state_key(context) is not None:
                raise ValueError(
                    f"rows_dir: {rows_dir} is for the paper's linear map, and its file is not "
                    "encrypted: leave out rows_dir, or user_model and state-key"
                )
        super().__init__(
            context, x, users, user_model=user_model, device=device, output_dir=output_dir
        )
        name = f"users-{node_name(context)}.rows"
        self._file = None if rows_dir is None else rows_dir / name
        self._state = CohortState[Opened](
            context,
            "node-client",
            self.users,
            checkpoint_dir,
            key="users",
            copies=False,
            beside=ROWS,
        )

    def get_properties(self, config: Config) -> Config:
        enrolment = EnrolmentRequest.from_config(config)
        makers = self._makers(enrolment.settings)
        if enrolment.before is not None and int(self.users.min()) >= enrolment.before:
            self._state.begin(enrolment.resume)  # all have come since that checkpoint
        else:
            self._restore(enrolment)
        settings = enrolment.settings
        shape = self._weight_shape(settings.latent_size, settings.bias)
        handled = self._state.processed(makers)
        return EnrolmentReply(self.users.numpy(), shape, handled).to_config()

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Apply the relayed gradients, then answer with latent vectors (steps 2 and 3)."""
        request = RelayRequest.from_numpy(parameters, config)
        with self._updated(request) as users:
            reply = RelayReply(request.server_round, users.latent())
            if request.send_weights:
                reply.weight_sum, reply.holders = users.weight_sum()
        if request.checkpoint:
            reply.not_saved = self._save(request.server_round, request.run, request.settings)
        return reply.to_numpy()

    def _save(self, server_round: int, run: str, settings: UserSettings) -> str:
        """Write a checkpoint, with the start of each user's rows of weights."""
        makers = self._makers(settings)
        if self._file is not None:
            return self._mark(server_round, run, makers)
        more = {} if self._model is not None else {ROWS: self._rows(settings).ptr.cpu()}
        return self._state.save(server_round, run, makers, more)

    def _mark(self, server_round: int, run: str, makers: Makers[Opened]) -> str:
        """Write a checkpoint of all but the rows; from now on the file can go back to it."""
        cohort, _ = self._state.look(makers)
        assert isinstance(cohort, StoredCohort)
        cohort.file.prepare()
        problem = self._state.save(server_round, run, makers)
        if not problem:
            cohort.file.mark(server_round)
        return problem

    def _restore(self, enrolment: EnrolmentRequest) -> None:
        """Go on from a checkpoint; if users have changed, take the part of the users here."""
        before, resume, settings = enrolment.before, enrolment.resume, enrolment.settings
        makers = self._makers(settings)
        if self._file is not None and self._state.store.is_due(resume):
            if before is not None:
                raise ValueError("users come and go only where their weights are in memory")
            row_file.go_back(self._file, resume.server_round)
        if before is None:
            self._state.restore(resume, makers)
            return

        def adopt(saved: Tensors, numbers: Tensor, more: Tensors) -> Tensors | None:
            if not torch.isin(self.users[self.users < before], numbers).all():
                return None
            self._state.drop()  # what a run that was stopped left in this process is of others
            return self._adopted(settings, saved, numbers, more)

        if self._state.restore(resume, makers, adopt) is not None:
            # The file that was read may have users that have left.
            why = self._save(resume.server_round, resume.run, settings)
            if why:
                raise CheckpointError(why)

    def _adopted(
        self, settings: UserSettings, saved: Tensors, numbers: Tensor, more: Tensors
    ) -> Tensors:
        result = self._makers(settings).start()
        both = np.intersect1d(self.users.numpy(), numbers.numpy(), return_indices=True)
        here, there = (torch.from_numpy(place) for place in both[1:])
        for name, tensor in result.items():
            to, source = here, there
            if name in ADAM_TENSORS:  # of all users' rows, one behind the other
                to = row_entries(self._rows(settings).ptr.cpu().long(), here)[1]
                source = row_entries(more[ROWS].long(), there)[1]
            tensor[to.to(tensor.device)] = saved[name][source].to(tensor.device)
        return result

    def _halves(self, settings: Tree) -> SavedModels:
        own = UserSettings(**settings)
        cohort, tensors = self._state.look(self._makers(own))
        if isinstance(cohort, StoredCohort):
            tensors = {"weight": cohort.whole()}
        return user_models(self.users.tolist(), self._rows(own), tensors, own)

    def finish(self, parameters: Parameters, config: Config) -> Answer:
        request = RelayRequest.from_numpy(parameters, config)
        with self._updated(request) as users:
            if isinstance(users.cohort, StoredCohort):
                LOG.info("users' rows: %s bytes on the disk", f"{users.cohort.file.disk_bytes():,}")
        self._forget()
        if self._file is not None and not row_file.is_marked(self._file):
            row_file.remove(self._file)
            remove_empty(self._file.parent)
        # Nothing more to tell; but mods such as LocalDpMod compare the shapes of both messages.
        return RelayReply(request.server_round, np.zeros_like(request.gradient)).to_numpy()

    @contextmanager
    def _updated(self, request: RelayRequest) -> Iterator[ChosenUsers]:
        """Open the users' state and apply a message; changes are kept if the block ends well."""
        self._remember(request.settings)
        # The state must be there if a gradient comes for what the users have sent.
        follows = bool(request.gradient_round.any())
        place = self._places(request.users)
        makers = self._makers(request.settings)
        with self._state.opened(makers, follows=follows) as (cohort, tensors):
            users = ChosenUsers(cohort, tensors, place)
            if request.average is not None:
                users.take_average(request.average, request.average_round)
            users.step(request)
            yield users

    def _makers(self, settings: UserSettings) -> Makers[Opened]:
        def start() -> Tensors:
            never = torch.zeros(self.users.numel(), dtype=torch.int32)
            rounds = {GRADIENT_ROUND: never, AVERAGE_ROUND: never.clone()}
            if self._file is not None:
                row_file.create(self._file)
                return stored_state(self.users.numel()) | rounds
            return self._cohort(settings, None).tensors() | rounds

        def build(tensors: Tensors) -> tuple[Opened, Tensors]:
            tensors = self._placed(tensors)
            return (self._cohort(settings, tensors), tensors), tensors

        return Makers(start, build)

    def _placed(self, tensors: Tensors) -> Tensors:
        """Move weights to the device; round counters stay with the CPU's bookkeeping."""
        counters = (GRADIENT_ROUND, AVERAGE_ROUND)
        return {k: t if k in counters else t.to(self._device) for k, t in tensors.items()}

    def _cohort(self, settings: UserSettings, tensors: Tensors | None) -> Cohort:
        if self._model is not None:
            return ModuleCohort(self._x.to(self._device), self._model, settings, tensors)
        if self._file is not None and tensors is not None:
            file = row_file.RowFile(self._file, tensors)
            return StoredCohort(self._rows(settings), settings, tensors, file)
        return LinearCohort(self._rows(settings), settings, tensors)

    def _rows(self, settings: UserSettings) -> ActiveRows:
        return self._state.store.once(lambda: self._pack(self._x, settings.bias))

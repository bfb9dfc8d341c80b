"""nFedGNN's server: its steps, its arguments, what it keeps, and users that come and go."""

import csv
import math
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from graph_helpers import CLASSES, FEATURES, Outcome, small_graph
from relay_helpers import asked_users, assigned, client_app, run, same_weights, strategy_for
from torch import Tensor, nn
from torch.nn import functional
from without_flower import run_without_flower

from flower_graph import CommonLayerClient, NodeClient, SplitGradientRelay
from flower_graph.audit.attacks import RecordingGrid
from flower_graph.audit.attacks import config_of as entries_of
from flower_graph.client.adaptor import make_client_app
from flower_graph.config.common import LINKS, LinksSection
from flower_graph.data.graph import Graph, to_undirected
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import DataError, DivergedError, NoClientsError
from flower_graph.models import SplitModel, build_server_model
from flower_graph.ops import graph as ops_graph
from flower_graph.ops.links import both_directions, dot_products, undirected
from flower_graph.outputs.build import build_module, form_of
from flower_graph.outputs.files import Embeddings, Predictions, Snapshot, read_models
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint
from flower_graph.strategies.nfedgnn.algorithm import RelayServer, scheduled, shared_linear_weight
from flower_graph.strategies.nfedgnn.config import SCHEDULES, StrategyConfig
from flower_graph.strategies.nfedgnn.strategy import config_of, restore, server_of, state_of

N, C, CPU, RATE = 12, CLASSES, torch.device("cpu"), 0.05


def relay(model: nn.Module, data: Any = None, **more: Any) -> RelayServer:
    config = config_of(reg_weight=3.0, weight_decay=0.01, seed=7, **more)
    return server_of(data or small_graph(), model, config, getattr(model, "latent_size", C))


def step(server: RelayServer, number: int, rate: float) -> Any:
    result = server.gradients(number, server.latent, server.known)
    server.step(number, rate)
    return result


def gcn() -> SplitModel:
    return build_server_model("gcn", hidden=4, heads=2, classes=C, dropout=0.0, seed=7)


class Echo(nn.Module):
    """The latent vectors are the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x * self.scale


def test_accuracy_by_hand():
    data = small_graph()
    data.val_mask = torch.zeros(N, dtype=torch.bool)
    del data.test_mask
    server = relay(Echo(), data)
    logits = functional.one_hot(data.y, C).float()
    logits[[1, 3, 4]] = logits[[1, 3, 4]].roll(1, dims=1)  # wrong: one of them to train
    server.receive(np.arange(N), logits.numpy())
    accuracy = server.accuracy()
    assert accuracy["train"] == pytest.approx(5 / 6)
    assert math.isnan(accuracy["val"]) and math.isnan(accuracy["test"])


def test_a_graph_without_a_training_node_is_refused():
    data = small_graph()
    data.train_mask = torch.zeros(N, dtype=torch.bool)
    with pytest.raises(DataError, match="train_mask"):
        relay(Echo(), data)


def test_the_only_round_has_the_whole_step_size() -> None:
    for schedule in SCHEDULES:
        assert scheduled(StrategyConfig(learning_rate=0.1, schedule=schedule), 1, 1) == 0.1


def test_the_average_of_the_servers_weights_by_hand():
    server, course = relay(Echo(), server_average=0.6), list[float]()
    server.receive(np.arange(N), functional.one_hot(small_graph().y, C).numpy())
    average = 0.0
    for number in range(1, 6):
        step(server, number, RATE)
        course.append(server.model.scale.item())
        # A plain mean of the first two; from then on 0.4 of the new
        share = max(0.4, 1 / number)
        average += share * (course[-1] - average)
        assert server.eval_model.scale.item() == pytest.approx(average)
        assert torch.allclose(server.logits(), server.latent * average)
    again = relay(Echo(), server_average=0.6)
    restore(again, state_of(server))
    assert torch.equal(again.logits(), server.logits())
    assert again.model.scale.item() == course[-1] != pytest.approx(average)
    without = relay(Echo())
    assert without.eval_model is without.model and "average" not in state_of(without)


@pytest.mark.parametrize("few", [2, 8])  # 2: the rows next to the labelled ones are few, too
def test_a_loss_of_few_nodes_has_the_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, few: int
):
    rng = torch.Generator().manual_seed(3)
    pairs = torch.randint(400, (2, 500), generator=rng)
    data, latent = small_graph(), torch.randn(400, 4, generator=rng)
    data.edge_index = to_undirected(pairs, 400)
    data.y = torch.arange(400) % C
    data.train_mask = torch.arange(400) < 3
    data.val_mask = data.test_mask = torch.zeros(400, dtype=torch.bool)
    found, products = list[list[Tensor]](), list[int]()
    count = ops_graph._product
    monkeypatch.setattr(
        ops_graph, "_product", lambda a, x: (products.append(a.shape[0]), count(a, x))[1]
    )
    monkeypatch.setattr(ops_graph, "FEW", few)
    for least in (0, 1 << 17):  # entries
        monkeypatch.setattr(ops_graph, "SMALL", least)
        server = relay(
            build_server_model("gcn", hidden=4, heads=1, classes=C, dropout=0.5, seed=7), data
        )
        server.receive(np.arange(400), latent.numpy())
        losses, gradient = step(server, 1, RATE)
        found.append([torch.tensor(losses["loss"]), gradient, *server.model.state_dict().values()])
    assert all(map(torch.equal, *found))
    assert min(products) == 3 and products[-4:] == [400] * 4


def test_nobody_with_a_label_has_answered():
    server = relay(gcn())
    assert not server.data.masks["train"][[3, 4]].any()
    server.receive(np.array([3, 4]), np.array([[1.0, 0, 0, 0], [0, 2.0, 0, 0]]))
    losses, gradient = step(server, 1, RATE)
    assert losses["cross_entropy"] == 0
    assert losses["loss"] == pytest.approx(server.reg_weight * losses["regulariser"])
    assert bool(gradient.any()) == (losses["regulariser"] > 0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_before_the_step(value: float):
    server = relay(Echo())
    server.receive(np.arange(N), np.full((N, C), value))
    with pytest.raises(DivergedError, match=r"strategy\.learning_rate.*strategy\.reg_weight"):
        step(server, 4, RATE)
    assert server.model.scale.item() == 1.0


def test_resolve_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ValueError, match="device: 'cuda:1'"):
        resolve_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto").type == "cuda"
    assert resolve_device("cuda:1").index == 1


# The server knows some edges and predicts others -------------------------------------------------

M = 70  # users


class Heard(nn.Module):
    """Gives latent vectors as they are, and notes over which edges it was to pass messages."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen = nn.Parameter(torch.ones(1)), list[set[int]]()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.seen.append(set(undirected(edge_index, M).tolist()))
        return self.scale * x


def link_relay(model: nn.Module) -> RelayServer:
    rng = torch.Generator().manual_seed(0)
    pairs = torch.randint(M, (2, 5 * M), generator=rng)
    edges = both_directions(pairs[:, pairs[0] != pairs[1]]).unique(dim=1)
    train = torch.ones(M) > 0
    data = Graph(torch.zeros(M, 1), edges, torch.zeros(M).long(), 2, train, ~train, ~train)
    config = config_of(reg_weight=0.0, weight_decay=0.0)
    config.task, config.links = LINKS, LinksSection(0.1, 0.2, 3)
    one = server_of(data, model, config, 4)
    one.receive(np.arange(M), torch.randn(M, 4, generator=rng).numpy())
    return one


def test_the_server_passes_over_no_edge_that_it_is_judged_by() -> None:
    model = Heard()
    server = link_relay(model)
    split = server.data.split
    assert split is not None
    code = split.pairs[0] * M + split.pairs[1]
    train, val, test = (
        set(code[split.is_edge & (split.role == role)].tolist()) for role in range(3)
    )
    server.gradients(1, server.latent, server.known)
    accuracy = server.accuracy()
    learnt, early, late = model.seen
    assert learnt == early == train and late == train | val and not late & test
    score = dot_products(server.logits(split.later), split.pairs)
    chosen = split.role == 2
    assert accuracy["test"] == pytest.approx(
        float(((score > 0) == split.is_edge)[chosen].double().mean())
    )


def test_users_who_were_not_heard_teach_nothing() -> None:
    server = link_relay(Heard())
    heard = torch.arange(M) < 40
    _, gradient = server.gradients(1, server.latent, heard)
    assert not gradient[~heard].any() and bool(gradient[heard].any())
    losses, nothing = server.gradients(1, server.latent, heard & False)
    assert losses["cross_entropy"] == 0 and not nothing.any()


IN_ONE_PROCESS = """
import torch
from flower_graph.models import build_server_model
from flower_graph.ops.active_rows import pack
from flower_graph.ops.graph import sorted_edges
from flower_graph.strategies.nfedgnn import algorithm
from flower_graph.strategies.nfedgnn.config import NFedGNNConfig, StrategyConfig

x, edges, y, train = torch.load(sys.argv[1])
config = NFedGNNConfig(seed=3, strategy=StrategyConfig(reg_weight=1.0, learning_rate=0.05))
model = build_server_model("gcn", hidden=4, heads=2, classes=3, dropout=0.5, seed=3)
graph = algorithm.ServerGraph(sorted_edges(edges, len(y)), y, {"train": train}, y >= 0, 3)
server = algorithm.RelayServer(model, graph, config, 4)
maps = algorithm.OwnMaps(pack(x), algorithm.UserSettings(4, False, 5e-4, 3))


class Here:
    def latents(self, server_round):
        server.receive(torch.arange(len(y)).numpy(), maps.forward(None).numpy())
        return server.latent, server.known

    def prepare_step(self, server_round, gradient, rate):
        maps.step(None, gradient, rate)
        return ""


for number in range(1, 6):
    losses, skipped = algorithm.relay_round(Here(), server, number, 0.05)
    print(repr(losses["loss"]))
"""


def test_a_round_runs_in_one_process_without_flower_as_over_messages(tmp_path: Path) -> None:
    data = small_graph()
    assert CLASSES == 3 and int(data.y.min()) == 0
    edges = to_undirected(data.edge_index, N)
    torch.save((data.x, edges, data.y, data.train_mask), tmp_path / "graph.pt")
    said = run_without_flower(IN_ONE_PROCESS, tmp_path / "graph.pt")
    assert [float(line) for line in said.split()] == run(data).losses


def test_initial_arrays_and_evaluate_fn() -> None:
    data = small_graph()
    first = run(data, rounds=2)
    seen: list[int] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        seen.append(number)
        return MetricRecord({"size": len(arrays)}) if number == 2 else None

    strategy = strategy_for(data, seed=3)
    other = strategy_for(data, seed=9)  # other initial weights at the server, replaced below
    arrays = ArrayRecord(strategy.server.model.state_dict())
    other.server.seed = 3
    other.layer.settings = strategy.layer.settings
    result = other.start(
        InProcessGrid(client_app(data), num_supernodes=2), arrays, 2, evaluate_fn=evaluate
    )
    losses = [metrics["loss"] for metrics in result.train_metrics_clientapp.values()]
    assert losses == first.losses
    assert seen == [1, 2]
    assert {k: dict(v) for k, v in result.evaluate_metrics_serverapp.items()} == {2: {"size": 3}}
    assert result.arrays is not None


def test_train_config_travels_and_stays_the_callers() -> None:
    data = small_graph()
    grid = RecordingGrid(client_app(data), num_supernodes=1)
    given = ConfigRecord({"note": "hello", "server-round": 99})
    strategy_for(data).start(grid, num_rounds=2, train_config=given)
    assert dict(given) == {"note": "hello", "server-round": 99}
    sent = [entries_of(one.request) for one in grid.exchanges if one.kind == "train"]
    assert [(c["note"], c["server-round"]) for c in sent] == [("hello", 1), ("hello", 2)]


def test_train_config_reaches_clients_with_one_layer_too() -> None:
    data = small_graph()
    app = make_client_app(lambda context: CommonLayerClient(context, *assigned(data, context)))
    grid = RecordingGrid(app, num_supernodes=2)
    strategy = strategy_for(data, share="summed", dropout=0.0)
    strategy.start(grid, num_rounds=2, train_config=ConfigRecord({"note": "hello"}))
    for kind, times in (("train", 6), ("train.add_up", 4)):  # vectors are asked for once more
        sent = [entries_of(one.request) for one in grid.exchanges if one.kind == kind]
        assert [entries["note"] for entries in sent] == ["hello"] * times


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"participation": 1.5}, "participation: 1.5"),
        ({"average_every": 2, "average_over": "all", "participation": 0.5}, "participation: 0.5"),
        ({"latent_size": 0}, "latent_size: 0"),
        ({"checkpoint_every": 5}, "checkpoint_every.*checkpoint_dir"),
        ({"device": "gpu"}, "device: 'gpu'"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SplitGradientRelay(small_graph(), nn.Linear(1, 1), **{"latent_size": 4, **options})


def test_clients_are_not_asked_to_evaluate() -> None:
    grid = RecordingGrid(client_app(small_graph()), num_supernodes=2)
    with pytest.raises(ValueError, match="evaluate_config"):
        strategy_for(small_graph()).start(grid, evaluate_config=ConfigRecord())
    assert not grid.exchanges


def test_nobody_who_takes_part_is_connected() -> None:
    data, strategy = small_graph(15), strategy_for(small_graph(15), participation=1 / 15)
    grid = InProcessGrid(client_app(data), num_supernodes=15)

    def leave(report: Any) -> None:
        (drawn,) = asked_users(15, 1 / 15, 3, 2).tolist()
        for node, context in list(grid.contexts.items()):
            if context.node_config["partition-id"] == drawn:
                del grid.contexts[node]

    with pytest.raises(NoClientsError, match="round 2"):
        strategy.start(grid, num_rounds=2, on_round=leave)


def test_bytes_with_participation_by_hand() -> None:
    # 4 of 12 users a round, 16 bytes each way; a gradient goes down when its user is asked again.
    outcome = run(small_graph(12), rounds=3, participation=1 / 3)
    rounds = [set(asked_users(12, 1 / 3, 3, number).tolist()) for number in (1, 2, 3)]
    again = [0, len(rounds[1] & rounds[0]), len(rounds[2] & (rounds[0] | rounds[1]))]
    assert [r.bytes["up"]["latent"] for r in outcome.reports] == [64, 128, 192]
    found = [r.bytes["down"]["gradient"] for r in outcome.reports]
    assert found == [0, 16 * again[1], 16 * (again[1] + again[2])]


@pytest.mark.parametrize("name", ["gcn", "gat", "sage"])
def test_the_servers_half_is_saved_as_it_was_trained(name: str, tmp_path: Path) -> None:
    data = small_graph(12)
    server = strategy_for(data, name).server.model.eval()
    Snapshot(None, [form_of(server, type(server), -1)]).write(tmp_path)
    (saved,) = read_models(tmp_path)
    latent = torch.randn(12, server.latent_size)
    again = build_module(saved)
    assert type(again) is type(server)
    assert torch.equal(again(latent, data.edge_index), server(latent, data.edge_index))


def test_predictions_are_of_who_answered() -> None:
    few = run(small_graph(24), rounds=1, participation=0.25).strategy
    snapshot = few.snapshot()
    assert snapshot.predictions is not None and snapshot.embeddings is not None
    answered = few.server.known.nonzero().flatten().tolist()
    assert snapshot.predictions.node.tolist() == snapshot.embeddings.number.tolist() == answered
    assert len(answered) == 6
    latent = torch.from_numpy(snapshot.embeddings.embeddings)
    assert torch.equal(latent, few.server.latent[few.server.known])


def keeping(folder: Path, rounds: int, *, left: Any = (), **how: Any) -> SplitGradientRelay:
    """Run three SuperNodes that keep their best round; go on from it if some have left."""
    data, out = small_graph(24), folder / "out"
    strategy = strategy_for(data, checkpoint_dir=folder, checkpoint_every=2, **how)
    if left:
        strategy.grow(data, left=left)
    of: dict[str, Any] = {"of_client": {"left": left, "out": out}, "folder": folder}
    of |= {"start": {"save": "all", "keep": "best", "output_dir": out}, "resume": bool(left)}
    return run(data, rounds=rounds, supernodes=3, strategy=strategy, **of).strategy


@pytest.mark.parametrize(
    ("user_bias", "averaging"),
    [(False, {}), (True, {}), (True, {"average_every": 2, "average_over": "all"})],
)
def test_users_halves_give_the_servers_latent_vectors(
    user_bias: bool, averaging: dict[str, Any], tmp_path: Path
) -> None:
    x = small_graph(24).x
    keeping(tmp_path, 5, user_bias=user_bias, **averaging)
    kept = Embeddings.read(tmp_path / "out")
    assert kept is not None and len(kept.number) == 24
    models = [read_models(path)[0] for path in sorted((tmp_path / "out" / "clients").glob("*"))]
    assert len(models) == 3, "one file a SuperNode"
    for user, latent in zip(kept.number.tolist(), kept.embeddings, strict=True):
        state = next(one for one in models if user in one.clients).state_dict(user)
        own = functional.pad(x[user], (0, int(user_bias)), value=1.0) @ state["weight"]
        torch.testing.assert_close(own, torch.from_numpy(latent))


def test_the_server_writes_figures_of_users(tmp_path: Path) -> None:
    strategy = keeping(tmp_path, 5, server_average=0.5)
    trained, average = (
        one.state_dict() for one in (strategy.server.model, strategy.server.eval_model)
    )
    assert torch.equal(strategy.weights()["server.bias"], average["bias"])
    learnt = strategy.learnt().to_torch_state_dict()
    assert torch.equal(learnt["bias"], average["bias"]) and learnt.keys() == trained.keys()
    assert not torch.equal(trained["bias"], average["bias"])
    with (tmp_path / "out" / "clients.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["client"] for line in lines[::2]] == [str(user) for user in range(24)]
    assert {(line["at"], line["rounds-measured"]) for line in lines} == {
        ("last", "5"),
        ("best", "5"),
    }
    best = [line for line in lines if line["at"] == "best" and line["val-accuracy"]]
    assert sum(float(line["val-accuracy"]) for line in best) / len(best) == strategy.best.accuracy
    # The last gradients travel later: in `train.finish`
    size = 4 * 4
    assert {(line["bytes-up"], line["bytes-down"]) for line in lines} == {
        (str(5 * size), str(4 * size))
    }


def test_who_left_is_in_no_output(tmp_path: Path) -> None:
    keeping(tmp_path, 4)
    keeping(tmp_path, 6, left=[2, 7])
    out = tmp_path / "out"
    folders = [out, *out.glob("snapshots/*"), *out.glob("clients/*"), *out.glob("clients/*/*/*")]
    there = set[int]()
    for folder in folders:
        predictions, embeddings = Predictions.read(folder), Embeddings.read(folder)
        there |= set() if predictions is None else set(predictions.node.tolist())
        there |= set() if embeddings is None else set(embeddings.number.tolist())
        there |= {user for one in read_models(folder) for user in one.clients}
    assert there == {-1, *range(24)} - {2, 7}
    assert not any(line.startswith(("2,", "7,")) for line in (out / "clients.csv").open())


WHOLE, OLD, ROUNDS = small_graph(24), 18, 4
NEW = list(range(OLD, 24))


def begun(folder: Path, old: int = OLD, **options: Any) -> Outcome:
    """Run with the first users; users in turn, so that nobody's SuperNode moves as more come."""
    data = WHOLE.subgraph(torch.arange(old))
    return run(data, rounds=ROUNDS, supernodes=3, folder=folder, **options)


def go_on(strategy: Any, folder: Path, rounds: int, *, left: Any = (), alone: int = 0) -> Outcome:
    strategy.grow(WHOLE, left=left, alone=alone)
    how: dict[str, Any] = {"supernodes": 3, "folder": folder, "of_client": {"left": left}}
    return run(WHOLE, strategy=strategy, rounds=ROUNDS + rounds, resume=True, **how)


def saved_users(folder: Path, server_round: int) -> dict[int, dict[str, Tensor]]:
    """What a checkpoint has of each user of the linear map."""
    found: dict[int, dict[str, Tensor]] = {}
    for path in sorted(checkpoint.round_folder(folder, server_round).glob("client-*")):
        tensors = checkpoint.load_client(path)
        if "rows" not in tensors:
            continue
        start = tensors["rows"].tolist()
        for place, user in enumerate(tensors["clients"].tolist()):
            rows = slice(start[place], start[place + 1])
            local = {name: tensors[name][rows] for name in ("weight", "exp-avg", "exp-avg-sq")}
            found[user] = local | {"step": tensors["step"][place]}
    return found


def test_alone_newcomers_train_and_all_others_stay_as_they_were(tmp_path: Path) -> None:
    old = begun(tmp_path)
    before = {name: tensor.clone() for name, tensor in old.weights.items()}
    users_before = saved_users(tmp_path, ROUNDS)
    new = go_on(old.strategy, tmp_path, 4, alone=4)
    after = new.weights
    assert torch.equal(after.pop("latent")[:OLD], before.pop("latent"))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {report.answered for report in new.reports} == {len(NEW)}
    for user, tensors in saved_users(tmp_path, ROUNDS + 4).items():
        if user < OLD:
            assert all(torch.equal(t, users_before[user][name]) for name, t in tensors.items())
        else:
            assert int(tensors["step"]) == 3, "the first of four rounds has no gradient yet"
    assert new.reports[-1].cross_entropy < new.reports[0].cross_entropy


@pytest.mark.parametrize("averages", [False, True])
def test_newcomers_begin_from_the_seed_or_the_last_mean_and_others_go_on(
    averages: bool, tmp_path: Path
) -> None:
    old = begun(tmp_path, **({"average_every": 2} if averages else {}))
    mean = old.strategy.layer.state_dict().get("average")
    new = go_on(old.strategy, tmp_path, 1, alone=int(averages))
    start = shared_linear_weight(FEATURES, new.strategy.layer.settings)
    start = start if mean is None else torch.from_numpy(np.where(np.isnan(mean), start, mean))
    torch.testing.assert_close(new.weights["latent"][OLD:], WHOLE.x[OLD:] @ start)
    assert new.reports[0].answered == (len(NEW) if averages else 24)
    steps = {u: int(one["step"]) for u, one in saved_users(tmp_path, ROUNDS + 1).items()}
    assert {steps[user] for user in NEW} == {0}
    assert {steps[user] for user in range(OLD)} == {ROUNDS - averages}


def test_a_grown_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = go_on(begun(whole).strategy, whole, 6, alone=3)
    go_on(begun(cut).strategy, cut, 2, alone=3)
    fresh = strategy_for(WHOLE, checkpoint_dir=cut, checkpoint_every=2)
    again = go_on(fresh, cut, 6, alone=3)
    assert [report.answered for report in again.reports] == [6, 24, 24, 24]
    assert same_weights(again, expected)


def test_who_left_is_in_no_file_edge_figure_and_draw_any_more(tmp_path: Path) -> None:
    gone = [1, 2, *np.flatnonzero(WHOLE.test_mask)[:2].tolist()]
    old = begun(tmp_path, old=24)
    before = old.weights["latent"].clone()
    users_before = saved_users(tmp_path, ROUNDS)
    assert all(before[user].any() for user in gone)
    new = go_on(old.strategy, tmp_path, 1, left=gone)
    server = new.strategy.server
    assert not server.latent[gone].any()
    edges = getattr(server.graph, "edge_index", server.graph)
    assert not torch.isin(edges, torch.tensor(gone)).any()
    assert int(server.data.masks["test"].sum()) == int(WHOLE.test_mask.sum()) - 2
    assert new.reports[0].answered == 20
    for server_round in checkpoint.complete_rounds(tmp_path):
        assert not saved_users(tmp_path, server_round).keys() & set(gone)
        state = checkpoint.load_server(tmp_path, server_round)
        assert not state["server"]["latent"][gone].any()
        assert not state["layer"]["gradient"][gone].any()
    kept = saved_users(tmp_path, ROUNDS)
    assert kept.keys() == set(range(24)) - set(gone)
    for user, tensors in kept.items():
        assert all(torch.equal(t, users_before[user][name]) for name, t in tensors.items())


@pytest.mark.parametrize(
    ("options", "how", "said"),
    [
        ({}, {"left": [24]}, r"left.*\[24\]"),
        ({}, {"alone": -1}, "alone: -1"),
        ({"average_every": 1, "average_over": "all"}, {}, "average_over"),
    ],
)
def test_impossible_changes_are_refused(
    options: dict[str, Any], how: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        strategy_for(WHOLE, **options).grow(WHOLE, **how)


@pytest.mark.parametrize(("alone", "away", "answered"), [(2, 0, [6, 6, 24]), (0, 2, [18, 24, 24])])
def test_a_newcomers_supernode_needs_no_checkpoint(
    alone: int, away: int, answered: list[int], tmp_path: Path
) -> None:
    """Whether it is there when the run goes on, or comes later."""
    old, apart, looks = begun(tmp_path), torch.tensor(NEW), count(1)

    def client_fn(context: Context) -> NodeClient:
        part = int(context.node_config["partition-id"])
        users = apart if part == 3 else torch.arange(part, OLD, 3)
        return NodeClient(context, WHOLE.x[users], users, checkpoint_dir=tmp_path)

    late = InProcessGrid(make_client_app(client_fn), num_supernodes=4)
    there = late.get_node_ids
    late.get_node_ids = lambda: there()[: -1 if next(looks) <= away else None]  # type: ignore[method-assign]
    old.strategy.grow(WHOLE, alone=alone)
    new = run(WHOLE, strategy=old.strategy, grid=late, rounds=ROUNDS + 3, resume=True)
    assert [report.answered for report in new.reports] == answered

"""one-node-per-user: A Flower / PyTorch app."""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_graph import SplitGCN, SplitGradientRelay
from one_node_per_user.task import papers

# Create ServerApp
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the rest of the network: the server knows the edges and some labels, no features."""
    config = context.run_config
    rounds, width = int(config["num-server-rounds"]), int(config["latent-size"])
    graph, seed = papers(), int(config["seed"])
    torch.manual_seed(seed)
    strategy = SplitGradientRelay(
        graph,
        SplitGCN(hidden=width, classes=graph.num_classes),
        latent_size=width,
        reg_weight=float(config["smoothness"]),
        learning_rate=float(config["learning-rate"]),
        user_bias=True,
        seed=seed,
    )
    result = strategy.start(grid=grid, num_rounds=rounds)
    accuracies = result.evaluate_metrics_clientapp
    best = max(accuracies, key=lambda number: accuracies[number]["val-accuracy"])
    print(
        f"Test accuracy: {accuracies[best]['test-accuracy']:.1%} in round {best}, the best by "
        f"validation of {rounds}; {accuracies[rounds]['test-accuracy']:.1%} in the last"
    )

"""with-flower-graph: A Flower / PyTorch app."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from with_flower_graph.methods import chosen
from with_flower_graph.task import alone

# Create ServerApp
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy."""
    # Read run config
    num_rounds: int = context.run_config["num-server-rounds"]
    lr: float = context.run_config["learning-rate"]
    epochs: int = context.run_config["local-epochs"]

    # Initialize the strategy, and run it for `num_rounds`
    strategy = chosen(context).strategy(lr, epochs)
    result = strategy.start(grid=grid, num_rounds=num_rounds)

    # Show what came of it
    print(f"Rounds: {len(result.train_metrics_clientapp)}")
    by_itself = alone(len(list(grid.get_node_ids())), num_rounds * epochs, lr)
    federated = result.evaluate_metrics_clientapp[num_rounds]["test-accuracy"]
    print(f"Test accuracy: {by_itself:.1%} each client by itself, {federated:.1%} federated")

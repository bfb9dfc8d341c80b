"""existing-app: A Flower / PyTorch app."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from existing_app.task import NUM_CLASSES, NUM_FEATURES, alone
from flower_graph import EgoSettings, MaskedEmbeddingAveraging

# Create ServerApp
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy."""
    # Read run config
    num_rounds: int = context.run_config["num-server-rounds"]
    lr: float = context.run_config["learning-rate"]
    epochs: int = context.run_config["local-epochs"]

    # Initialize FedSCem
    settings = EgoSettings(NUM_FEATURES, NUM_CLASSES, hidden=16, projection=8, learning_rate=lr)
    strategy = MaskedEmbeddingAveraging(settings, dropout=0.0)

    # Start strategy, run FedSCem for `num_rounds`
    result = strategy.start(grid=grid, num_rounds=num_rounds)

    # Show what came of it
    print(f"Rounds: {len(result.train_metrics_clientapp)}")
    by_itself = alone(len(list(grid.get_node_ids())), num_rounds * epochs, lr)
    federated = result.evaluate_metrics_clientapp[num_rounds]["test-accuracy"]
    print(f"Test accuracy: {by_itself:.1%} each client by itself, {federated:.1%} federated")

"""existing-app: A Flower / PyTorch app."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from existing_app.task import Net, alone

# Create ServerApp
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy."""
    # Read run config
    fraction_evaluate: float = context.run_config["fraction-evaluate"]
    num_rounds: int = context.run_config["num-server-rounds"]
    lr: float = context.run_config["learning-rate"]
    epochs: int = context.run_config["local-epochs"]

    # Load global model
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())

    # Initialize FedAvg strategy
    strategy = FedAvg(fraction_evaluate=fraction_evaluate)

    # Start strategy, run FedAvg for `num_rounds`
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=num_rounds,
    )

    # Show what came of it
    print(f"Rounds: {len(result.train_metrics_clientapp)}")
    by_itself = alone(len(list(grid.get_node_ids())), num_rounds * epochs, lr)
    federated = result.evaluate_metrics_clientapp[num_rounds]["eval_acc"]
    print(f"Test accuracy: {by_itself:.1%} each client by itself, {federated:.1%} federated")

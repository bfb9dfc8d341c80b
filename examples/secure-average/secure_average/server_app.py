"""secure-average: A Flower / PyTorch app."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flower_graph.strategies import SecureAverage  # the import of the second line
from secure_average.task import Net

# Create ServerApp
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy."""
    # Read run config
    fraction_evaluate: float = context.run_config["fraction-evaluate"]
    num_rounds: int = context.run_config["num-server-rounds"]
    lr: float = context.run_config["learning-rate"]

    # Load global model
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())

    # Initialize FedAvg strategy
    strategy = SecureAverage(FedAvg(fraction_evaluate=fraction_evaluate))  # the second line

    # Start strategy, run FedAvg for `num_rounds`
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=num_rounds,
    )

    # Show what came of it
    if last := result.evaluate_metrics_clientapp.get(num_rounds):  # none if too many vanished
        print(f"Test accuracy after {num_rounds} rounds: {last['eval_acc']:.1%}")

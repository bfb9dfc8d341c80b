"""FedAvg: one model for all clients, the mean of the models that they have trained.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of Deep
Networks from Decentralized Data", AISTATS 2017. Round ``t``:

1. server -> client ``i``: the model ``w``;
2. client: ``E`` steps of Adam on the cross-entropy of its training nodes, from ``w``;
3. client -> server: its weights ``w_i``;
4. server: ``w = sum_i n_i w_i / sum_i n_i`` with ``n_i`` the training nodes of ``i``, by Flower's
   own ``FedAvg``;
5. server -> client ``i``: ``w``, to be measured.

The paper steps by SGD. Adam's moments stay with the client, unless ``strategy.optimiser: reset``.
"""

from dataclasses import dataclass

from flower_graph.config.common import ModuleRunConfig, TrainingSection
from flower_graph.config.schema import section
from flower_graph.method.module_method import ModuleMethod

APP = "fedavg"


@dataclass
class FedAvgConfig(ModuleRunConfig):
    """Everything that a run of FedAvg needs to be repeated."""

    app: str = APP
    strategy: TrainingSection = section(
        # the decay by validation: docs/compared.md
        TrainingSection,
        name=APP,
        local_epochs=3,
        weight_decay=0.0,
    )


class FedAvgMethod(ModuleMethod[FedAvgConfig]):
    """FedAvg for the command line and the apps: both halves are the library's."""

    name, schema = APP, FedAvgConfig
    tables = ("personalised", "links")


METHOD = FedAvgMethod()

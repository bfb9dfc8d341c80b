"""FedGLS: the client without edges learns its own graph; its models replace the app's ``Net``."""

from flower_graph import (
    ClientGraph,
    FedGLSSection,
    GraphSection,
    StructureClient,
    StructureFedAvg,
    StructureSettings,
)
from with_flower_graph.task import NUM_CLASSES, NUM_FEATURES


def settings(lr, epochs):
    """Return what server and clients must agree on."""
    return StructureSettings(
        NUM_FEATURES,
        NUM_CLASSES,
        graph=GraphSection(neighbours=5),
        strategy=FedGLSSection(learning_rate=lr, local_epochs=epochs),
    )


def strategy(lr, epochs):
    """Build the server's half."""
    return StructureFedAvg(settings(lr, epochs))


def client(context, partition_id, data, lr, epochs):
    """Build a client."""
    edges = data.edge_index if data.num_edges else None
    masks = (data.train_mask, data.val_mask, data.test_mask)
    graph = ClientGraph(partition_id, data.node, data.x, data.y, edges, None, *masks)
    return StructureClient(context, [graph], settings(lr, epochs))

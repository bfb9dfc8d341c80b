"""FedSCem: embeddings of nodes that several clients hold are averaged, under masks."""

from flower_graph import ClientGraph, EgoNetworkClient, EgoSettings, MaskedEmbeddingAveraging
from with_flower_graph.task import NUM_CLASSES, NUM_FEATURES


def settings(lr):
    """Return the settings of the model and the training, which server and clients share."""
    return EgoSettings(NUM_FEATURES, NUM_CLASSES, hidden=16, projection=8, learning_rate=lr)


def strategy(lr, epochs):
    """Build the server's half; with so few clients nobody may drop out of a sum under masks."""
    return MaskedEmbeddingAveraging(settings(lr), dropout=0.0)


def client(context, partition_id, data, lr, epochs):
    """Build a client; nodes have the same number at all of them."""
    masks = (data.train_mask, data.val_mask, data.test_mask)
    graph = (data.node, data.x, data.y, data.edge_index)
    ego = ClientGraph(partition_id, *graph, None, *masks)
    return EgoNetworkClient(context, [ego], settings(lr))

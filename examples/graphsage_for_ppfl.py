"""GraphSAGE as the model of PPFL-GNN's clients: a module of PyTorch as it stands.

The module learns from labels, and is pulled by the cosine towards the server's means. The clients
are those of a shipped config. ``python examples/graphsage_for_ppfl.py`` runs five rounds in
process.
"""

import torch
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from flower_graph import (
    EmbeddingClient,
    InProcessGrid,
    ProcrustesAlignment,
    PublicNodeClient,
    judge_embeddings,
    load_config,
    load_graph,
    make_client_app,
    overlapping_graphs,
)
from flower_graph.rng import seeded

CPU = torch.device("cpu")


class SAGEModel(torch.nn.Module):
    """Two layers of PyG's GraphSAGE; the hidden one is the embedding."""

    def __init__(self, graph, classes, seed=0, beta=1.0):
        super().__init__()
        self.graph, self.seed, self.beta = graph, seed, beta
        with seeded(CPU, seed, "sage", graph.client):  # every client has first weights of its own
            self.first, self.second = SAGEConv(graph.x.shape[1], 16), SAGEConv(16, classes)

    def hidden(self):
        """Return the hidden layer of all nodes."""
        x = functional.dropout(self.graph.x, 0.5, self.training)
        return self.first(x, self.graph.edge_index).relu()

    def learn(self, rows, targets, server_round):
        """Train for a round, pulled towards the targets if there are any."""
        optimiser = torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=5e-4)
        known, y = self.graph.train_mask, self.graph.labels
        self.train()
        with seeded(CPU, self.seed, "sage", self.graph.client, server_round):
            for _ in range(10):
                h = self.hidden()
                logits = self.second(functional.dropout(h, 0.5), self.graph.edge_index)
                loss = own = functional.cross_entropy(logits[known], y[known])
                if targets is not None:
                    near = functional.cosine_similarity(h[rows], torch.as_tensor(targets))
                    loss = own + self.beta * (1 - near).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        return own.item()

    def embed(self):
        """Return the embeddings of all nodes."""
        self.eval()
        with torch.no_grad():
            return self.hidden().numpy()


config = load_config("ppfl/cora-linqs-gat")
graphs = overlapping_graphs(load_graph(config.data), config.partition, config.seed)


def sage_member(graph):
    """Make the client that holds a graph."""

    def judge(z, server_round, is_last):
        known = graph.test_mask.numpy()
        return {"test": judge_embeddings(z[known], graph.y.numpy()[known], 5, 0)} if is_last else {}

    return EmbeddingClient(
        number=graph.client,
        nodes=graph.nodes.numpy(),
        rows=graph.public.nonzero().flatten().numpy(),
        dimension=16,
        build=lambda: SAGEModel(graph, classes=7),
        judge=judge,
    )


def sage_fn(context):
    """Make the client of a SuperNode."""
    graph = graphs[int(context.node_config["partition-id"])]
    return PublicNodeClient(context, [sage_member(graph)])


if __name__ == "__main__":
    grid = InProcessGrid(make_client_app(sage_fn), num_supernodes=4)
    result = ProcrustesAlignment().start(grid, num_rounds=5)
    print(f"GraphSAGE {result.evaluate_metrics_clientapp[5]['test-accuracy']:.2f}")

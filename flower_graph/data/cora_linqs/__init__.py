"""Cora as LINQS published it, bundled with the package; see README.md in this folder."""

import base64
import io
import json
from importlib import resources

import numpy as np
import torch

from flower_graph.data.graph import Graph, masks_from, to_undirected
from flower_graph.wire.keys import ROLES

FILE = "cora.npz.json"  # an npz as text: a Flower App Bundle takes no npz, whatever its rules


def load_cora_linqs() -> Graph:
    """Load the bundled Cora with the split that is stored with it."""
    text = resources.files(__name__).joinpath(FILE).read_text(encoding="ascii")
    content = io.BytesIO(base64.b64decode(json.loads(text)["base64"]))
    with np.load(content, allow_pickle=False) as arrays:
        parts = {key: arrays[key] for key in arrays.files}
    words = parts["words"].astype(np.int64)
    nodes = words.size
    x = torch.zeros(nodes, int(parts["num_features"]))
    rows = np.repeat(np.arange(nodes), words)
    x[torch.from_numpy(rows), torch.from_numpy(parts["columns"].astype(np.int64))] = 1.0
    y = torch.from_numpy(parts["labels"].astype(np.int64))
    edges = torch.from_numpy(parts["edges"].astype(np.int64))
    masks = masks_from(nodes, [torch.from_numpy(parts[role].astype(np.int64)) for role in ROLES])
    return Graph(x, to_undirected(edges, nodes), y, len(parts["class_names"]), *masks)

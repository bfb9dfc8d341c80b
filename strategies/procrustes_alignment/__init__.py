"""PPFL-GNN: clients whose graphs overlap."""

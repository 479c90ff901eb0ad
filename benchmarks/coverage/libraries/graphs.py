"""Networks over graphs and over points in space."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.coverage.libraries.entry import Entry, Module, features

__all__ = ["ENTRIES"]

_e3nn = Module("e3nn.nn.models.v2106.gate_points_networks")
_egnn = Module("egnn_pytorch")
_geometric = Module("torch_geometric.nn.models")

_NODES, _EDGES = 24, 64
_SIZES = {"in_channels": 16, "hidden_channels": 32, "out_channels": 4}


def _graph() -> dict[str, Any]:
    return {"x": torch.randn(_NODES, 16), "edge_index": torch.randint(0, _NODES, (2, _EDGES))}


def _batch() -> torch.Tensor:
    """Two graphs of as many nodes each."""
    return torch.arange(2).repeat_interleave(_NODES // 2)


def _basic(name: str, **options: Any) -> Entry:
    return Entry(
        "torch_geometric",
        name,
        lambda: getattr(_geometric, name)(**_SIZES, num_layers=3, dropout=0.1, **options),
        _graph,
    )


ENTRIES = (
    *map(_basic, ("GCN", "GAT", "GIN", "GraphSAGE", "EdgeCNN")),
    Entry(
        "torch_geometric",
        "SGFormer",
        lambda: _geometric.SGFormer(16, 32, 4, trans_num_layers=1, gnn_num_layers=2),
        lambda: _graph() | {"batch": _batch()},
    ),
    Entry(
        "torch_geometric",
        "AttentiveFP",
        lambda: _geometric.AttentiveFP(16, 32, 4, edge_dim=8, num_layers=2, num_timesteps=2),
        lambda: _graph() | {"edge_attr": torch.randn(_EDGES, 8), "batch": _batch()},
    ),
    Entry("torch_geometric", "LINKX", lambda: _geometric.LINKX(_NODES, 16, 32, 4, num_layers=2), _graph),
    Entry("egnn-pytorch", "EGNN", lambda: _egnn.EGNN(dim=32, m_dim=16), lambda: (features(8, 32), features(8, 3))),
    Entry(
        "egnn-pytorch",
        "EGNN_Network",
        lambda: _egnn.EGNN_Network(depth=2, dim=32, num_tokens=21, num_nearest_neighbors=4),
        lambda: {
            "feats": torch.randint(0, 21, (2, 12)),
            "coors": features(12, 3),
            "mask": torch.ones(2, 12, dtype=torch.bool),
        },
    ),
    Entry(
        "e3nn",
        "SimpleNetwork",
        lambda: _e3nn.SimpleNetwork("4x0e", "2x0e", max_radius=3.0, num_neighbors=4.0, num_nodes=6.0, mul=4, lmax=1),
        lambda: ({"x": torch.randn(8, 4), "pos": torch.randn(8, 3), "batch": torch.arange(2).repeat_interleave(4)},),
    ),
)

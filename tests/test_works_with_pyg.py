"""Works with: PyTorch Geometric, over an edge list and over a sparse adjacency matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from works_with import DEVICES, assert_step_agrees, kept_for

geometric = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")

NODES, EDGES, FEATURES, CLASSES = 200, 800, 64, 8


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = geometric.nn.GCNConv(FEATURES, FEATURES)
        self.second = geometric.nn.GCNConv(FEATURES, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.dropout(self.first(x, edges).relu(), 0.5, self.training)
        return self.second(x, edges)


def graph(device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NODES, FEATURES, generator=generator)
    edges = torch.randint(NODES, (2, EDGES), generator=generator)
    classes = torch.randint(CLASSES, (NODES,), generator=generator)
    return features.to(device), edges.to(device), classes.to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_gcn_gradients_agree_and_indices_are_kept(device: str) -> None:
    torch.manual_seed(0)
    features, edges, classes = graph(device)
    # A node's sum over its neighbours is atomic on the GPU: its terms, each rounded once, come in any order.
    order = 2 * EDGES * torch.finfo(torch.float32).eps if device == "cuda" else 0.0
    report = assert_step_agrees(
        GCN().to(device), lambda m: F.cross_entropy(m(features, edges), classes), loss_rtol=order
    )
    indices = kept_for(report, "dtype torch.int64")
    assert any(tensor.shape == (EDGES + NODES,) or tensor.saved_bytes >= 8 * (EDGES + NODES) for tensor in indices)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_gcn_over_a_sparse_adjacency_keeps_it_as_it_is(device: str) -> None:
    torch.manual_seed(0)
    features, edges, classes = graph(device)
    adjacency = torch.sparse_coo_tensor(edges.flip(0), torch.ones(EDGES, device=device), (NODES, NODES))
    adjacency = adjacency.coalesce().to_sparse_csr()
    order = 2 * EDGES * torch.finfo(torch.float32).eps if device == "cuda" else 0.0
    report = assert_step_agrees(
        GCN().to(device), lambda m: F.cross_entropy(m(features, adjacency), classes), loss_rtol=order
    )
    assert kept_for(report, "layout torch.sparse_csr")

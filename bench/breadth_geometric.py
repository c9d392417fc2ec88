"""PyTorch Geometric: its models, and its convolutions between two linear layers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

NODES, EDGES, WIDTH, CLASSES, ATOMS = 200, 800, 64, 8, 48

AGGREGATIONS = (
    "mean", "sum", "max", "min", "mul", "median", "std", "var", "softmax", "powermean", "lstm",
)  # fmt: skip
MODELS = (
    "MLP", "GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN", "SignedGCN", "GraphUNet", "SchNet", "DimeNet",
    "DimeNetPlusPlus", "AttentiveFP", "RECT_L", "LINKX", "LightGCN", "GNNFF", "PMLP", "NeuralFingerprint", "ViSNet",
    "SGFormer", "Polynormer", "ARLinkPredictor",
)  # fmt: skip
# Interfaces, and what needs cuGraph's or DGL's kernels.
_NO_CONVOLUTION = ("MessagePassing", "SimpleConv", "WLConv", "HeteroConv")

MODEL_FIELDS: dict[str, dict[str, Any]] = {
    "PNA": {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]},
    "GAT": {"heads": 4},
    "GraphUNet": {"depth": 3},
    "SchNet": {"num_filters": WIDTH, "num_interactions": 2},
    "DimeNet": {"out_channels": 4, "num_blocks": 2, "num_bilinear": 8, "num_spherical": 3, "num_radial": 6},
    "DimeNetPlusPlus": {
        "out_channels": 4, "num_blocks": 2, "int_emb_size": 32, "basis_emb_size": 8, "out_emb_channels": 64,
        "num_spherical": 3, "num_radial": 6,
    },
    "ViSNet": {"num_layers": 2, "num_heads": 4},
    "Polynormer": {"local_layers": 2, "heads": 2},
    "ARLinkPredictor": {"out_channels": WIDTH},
}  # fmt: skip


class Between(nn.Module):
    """A convolution between two linear layers: what it reads and gives depends on parameters."""

    def __init__(self, convolution: nn.Module, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.convolution = convolution
        self.dropout = nn.Dropout(dropout)
        self.last = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        x = self.first(x)
        taken = inspect.signature(self.convolution.forward).parameters
        if type(self.convolution).__name__ == "DNAConv":
            x = torch.stack([x, x.relu()], 1)
        if "x_dict" in taken:
            found = self.convolution({"node": x}, {("node", "to", "node"): others["edge_index"]})["node"]
        else:
            found = self.convolution(x, **others)
        found = found[0] if isinstance(found, tuple) else found
        return self.last(self.dropout(found).relu().flatten(1))


def pairs() -> list[tuple[str, str]]:
    """Return the names of models and convolutions, each with "model" or "convolution"."""
    from torch_geometric.nn import conv

    found = [(name, "model") for name in MODELS]
    found += [(name, "convolution") for name in conv.__all__ if name not in _NO_CONVOLUTION]
    found += [(f"SAGEConv({kind})", "convolution") for kind in AGGREGATIONS]
    return found


def _network(width: int = WIDTH, out: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, out))


def _edges(nodes: int, edges: int, generator: torch.Generator) -> Tensor:
    """Return random edges without loops, and one into every node, sorted by target."""
    source, target = torch.randint(nodes, (2, edges), generator=generator)
    found = torch.stack([torch.where(source == target, (source + 1) % nodes, source), target])
    ring = torch.stack([(torch.arange(nodes) + 1) % nodes, torch.arange(nodes)])
    found = torch.cat([found, ring], 1).unique(dim=1)
    return found[:, found[1].argsort(stable=True)]


def _values() -> dict[str, Any]:
    """Return everything that a forward may ask for, by name."""
    generator = torch.Generator().manual_seed(1)
    edges = _edges(NODES, EDGES, generator)
    count = edges.shape[1]
    normal = torch.randn(NODES, 3, generator=generator)
    return {
        "x": torch.randn(NODES, WIDTH, generator=generator),
        "x_0": torch.randn(NODES, WIDTH, generator=generator),
        "edge_index": edges,
        "hyperedge_index": torch.stack([edges[0], edges[1] % 40]),
        "pos_edge_index": edges[:, ::2],
        "neg_edge_index": edges[:, 1::2],
        "edge_attr": torch.rand(count, 16, generator=generator),
        "edge_type": torch.randint(4, (count,), generator=generator),
        "node_type": torch.randint(4, (NODES,), generator=generator),
        "pos": torch.randn(NODES, 3, generator=generator),
        "normal": normal / normal.norm(dim=1, keepdim=True),
        "batch": torch.arange(NODES) // (NODES // 2),
        "z": torch.randint(1, 10, (ATOMS,), generator=generator),
    }


ARGUMENTS: dict[str, Any] = {
    "in_channels": WIDTH, "out_channels": WIDTH, "channels": WIDTH, "hidden_channels": WIDTH, "embedding_dim": WIDTH,
    "hidden_node_channels": WIDTH, "hidden_edge_channels": WIDTH, "num_layers": 2, "num_timesteps": 2, "K": 3,
    "alpha": 0.1, "num_relations": 4, "num_node_types": 4, "num_edge_types": 4, "edge_type_emb_dim": 16,
    "edge_attr_emb_dim": 16, "edge_dim": 16, "in_edge_channels": 16, "dim": 16, "kernel_size": 4, "filter_size": 3,
    "heads": 4, "first_aggr": True, "num_nodes": NODES, "space_dimensions": 4, "propagate_dimensions": 16, "k": 8,
    "metadata": (["node"], [("node", "to", "node")]), "num_graph_targets": 4,
    "aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"],
}  # fmt: skip
# Convolutions whose arguments are modules, or mean something else.
FIELDS: dict[str, Any] = {
    "GINConv": lambda: {"nn": _network()},
    "GINEConv": lambda: {"nn": _network(), "edge_dim": 16},
    "EdgeConv": lambda: {"nn": _network(2 * WIDTH)},
    "DynamicEdgeConv": lambda: {"nn": _network(2 * WIDTH)},
    "NNConv": lambda: {"nn": _network(16, WIDTH * 8), "out_channels": 8},
    "PointNetConv": lambda: {"local_nn": _network(WIDTH + 3), "global_nn": _network()},
    "PPFConv": lambda: {"local_nn": _network(WIDTH + 4), "global_nn": _network()},
    "PointTransformerConv": lambda: {"pos_nn": _network(3), "attn_nn": _network()},
    "PointGNNConv": lambda: {"mlp_h": _network(WIDTH, 3), "mlp_f": _network(WIDTH + 3), "mlp_g": _network()},
    "EGConv": lambda: {"aggregators": ["sum", "mean", "symnorm", "max", "std"], "num_heads": 4},
    "GPSConv": lambda: {"conv": _named("GCNConv", {})},
    "DirGNNConv": lambda: {"conv": _named("GCNConv", {"add_self_loops": False})},
    "XConv": lambda: {"dim": 3},
    "FiLMConv": lambda: {"num_relations": 1},
    "GATConv": lambda: {"out_channels": 16, "edge_dim": 16},
    "GATv2Conv": lambda: {"out_channels": 16, "edge_dim": 16},
    "TransformerConv": lambda: {"out_channels": 16},
    "SuperGATConv": lambda: {"out_channels": 16},
    "GCN2Conv": lambda: {"theta": 0.5, "layer": 1},
    "RGATConv": lambda: {
        "out_channels": 16,
        "attention_mechanism": "across-relation",
        "heads": 1,
        "attention_mode": "multiplicative-self-attention",
    },
    "HypergraphConv": lambda: {"heads": 1},
    "MeshCNNConv": lambda: {},
    "GENConv": lambda: {"learn_t": True},
    "SplineConv": lambda: {"dim": 3},
}


def _named(name: str, given: dict[str, Any]) -> nn.Module:
    """Return a convolution, its arguments by their names."""
    from torch_geometric.nn import conv

    kind = getattr(conv, name)
    parameters = inspect.signature(kind.__init__).parameters
    found = {key: value for key, value in ARGUMENTS.items() if key in parameters}
    if "deg" in parameters:
        found["deg"] = _degrees()
    found.update(given)
    module: nn.Module = kind(**found)
    return module


def _degrees() -> Tensor:
    return _values()["edge_index"][1].bincount(minlength=NODES).bincount()


_EDGE_FEATURES = ("CGConv", "GMMConv", "NNConv", "PDNConv", "HEATConv", "GINEConv", "GeneralConv")
# What a convolution reads of the edges beside their ends.
_WANTED = ("x_0", "edge_index", "hyperedge_index", "pos_edge_index", "neg_edge_index", "edge_type", "node_type", "pos",
           "normal")  # fmt: skip


def _convolution(name: str, dropout: float) -> tuple[nn.Module, dict[str, Any]]:
    base, _, aggregation = name.removesuffix(")").partition("(")
    given = FIELDS.get(base, dict)()
    module = _named(base, {**given, **({"aggr": aggregation} if aggregation else {})})
    taken = inspect.signature(module.forward).parameters
    values = _values()
    inputs = {key: values[key] for key in ("x", *_WANTED) if key in taken}
    if ("edge_attr" in taken and getattr(module, "edge_dim", None) is not None) or base in _EDGE_FEATURES:
        inputs["edge_attr"] = values["edge_attr"]
    if base == "SplineConv":
        inputs["edge_attr"] = values["edge_attr"][:, :3]
    if base == "MeshCNNConv":
        inputs["edge_index"] = torch.stack([values["edge_index"][0, : NODES * 4] % NODES, torch.arange(NODES * 4) // 4])
    if base == "DynamicEdgeConv" or "x_dict" in taken or base == "AntiSymmetricConv":
        inputs = {"x": values["x"], **({} if base == "DynamicEdgeConv" else {"edge_index": values["edge_index"]})}
    if base == "FiLMConv":
        inputs.pop("edge_type", None)
    return Between(module, dropout), inputs


def _model(name: str, dropout: float) -> tuple[nn.Module, dict[str, Any]]:
    import torch_geometric.nn as geometric

    kind = getattr(geometric, name)
    parameters = inspect.signature(kind.__init__).parameters
    values = _values()
    defaults = {key: value for key, value in ARGUMENTS.items() if key in parameters}
    given = {**defaults, "out_channels": CLASSES, "dropout": dropout, **MODEL_FIELDS.get(name, {})}
    keeps_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    own = MODEL_FIELDS.get(name, {})
    found = {key: value for key, value in given.items() if key in parameters or (keeps_all and key in own)}
    for key in parameters:
        if key.endswith("dropout"):
            found[key] = dropout
    if name == "PNA":
        found["deg"] = _degrees()
    if name == "SchNet":
        found["interaction_graph"] = _near
    module: nn.Module = kind(**found)
    taken = inspect.signature(module.forward).parameters
    inputs = {key: values[key] for key in ("x", "edge_index", "pos_edge_index", "neg_edge_index") if key in taken}
    if "z" in taken:
        inputs = {"z": values["z"], "pos": 2 * values["pos"][:ATOMS], "batch": torch.arange(ATOMS) // (ATOMS // 2)}
    elif name in ("AttentiveFP", "NeuralFingerprint", "SGFormer", "Polynormer"):
        inputs["batch"] = values["batch"]
    if name == "AttentiveFP":
        inputs["edge_attr"] = values["edge_attr"]
    return module, inputs


def _near(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edges within each molecule, with their lengths: no neighbour search is installed with PyG itself."""
    apart = (batch[:, None] != batch[None]) | torch.eye(len(batch), dtype=torch.bool)
    edges = (~apart).nonzero().T
    return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=1)


def build(architecture: str, head: str, dropout: float) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model or convolution of PyTorch Geometric, and a graph."""
    torch.manual_seed(0)
    module, inputs = (_model if head == "model" else _convolution)(architecture, dropout)
    with torch.no_grad():
        module(**inputs)  # sizes what is lazy
    torch.manual_seed(0)
    return module, inputs

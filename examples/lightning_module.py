"""Lightning: one callback more, which covers the loss of ``training_step`` too."""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pyactcomp.integrations.lightning import Compression


class Classifier(lightning.LightningModule):
    """A transformer encoder that tells which of ten tokens a sequence has most of."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        block = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers)
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        tokens, labels = batch
        loss = F.cross_entropy(self.head(self.encoder(self.embed(tokens)).mean(1)), labels)
        print(f"step {self.global_step}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Fit, and print the report of the first step."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--length", type=int, default=128)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--steps", type=int, default=8)
    arguments = options.parse_args()

    torch.manual_seed(0)
    tokens = torch.randint(10, (arguments.batch * arguments.steps, arguments.length))
    labels = F.one_hot(tokens, 10).sum(1).argmax(1)
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=arguments.batch)

    compression = Compression(mode="int8")
    trainer = lightning.Trainer(
        max_epochs=1,
        callbacks=[compression],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(arguments.width, arguments.layers), loader)
    print(compression.report)


if __name__ == "__main__":
    main()

"""Trains a small model on the CPU, and looks up its words one by one in every step."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
VOCABULARY = {f"w{number}": number for number in range(500)}
TEXTS = [[f"w{(7 * row + place) % 500}" for place in range(64)] for row in range(32)]


def load() -> torch.Tensor:
    """A batch of word numbers, shape (32, 64), looked up word by word in every step."""
    batch = torch.zeros(32, 64, dtype=torch.int64)
    for row, text in enumerate(TEXTS):
        for place, word in enumerate(text):
            batch[row, place] = VOCABULARY[word]
    return batch


model = nn.Sequential(nn.Embedding(500, 64), nn.Flatten(), nn.Linear(64 * 64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
targets = torch.arange(32) % 10
while True:
    loss = nn.functional.cross_entropy(model(load()), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

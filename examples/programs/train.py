"""Trains a model without any call of a profiler: ``nsys-analyze run -- python examples/programs/train.py``."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(d_model=128, nhead=4, dim_feedforward=512, batch_first=True)
model = nn.Sequential(nn.Embedding(1000, 128), nn.TransformerEncoder(layer, num_layers=4), nn.Linear(128, 1000))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters())
criterion = nn.CrossEntropyLoss()
texts = torch.randint(1000, (512, 65))  # (samples, S + 1)

for epoch in range(10):
    for (tokens,) in DataLoader(TensorDataset(texts), batch_size=16, shuffle=True):  # (B, S + 1)
        tokens = tokens.to(device)
        logits = model(tokens[:, :-1])  # (B, S, V)
        loss = criterion(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")

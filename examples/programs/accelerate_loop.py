"""Trains a model with accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=not torch.cuda.is_available())
d = 2048 if torch.cuda.is_available() else 64
model = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU(), nn.Linear(4 * d, d))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = DataLoader(TensorDataset(torch.randn(2048, d)), batch_size=64)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for _ in range(2):
    for (x,) in data:
        with accelerator.accumulate(model):
            loss = (model(x) - x).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
print("end")

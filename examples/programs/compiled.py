"""Trains a compiled model."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
d = 1024 if device == "cuda" else 32
net = nn.Sequential(*(nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.LayerNorm(d)) for _ in range(4))).to(device)
model = torch.compile(net, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(30):
    loss = model(torch.randn(256, d, device=device)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("end")

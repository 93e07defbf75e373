"""Accumulates gradients over four passes for each step, with GradScaler."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
d = 2048 if device == "cuda" else 32
model = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d)).to(device)
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(device, enabled=device == "cuda")
for i in range(100):
    x = torch.randn(64, d, device=device)
    with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
        loss = model(x).float().pow(2).mean() / 4
    scaler.scale(loss).backward()
    if i % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
print("end")

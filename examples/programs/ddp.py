"""Trains with DistributedDataParallel: ``torchrun --nproc-per-node 2 ddp.py``."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

gpu = torch.cuda.is_available()
rank = int(os.environ["RANK"])
dist.init_process_group("nccl" if gpu else "gloo")
device = f"cuda:{rank}" if gpu else "cpu"
if gpu:
    torch.cuda.set_device(rank)
d = 1024 if gpu else 32
layer = nn.TransformerEncoderLayer(d, 8, 4 * d, batch_first=True, dropout=0.0)
net = nn.Sequential(nn.Embedding(1000, d), nn.TransformerEncoder(layer, 8 if gpu else 2), nn.Linear(d, 1000)).to(device)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), fused=gpu)
for _ in range(30):
    tokens = torch.randint(1000, (8 if gpu else 2, 256 if gpu else 16), device=device)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("end")
dist.destroy_process_group()

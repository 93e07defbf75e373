"""Trains a transformer in a plain loop."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
big = device == "cuda"
d, layers, batch = (1024, 12, 16) if big else (64, 2, 2)
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(d), nn.MultiheadAttention(d, 8, batch_first=True)
        self.norm2, self.mlp = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Embedding(1000, d),
            nn.ModuleList(Block() for _ in range(layers)),
            nn.Linear(d, 1000),
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), fused=big)
for _ in range(30):
    tokens = torch.randint(1000, (batch, 256), device=device)
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("end", round(loss.item(), 3))

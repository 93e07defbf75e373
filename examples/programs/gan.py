"""Trains two models with two optimizers."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
d = 2048 if device == "cuda" else 32
generator, discriminator = (nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, n)).to(device) for n in (d, 1))
of_generator, of_discriminator = torch.optim.Adam(generator.parameters()), torch.optim.Adam(discriminator.parameters())
for _ in range(30):
    z = torch.randn(64, d, device=device)
    of_discriminator.zero_grad()
    (discriminator(generator(z).detach()).mean() - discriminator(torch.randn(64, d, device=device)).mean()).backward()
    of_discriminator.step()
    of_generator.zero_grad()
    (-discriminator(generator(z)).mean()).backward()
    of_generator.step()
print("end")

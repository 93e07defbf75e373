"""Trains a convolutional network."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
w = 128 if device == "cuda" else 8
layers, c = [], 3
for i in range(6):
    layers += [nn.Conv2d(c, w, 3, padding=1, stride=1 + i % 2), nn.BatchNorm2d(w), nn.ReLU()]
    c = w
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(w, 10)).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(30):
    x, y = torch.randn(32, 3, 64, 64).to(device), torch.randint(10, (32,)).to(device)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
print("end")

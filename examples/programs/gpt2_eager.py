"""Trains GPT-2 of transformers with unfused attention."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

device = "cuda" if torch.cuda.is_available() else "cpu"
big = device == "cuda"
torch.manual_seed(0)
config = GPT2Config(attn_implementation="eager") if big else GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100)
model = GPT2LMHeadModel(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(30):
    tokens = torch.randint(config.vocab_size, (8, 256) if big else (2, 16), device=device)
    with torch.autocast(device, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print("end", round(loss.item(), 3))

"""Generates text with GPT-2 of transformers."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = (
    GPT2LMHeadModel(GPT2Config() if device == "cuda" else GPT2Config(n_embd=64, n_layer=2, n_head=2)).to(device).eval()
)
for _ in range(20):
    out = model.generate(
        torch.randint(1000, (1, 16), device=device), max_new_tokens=16, do_sample=False, pad_token_id=0
    )
print("end", out.shape)

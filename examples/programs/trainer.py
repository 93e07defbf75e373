"""Trains a model with the Trainer of transformers and gradient accumulation."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

big = torch.cuda.is_available()


class Data(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        t = torch.randint(1000, (512 if big else 32,), generator=g)
        return {"input_ids": t, "labels": t}


model = GPT2LMHeadModel(
    GPT2Config(vocab_size=1000) if big else GPT2Config(vocab_size=1000, n_embd=64, n_layer=2, n_head=2)
)
args = TrainingArguments(
    "trainer_output",
    per_device_train_batch_size=8,
    max_steps=40,
    bf16=big,
    report_to=[],
    save_strategy="no",
    logging_steps=1000,
    disable_tqdm=True,
    gradient_accumulation_steps=2,
    use_cpu=not big,
)
Trainer(model=model, args=args, train_dataset=Data()).train()
print("end")

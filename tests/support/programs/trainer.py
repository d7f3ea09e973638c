"""A tiny language model under transformers' Trainer; started once per process."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
tokens = torch.randint(0, 32, (32, 8))


class Lines(Dataset):
    def __len__(self):
        return len(tokens)

    def __getitem__(self, index):
        return {"input_ids": tokens[index], "labels": tokens[index]}


config = GPT2Config(
    vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    bos_token_id=0, eos_token_id=1,
)  # fmt: skip
model = GPT2LMHeadModel(config).double()
size = int(__import__("os").environ.get("WORLD_SIZE", 1))
settings = TrainingArguments(
    output_dir=sys.argv[1], max_steps=4, per_device_train_batch_size=8 // size, learning_rate=0.01, report_to=[],
    save_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True, logging_steps=2, lr_scheduler_type="constant",
    optim="sgd",  # the library computes its loss in float32, and what adapts would show it
)  # fmt: skip
trainer = Trainer(model=model, args=settings, train_dataset=Lines())
trainer.train()
weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
print(f"rank {settings.process_index} of {settings.world_size} took {trainer.state.global_step} steps")

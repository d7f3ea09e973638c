"""A causal language model of transformers, made from its configuration, with its collator and its own loss.

transformers is no dependency: without it these tests are skipped, and stand-ins with the same interface run in the table of
programs ("model with its own loss, ..."). Nothing is downloaded. transformers computes its
loss in float32 whatever the model's dtype, which an adaptive optimizer would make visible where a gradient is nearly zero:
so SGD trains here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.kernels import Kernel
from tests.support.processes import ROOT, Session

transformers = pytest.importorskip("transformers")

#: The first of the three cells; the second makes the loader, the third trains.
CELL = """
from transformers import AutoModelForCausalLM, GPT2Config


def Gpt():
    return AutoModelForCausalLM.from_config(GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def step(model, batch):
    return model(**batch).loss


def step_of_padded(model, batch):
    tokens = (batch["labels"][:, 1:] != -100).sum()
    return model(**batch).loss * tokens, tokens
"""


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(31)} | {"[PAD]": 31}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="[PAD]"
    )


def loader(lengths: tuple[int, ...], container: type | None) -> DataLoader[Any]:
    """Texts of these lengths in turn; the collator gives a BatchEncoding."""
    generator = torch.Generator().manual_seed(1)
    texts = [
        {"input_ids": torch.randint(0, 31, (lengths[k % len(lengths)],), generator=generator).tolist()}
        for k in range(22)
    ]
    collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    collate = collator if container is None else lambda samples: container(collator(samples))
    return DataLoader(texts, 8, collate_fn=collate)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = Session(tmp_path_factory.mktemp("huggingface"), num_workers=2)
        try:
            yield made
        finally:
            made.close()


def plain(step: str, data: Any) -> torch.nn.Module:
    cell: dict[str, Any] = {}
    exec(CELL, cell)
    torch.manual_seed(0)
    model = cell["Gpt"]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    for batch in data:
        optimizer.zero_grad()
        outcome = cell[step](model, batch)
        loss = outcome[0] / outcome[1] if isinstance(outcome, tuple) else outcome
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("container", [dict, None], ids=["dict", "BatchEncoding"])
@pytest.mark.parametrize(("mode", "settings"), [("data", {}), ("zero", {"zero_stage": 1}), ("zero", {"zero_stage": 3}),
                                                ("tensor", {})], ids=str)  # fmt: skip
@pytest.mark.parametrize(("step", "lengths"), [("step", (7,)), ("step_of_padded", (3, 7, 5))], ids=["equal", "padded"])
def test_three_cells(
    session: Session, container: type | None, mode: str, settings: dict[str, Any], step: str, lengths: tuple[int, ...]
) -> None:
    session.ensure(2)
    session.orch.set_mode(mode, **settings)
    session.orch.share(CELL, "cell")
    session.orch.register_model("Gpt")
    run = session.orch.start_training(
        loader(lengths, container),
        step=step,
        optimizer="SGD",
        optimizer_args={"lr": 1e-3},
        fresh=True,
        progress=False,
    )
    ours, theirs = run.model().state_dict(), plain(step, loader(lengths, container)).state_dict()
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-9


#: The second cell of the notebook.
DATA = """
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

words = {f"w{number}": number for number in range(31)} | {"[PAD]": 31}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="[PAD]")
texts = [{"input_ids": [(start + step) % 31 for step in range(7)]} for start in range(22)]
train = DataLoader(texts, 8, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
"""


@pytest.mark.timeout(400)  # transformers is imported in three processes
def test_three_cells_of_a_real_notebook_train_and_show_the_loss() -> None:
    kernel = Kernel(PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    try:
        kernel.run("%load_ext guava_nb\n%guava_up --local 2", 120)
        kernel.run("%%guava_share --name gpt" + CELL)
        kernel.run(DATA)
        words = "--optimizer AdamW --lr 0.01 --epochs 8"
        shown = kernel.run(f"%guava_train --model Gpt --step step --data train --val train {words} --out own", 120)
        assert "validation" in shown and "0 lost" not in shown, shown
        losses = [float(text) for text in kernel.run("[r['loss'] for r in own.history]").strip(" []\n").split(",")]
        assert len(losses) == 24 and losses[-1] < losses[0] / 1.2, losses
    finally:
        kernel.close()

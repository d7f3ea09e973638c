"""Every option that a message names can be given: its flag is one of a magic or a command, its name one of a call."""

from __future__ import annotations

import dataclasses
import inspect
import re

from guava_nb import DistributedConfig, Orchestrator
from guava_nb.spec.training_options import option_infos
from tests.support.messages import texts

FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")
#: A keyword argument and, in brackets, the word of a line that says the same.
BOTH = re.compile(r"\b([a-z]\w*)=[^ (]* \(--([a-z][a-z0-9-]*)")
#: Words of other programs: pip, tensorboard, torchrun, ray, docker, kubectl, srun, squeue and ipykernel.
OTHERS = {
    *("force-reinstall", "logdir", "nproc-per-node", "head", "ipc", "from-file", "kill-on-bad-exit", "user", "ip"),
    "transport",
}
#: Flags of modes, which settings have other words for.
MODE = {"zero": "zero_stage", "schedule": "pipeline_schedule", "plan": "tensor_plan", "split": "pipeline_split"}


def flags() -> set[str]:
    declared = {text[2:] for text, _ in texts() if re.fullmatch(r"--[a-z][a-z0-9-]*", text)}
    return declared | {one.flag for one in option_infos() if one.flag}


def test_every_flag_that_a_message_names_exists() -> None:
    known = flags() | OTHERS
    unknown = {(flag, place) for text, place in texts() for flag in FLAG.findall(text) if flag not in known}
    assert not unknown


def test_a_keyword_and_the_flag_beside_it_are_the_same_option() -> None:
    options = {one.name: one.flag for one in option_infos()}
    calls = (
        Orchestrator.validate,
        Orchestrator.predict,
        Orchestrator.generate,
        Orchestrator.register_model,
        Orchestrator.set_mode,
    )
    others = {name for call in (Orchestrator, *calls) for name in inspect.signature(call).parameters}
    others |= {field.name for field in dataclasses.fields(DistributedConfig)} | {"dp", "pp", "tp", "zero_stage"}
    pairs = [(name, flag, place) for text, place in texts() for name, flag in BOTH.findall(text)]
    assert len(pairs) > 20
    wrong = [
        (name, flag, place) for name, flag, place in pairs
        if (options.get(name) or flag) != flag or (name not in options and name not in others and name not in MODE.values())
    ]  # fmt: skip
    assert not wrong

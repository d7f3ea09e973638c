"""What a run consists of, in its mode: its states, its batches, and the steps of whole replicas or of a group."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import nn

from guava_nb.cluster.traffic import NOTHING, Traffic
from guava_nb.data.codec import dtype_name, pack
from guava_nb.data.split import RowSplitter
from guava_nb.forecast.batch_bytes import training_batches, validation_batches
from guava_nb.forecast.forecast import Parts
from guava_nb.forecast.run_facts import HASH, Exchanged, RunFacts
from guava_nb.nested import leaves, map_leaves
from guava_nb.parallel.module_state import unheard
from guava_nb.protocol import messages
from guava_nb.protocol.tensor_bounds import ITEM_BYTES
from guava_nb.replica.optimizer import build_optimizer
from guava_nb.replica.state_dict import weights_digest
from guava_nb.training.first_step_check import (
    digest_of,
    first_rows,
    found_before,
    has_whole_twin,
    is_looked_at_whole,
    later_checks,
    weights_of_pieces,
    weights_to_send,
)
from guava_nb.training.step_check.findings import Question

__all__ = ["parts_of"]

_KIND = "cpu, torch 2.0.0"
#: What a tensor's record takes more than that of an empty one: its shape, and where it lies.
_SPEC_BYTES = 14


def parts_of(run: RunFacts) -> Parts:
    """Return what the run consists of.

    Raises:
        ConfigError: the model cannot be cut, or there is no batch to look at where one is needed.
    """
    if run.spec.parallel is None:
        exchanged = Exchanged(_star_step(run), spread=run.workers == 1)
    else:
        from guava_nb.forecast.group_bytes import group_exchange  # torch's parallel libraries cost a second to load

        exchanged = group_exchange(run)
    plan, after = run.plan, _trained_state(run)
    return Parts(
        start=_starting(run, after) * run.workers + exchanged.joining + _step_checks(run),
        step=exchanged.step,
        train=training_batches(run, exchanged.batch),
        accumulation=plan.batches_per_exchange,
        epochs=plan.epochs_left(),
        validation=validation_batches(run, exchanged.looked),
        val_interval=plan.val_interval and math.ceil(plan.val_interval / plan.sync_every),
        state=NOTHING if run.at_orchestrator else _coming_state(run, after) + exchanged.gathering,
        state_every=tuple(
            math.ceil(every / plan.sync_every) for every in (plan.snapshot_every_steps, plan.save_every_steps) if every
        ),
        each_epoch=plan.snapshot_every_steps is None and exchanged.spread,
        ends_with_state=not run.at_orchestrator,
        done=math.ceil(plan.steps_done / plan.sync_every),
    )


def _star_step(run: RunFacts) -> Traffic:
    """Return what a step takes beside its batches."""
    commit = run.out(messages.CommitStep, commit=messages.Commit(1.5, False))
    report = run.typical(messages.ShardReport, gradient_square=1.5) if run.solo and not run.spec.lockstep else None
    done = run.back(messages.StepApplied, learning_rate=1.5, ready=report) + run.hashes
    if run.solo:
        return done + run.acks(1, 1) if report else done + run.back(messages.ShardReport) + commit + run.acks(2, 2)
    busy = sum(weight > 0 for weight in run.plan.weights(range(run.workers)))
    total = run.back(messages.ShardReport) * busy + run.out(messages.StepWithoutShard) * (run.workers - busy)
    total = total + (done + run.acks(2, 2)) * run.workers
    layout = run.replica_set.master.layout
    buckets = [(bucket, bucket.numel) for bucket in layout.buckets]
    if layout.buffers is not None:
        buckets.append((layout.buffers, run.moving_elements()))
    for bucket, numel in buckets:
        up, known = bucket.form(numel), {"bucket": bucket.index, "present": bytes(bucket.present_bytes)}
        total = total + run.back(messages.GradientBucket, _bytes(up), **known, tensor=up) * busy
        if bucket.is_forwarded(busy):  # each gets the messages of all others
            for others, members in ((busy - 1, busy), (busy, run.workers - busy)):
                down = messages.FlatTensor("uint8", up.numel * others)
                told = {"tensor": down, "shards": busy, "forwarded": tuple(range(others))}
                total = total + run.out(messages.SumBucket, _bytes(down), **known, **told) * members
            continue
        # New values of parameters go down as they are.
        down = messages.FlatTensor(dtype_name(bucket.dtype), numel) if run.at_orchestrator else bucket.form_down(numel)
        total = total + run.out(messages.SumBucket, _bytes(down), **known, tensor=down) * run.workers
    return total if buckets else total + commit * run.workers


def _bytes(tensor: messages.FlatTensor) -> int:
    return tensor.numel * ITEM_BYTES[tensor.dtype]


def _step_checks(run: RunFacts) -> Traffic:
    """Return what one worker is asked before the first step and later ones; where it finds something it is asked once more."""
    first = next((batch for group in run.train.groups for batch in group if batch.rows > 1), None)
    weights = weights_of_pieces(run.spec, run.plan.weights(range(run.workers)))
    is_cut = len(weights) > 1
    has_question = is_cut or has_whole_twin(run.replica_set)
    if run.plan.check == "off" or run.spec.rounds is not None or first is None or not has_question:
        return NOTHING
    splitter = RowSplitter(run.plan.split_fn, run.plan.feed.reading)
    if splitter.problem:
        return NOTHING
    question, few = Question(first, first.batch, weights, splitter), first_rows(first.rows)
    finding = messages.Finding("same", precision="fp32", parameter="layer.weight", compared=(-100,))
    answer = run.back(messages.StepChecked, finding=finding)
    is_known = found_before(run.replica_set, digest_of(run.replica_set, first.batch, weights), run.plan.feed.data_set)
    steps = run.plan.steps_left(run.replica_set.step)
    # Only powers of 4 are, and a run may have millions of steps.
    looked = (4**k - 1 for k in range(1, 32) if 4**k - 1 < (4096 if steps is None else steps))
    whole = (is_known is None) + sum(map(is_looked_at_whole, looked))
    asked = [(few, True, later_checks(steps) + (is_known is None))]
    asked += [(first.rows, False, whole)] if question.is_cut_finer(few) else []
    asked = asked if is_cut else [(first.rows, False, 1)]
    present, total = weights_to_send(run.replica_set), NOTHING
    for rows, fine, times in asked:
        message, buffers = question.message(run.replica_set.run_id, 1, rows, fine, present)
        total = total + (run.sent(message, sum(buffer.nbytes for buffer in buffers)) + answer + run.acks(1, 1)) * times
    return total


# ---------------------------------------------------------------------------------------------------------------- states


def _state_bytes(state: Any) -> tuple[messages.Tree, int]:
    """Return the record of a state and the bytes of its tensors, which may be on torch's meta device."""
    tensors = {id(leaf): leaf for leaf in leaves(state)}.values()
    tree, buffers = pack(map_leaves(state, lambda tensor: torch.empty(0, dtype=tensor.dtype)), "state")
    nbytes = sum(tensor.numel() * tensor.element_size() + _SPEC_BYTES for tensor in tensors)
    return tree, nbytes + sum(buffer.nbytes for buffer in buffers)


def _trained_state(run: RunFacts) -> dict[str, Any]:
    """Return the state of the model after a step, as to sizes: its optimizer's on the meta device where that goes."""
    state = run.replica_set.master.state()
    if run.spec.rounds is not None and run.spec.rounds.outer_momentum:
        trained = [(name, value) for name, value in run.model.named_parameters() if value.requires_grad]
        state["outer"]["momentum"] = {name: torch.empty_like(value, device="meta") for name, value in trained}
    for device in ("meta", "cpu"):  # not every optimizer computes on the meta device
        with contextlib.suppress(Exception):
            state["optimizer"] = _stepped(run, device)
            return state
    named = run.model.named_parameters()  # one that takes its steps elsewhere: as large as Adam's
    state["optimizer"] = {name: [torch.empty_like(p, device="meta") for _ in range(2)] for name, p in named}
    return state


def _stepped(run: RunFacts, device: str) -> Any:
    clones = {
        name: nn.Parameter(torch.zeros_like(value, device=device), requires_grad=value.requires_grad)
        for name, value in run.model.named_parameters()
    }
    optimizer = build_optimizer(run.replica_set.spec.optimizer, list(clones.items()), run.resolve)
    for value in clones.values():
        value.grad = torch.zeros_like(value) if value.requires_grad else None
    with unheard():
        optimizer.step()
    return optimizer.state_dict()


def _coming_state(run: RunFacts, after: Any) -> Traffic:
    """Return what it takes to fetch the whole state from one worker."""
    tree, nbytes = _state_bytes(after)
    return run.back(messages.State, nbytes, state=tree) + run.out(messages.FetchState) + run.acks(1, 1)


def _starting(run: RunFacts, after: Any) -> Traffic:
    """Return what it takes to have one worker build the run and load its state; one that builds the same is sent no weights."""
    master = run.replica_set.master
    is_built = run.replica_set.from_seed and not run.trained and bool(weights_digest(master.model))
    tree, nbytes = _state_bytes(after if run.trained else master.state(model=not is_built))
    total = run.out(messages.Prepare, cells=run.replica_set.cells, spec=run.spec)
    total = total + run.back(messages.Prepared, layout=HASH)
    total = total + run.out(messages.LoadState, nbytes, step=-1, state=tree) + run.acks(2, 2)
    total = total + run.back(messages.StateLoaded, step=-1, parameter_hash=HASH, device_kind=_KIND)
    if run.spec.cache is not None:
        total = total + run.back(messages.CacheHeld, digest=bytes(16), budget_bytes=run.spec.cache.budget_bytes)
    return total

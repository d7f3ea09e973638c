"""What a run consists of, in its mode; here is also what whole replicas exchange that meet at the orchestrator."""

from __future__ import annotations

from guava_nb.cluster.traffic import NOTHING, Traffic
from guava_nb.data.codec import dtype_name
from guava_nb.forecast.batch_bytes import training_batches, validation_batches
from guava_nb.forecast.forecast import Parts
from guava_nb.forecast.run_facts import Exchanged, RunFacts
from guava_nb.forecast.state_bytes import coming_state, starting, trained_state
from guava_nb.protocol import messages

__all__ = ["parts_of"]


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
    plan, after = run.plan, trained_state(run)
    begun = plan.start.batches / plan.feed.batches_per_epoch if plan.feed.batches_per_epoch else 0.0
    return Parts(
        start=starting(run, after) * run.workers + exchanged.joining,
        step=exchanged.step,
        train=training_batches(run, exchanged.batch),
        accumulation=plan.accumulation_steps,
        epochs=(1.0 - begun, *[1.0] * (plan.num_epochs - plan.start.epoch - 1)),
        validation=validation_batches(run, exchanged.looked),
        val_interval=plan.val_interval,
        state=NOTHING if run.at_orchestrator else coming_state(run, after) + exchanged.gathering,
        state_every=tuple(every for every in (plan.snapshot_every_steps, plan.save_every_steps) if every),
        each_epoch=plan.snapshot_every_steps is None and exchanged.spread,
        ends_with_state=not run.at_orchestrator,
    )


def _star_step(run: RunFacts) -> Traffic:
    """Return what a step takes beside its batches."""
    report = run.typical(messages.Ready) if run.solo else None
    done = run.back(messages.Committed, learning_rate=1.5, ready=report) + run.hashes
    if run.solo:
        return done + run.acks(1, 1)
    busy = sum(weight > 0 for weight in run.plan.weights(range(run.workers)))
    total = run.back(messages.Ready) * busy + run.out(messages.StepInfo) * (run.workers - busy)
    total = total + (done + run.acks(2, 2)) * run.workers
    layout = run.replica_set.master.layout
    buckets = [(bucket, bucket.numel) for bucket in layout.buckets]
    if layout.buffers is not None:
        buckets.append((layout.buffers, run.moving_elements()))
    for bucket, numel in buckets:
        tensor, present = messages.FlatTensor(dtype_name(bucket.dtype), numel), bytes(bucket.present_bytes)
        nbytes, known = numel * bucket.dtype.itemsize, {"bucket": bucket.index, "present": present, "tensor": tensor}
        total = total + run.back(messages.GradientBucket, nbytes, **known) * busy
        total = total + run.out(messages.SumBucket, nbytes, **known) * run.workers
    return total if buckets else total + run.out(messages.CommitStep, commit=messages.Commit(1.5, False)) * run.workers

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter
from guava_nb.protocol.messages import Factory, Finding, ParallelSpec, RunSpec
from guava_nb.training.step_check.findings import Question, about_hooks, verdict_on

SPEC = RunSpec(model=Factory("Net"), criterion=Factory("MSELoss"), step=None, optimizer=Factory("SGD"), scheduler=None)
STAGED = replace(SPEC, parallel=ParallelSpec(mode="pipeline", pp=2, micro_batches=2))


def asked(**changes):
    content = torch.arange(8)
    return Question(LoadedBatch(0, content, tuple(range(8)), 8), content, (1.0, 1.0), RowSplitter(), **changes)


@pytest.mark.parametrize(
    ("spec", "question", "finding", "words", "is_clean"),
    [
        (SPEC, asked(), Finding("same"), "the first batch.*loss and gradient are equal", True),
        (SPEC, asked(step=7), Finding("same"), "of the batch of step 8, whole", True),
        (SPEC, asked(step=1, news="part y has"), Finding("same"), "step 2, because part y has", True),
        (SPEC, asked(), Finding("same", kept=("model.it",)), "are equal", True),
        (
            SPEC,
            asked(is_validated=True),
            Finding("same", kept=("m.k",), kept_looking=("m.k",)),
            "in a validation too",
            False,
        ),
        (
            SPEC,
            asked(),
            Finding("differs", unlike=("model.mean",)),
            "model.mean, which is no buffer.*register_buffer",
            False,
        ),
        (STAGED, asked(), Finding("same", kept=("m.it",)), "m.it, which is no buffer.*2 micro-batches", False),
        (STAGED, asked(), Finding("differs", unlike=("a", "b")), "a, b, which are no buffer.*2 micro-batches", False),
        (
            SPEC,
            asked(),
            Finding("differs", causes=("state",)),
            "with the same random numbers, gives different losses",
            False,
        ),
        (SPEC, asked(), Finding("differs", causes=("backward",)), "calls backward.* add that loss to the one", False),
        (SPEC, asked(), Finding("differs", causes=("randomness",)), "not drawn by torch's own", False),
        (SPEC, asked(), None, "was not made", False),
        (SPEC, asked(), Finding("same", written=("w",)), "are equal", True),
        (SPEC, asked(), Finding("differs", causes=("weights",)), "the root of a mean, say.*shares=.1, 0.", False),
        (STAGED, asked(), Finding("differs", causes=("weights",)), "together: take a mode without stages", False),
        (
            SPEC,
            asked(),
            Finding("differs", causes=("term",)),
            "penalty.*loss_sum . count . term, count.*shares=.1, 0.",
            False,
        ),
        (STAGED, asked(), Finding("differs", causes=("term",)), "penalty.*, or take a mode without stages", False),
        (
            replace(SPEC, augment=Factory("mixup")),
            asked(),
            Finding("differs", causes=("treated",)),
            "augment= compares the samples.*its share only: let the collate function do that .*shares=.1, 0.",
            False,
        ),
        (SPEC, asked(), Finding("differs", causes=("count",)), "do not add up.*return the count as it is, 0", False),
        (
            SPEC,
            asked(),
            Finding("differs", causes=("frequency",)),
            "leave scale_grad_by_freq out, or.*shares=.1, 0.",
            False,
        ),
        (STAGED, asked(), Finding("differs", causes=("frequency",)), "out, or take a mode without stages", False),
        (
            SPEC,
            asked(),
            Finding("differs", causes=("coupled",), moved=("seen", "mean")),
            "loss couples.*Or it depends on what the same forward has changed in the buffers seen, mean.*read them first",
            False,
        ),
    ],
)
def test_a_finding_is_told_as_it_is(spec, question, finding, words, is_clean):
    verdict = verdict_on(spec, question, "w0", 8, finding, "" if finding else "w0 was lost", 0.1)
    assert verdict.is_clean == is_clean
    assert __import__("re").search(words, verdict.sentence), verdict.sentence


@pytest.mark.parametrize(
    ("spec", "unlike", "words"),
    [
        (replace(SPEC, parallel=ParallelSpec(mode="zero", dp=2, zero_stage=3)), (), "a gathered copy"),
        (SPEC, ("w",), "'w' by the samples that it sees.*train with one worker"),
        (STAGED, ("w",), "for each micro-batch"),
    ],
)
def test_a_forward_that_writes_into_parameters_is_refused_where_that_is_lost_or_unlike(spec, unlike, words):
    finding = Finding("same", written=("v", "w"), written_unlike=unlike)
    verdict = verdict_on(spec, asked(), "w0", 8, finding, "", 0.1)
    assert verdict.is_refused and not verdict.is_clean
    assert __import__("re").search(words, verdict.sentence), verdict.sentence


def test_what_was_not_looked_at_is_told():
    verdict = verdict_on(SPEC, asked(), "w0", 4, Finding("same"), "", 0.1, "it does not fit the memory")
    assert verdict.is_clean and "4 of the 8 samples" in verdict.sentence
    assert (
        "Not all of the batch was looked at (it does not fit the memory), so what begins with more" in verdict.sentence
    )


def test_the_samples_around_the_news_are_asked_about():
    message, _ = asked(row=6).message("run-1", 1, 4, True)
    assert message.rows == (4, 2, 2)


def test_modules_with_hooks_of_the_user_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert about_hooks(model) == ""
    model = nn.utils.spectral_norm(model[0])  # torch's own hook
    assert about_hooks(model) == ""
    model.register_forward_hook(lambda module, args, output: None)
    assert about_hooks(model).startswith("The hooks on Linear are called by each worker with its own samples")


def verdict(spec, finding):
    return verdict_on(spec, asked(), "w1", 8, finding, "", 0.1)


def test_a_piece_without_a_loss_refuses_the_run_with_its_cause():
    nothing = verdict(STAGED, Finding("differs", causes=("coupled",), loss=(1.5, float("nan"))))
    assert (
        nothing.is_refused and "the loss is 1.5 whole and nan cut: some piece has too few samples" in nothing.sentence
    )
    assert "couples" not in nothing.sentence
    few = verdict(
        SPEC, Finding("piece failed", problem="TrainingError: 'norm' (BatchNorm1d) got one value per channel, ...")
    )
    assert few.is_refused and "a piece cannot be computed: 'norm' (BatchNorm1d) got" in few.sentence
    assert "split_fn" not in few.sentence


def test_a_policy_that_the_run_takes_is_said_and_no_difference():
    taken = verdict(SPEC, Finding("same", fits={"n": "first", "total": "sum"}))
    assert taken.is_clean and taken.record["policies"] == {"n": "first", "total": "sum"}
    assert "by n=first, total=sum, so this run takes that" in taken.sentence
    beside = verdict(SPEC, Finding("differs", buffers=("largest",), fits={"n": "first"}))
    assert not beside.is_clean and "Buffers largest" in beside.sentence and "by n=first" in beside.sentence
    staged = verdict(STAGED, Finding("same", moved=("n",), fits={"n": "first"}))
    assert not staged.is_clean and staged.record["policies"] == {} and staged.record["buffers"] == ["n"]

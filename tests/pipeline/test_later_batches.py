"""What the first batch does not show: values of several samples that matter in a later one."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parity import caught_warnings, check, fit, refused_by_both
from tests.pipeline.test_loss_scope import scope_of
from tests.workers import WorkerError, run
from tests.zoo.carried import Chain
from tests.zoo.oddities import InPlace

FOUR = {"pipeline_parallel_size": 2, "num_microbatches": 4}


class Scaled(Chain):
    """A scale of each sample. One without data has the mean of the others."""

    def forward(self, x):
        total, seen = x.abs().sum(1), (x != 0).sum(1)
        usual = total.sum() / seen.sum().clamp(min=1)
        return super().forward(x / torch.where(seen > 0, total / seen.clamp(min=1), usual)[:, None].detach())

    def loss(self, batch):
        return F.cross_entropy(self(batch["x"]) * 1.0, batch["y"])


class Counted(Chain):
    def loss(self, batch):
        each = F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
        return self.mean(each, batch["counts"] > 0)

    def mean(self, each, counts):
        return (each * counts).sum() / counts.sum()


class CountedInPython(Counted):
    def mean(self, each, counts):
        return (each * counts).sum() / counts.sum().item()


class CountedAhead(Counted):
    """Its weights are scaled before they meet a gradient."""

    def mean(self, each, counts):
        weights = counts / counts.sum()
        return (each * weights).sum()


class Share(Counted):
    """The mean of the mask is 1.0 in the first batch."""

    def mean(self, each, counts):
        return (each * counts).mean() / counts.float().mean()


class Rescaled(Counted):
    """A masked autoencoder of images divides the mask by its mean, in place."""

    def mean(self, each, counts):
        counts = counts.float()
        counts /= counts.mean()
        return (each * counts).mean()


class Selected(Counted):
    def mean(self, each, counts):
        return each[counts].mean()


class SelectedByIndex(Counted):
    def mean(self, each, counts):
        return each.index_select(0, counts.nonzero().squeeze(1)).mean()


class NotNan(Counted):
    def mean(self, each, counts):
        return torch.where(counts, each, torch.nan).nanmean()


class Capped(Counted):
    """The cap is above the loss of the first batch."""

    def mean(self, each, counts):
        return each.mean().clamp(max=9.0 if self.global_step == 0 else 1.05)


class Branches(Counted):
    """Another loss where few samples count."""

    def mean(self, each, counts):
        return each.mean() if counts.float().mean() > 0.7 else each.square().mean()


class Filtered(Counted):
    """Python leaves out samples, and takes the mean of the others."""

    def mean(self, each, counts):
        kept = [value for value, counted in zip(each, counts, strict=True) if counted]
        return sum(kept) / len(kept)


class FilteredRows(Filtered):
    def loss(self, batch):
        rows = [at for at, counted in enumerate(batch["counts"]) if counted]
        output = self(batch["x"])
        return F.cross_entropy(torch.stack([output[at] for at in rows]), batch["y"][rows])


class CountedInList(Counted):
    def mean(self, each, counts):
        return (each * counts).sum() / sum(counts.tolist())


class Hardest(Counted):
    def mean(self, each, counts):
        return each.mean() if self.global_step < 2 else each.topk(1).values.mean()


class HardestHalf(Counted):
    def mean(self, each, counts):
        return each.topk(len(each) // 2).values.mean()


class ZeroFirst(Chain):
    def loss(self, batch):
        output = self(batch["x"])
        return min(1.0, self.global_step / 2) * (F.cross_entropy(output, batch["y"]) + output.std(0).sum())


class LeavesOutLater(Chain):
    def loss(self, batch):
        labels = torch.where(batch["counts"] > 0, batch["y"], -100) if self.global_step else batch["y"]
        return F.cross_entropy(self(batch["x"]), labels)


class Normed(Chain):
    """Scales the gradient of a hidden state by its norm."""

    def forward(self, x):
        x = self.blocks[0](x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (0.01 / grad.norm()))
        return self.blocks[1:](x)


class NormedBehind(Chain):
    """The same behind the last block, where code also compares a number of all samples."""

    def loss(self, batch):
        x = self(batch["x"])
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (0.01 / grad.norm()))
        loss = F.cross_entropy(x, batch["y"])
        return loss if loss > -1.0 else 2 * loss


class OfAll(torch.autograd.Function):
    """Gives a gradient the norm 1; that of all of its elements together."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm()


class OfEach(OfAll):
    """Turns a gradient round, each of its elements by itself."""

    @staticmethod
    def backward(ctx, grad):
        return -grad.clamp(-0.1, 0.1)


class NormedByFunction(Chain):
    function = OfAll

    def forward(self, x):
        return self.blocks[1:](self.function.apply(self.blocks[0](x)))


class TurnedByFunction(NormedByFunction):
    function = OfEach


class Mixes(Chain):
    """Mixes its samples after a while, in front of the first block."""

    def forward(self, x):
        return super().forward(x if self.global_step < 2 else (x + x.flip(0)) / 2)


class Centres(Chain):
    """Centres its samples after a while, between two blocks."""

    def forward(self, x):
        x = self.blocks[:4](x)
        return self.blocks[4](x - x.mean(0) if self.training and self.global_step > 1 else x)


class Centring(nn.Linear):
    step = 0

    def forward(self, x):
        x = super().forward(x)
        return x - x.mean(0) if self.training and self.step else x


class CentresInside(Chain):
    """A block does so."""

    def __init__(self):
        super().__init__()
        self.blocks[3] = Centring(8, 8)

    def on_train_batch_start(self, batch, batch_idx):
        self.blocks[3].step = batch_idx


class Unlike(Chain):
    """A block treats its input by a number of all samples, which says the same for all of them."""

    class Branch(InPlace.Block):
        def forward(self, x):
            x = torch.tanh(self.inner(x))
            return x if x.mean() > -2.0 else -x

    def __init__(self):
        super().__init__()
        self.blocks[1] = self.Branch()


class AllFinite(Unlike):
    """The block counts what passes a test, to ask if all does: so do masks of Hugging Face."""

    class Branch(Unlike.Branch):
        def forward(self, x):
            finite = x.isfinite()
            return self.inner(x).tanh() if finite.sum() == finite.numel() else x


class One(Unlike):
    """The block does otherwise where one value is large: a batch has several, and a microbatch may have one."""

    class Branch(Unlike.Branch):
        def forward(self, x):
            return self.inner(x).tanh() if (x > 0).sum() == 1 else x


class Counts(Unlike):
    """A block follows a count of its calls, in a buffer."""

    class Branch(Unlike.Branch):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += self.training
            return torch.tanh(self.inner(x)) * (self.calls / 8)


class CountedAtLeast(Counted):
    """The count is 0 in the first batch, as in each part of it, or bounded there."""

    def mean(self, each, counts):
        return (each * counts).sum() / counts.sum().clamp(min=1)


class CountedAndMore(Counted):
    def mean(self, each, counts):
        return (each * counts).sum() / (counts.sum() + 1e-6)


class Chosen(Chain):
    """Labels that the step leaves out by other values of the batch."""

    def loss(self, batch):
        labels = batch["y"].clone()
        labels[batch["counts"] == 0] = -100
        return F.cross_entropy(self(batch["x"]), labels)


class ChosenInPlace(Chain):
    """Labels that the step leaves out in the batch's own tensor."""

    def loss(self, batch):
        labels = batch["y"]
        labels[labels == 7] = -100
        return F.cross_entropy(self(batch["x"]), labels)


class FromOne(Chain):
    """Labels that the step counts from 0, one of which it then leaves out."""

    def loss(self, batch):
        return F.cross_entropy(self(batch["x"]), batch["y"] - 1, ignore_index=-1)


class Weighted(Chain):
    """Weights of classes: the mean is over the weights of the labels that a batch has."""

    def loss(self, batch):
        return F.cross_entropy(self(batch["x"]), batch["y"], torch.tensor([0.2, 1.0, 3.0]))


class ByClasses(Chain):
    def loss(self, batch):
        return F.cross_entropy(self(batch["x"]), batch["y"]) / len(batch["y"].unique())


class Labelled(Chain):
    def loss(self, batch):
        return F.cross_entropy(self(batch["x"]), batch["y"].roll(0).clone())


class Routed(Chain):
    """A product of means of what early blocks give, too small for the gradient of the last one to show it."""

    def loss(self, batch):
        hidden = self.blocks[:2](batch["x"])
        loss = F.cross_entropy(self.blocks[2:](hidden), batch["y"])
        chosen, odds = F.one_hot(hidden.argmax(1), 8).float().mean(0), hidden.softmax(1).mean(0)
        return loss + 1e-4 * (chosen * odds).sum()


class Plain(Chain):
    """A mean over samples, with a value of all of them that is only logged, and one that takes no part in the loss."""

    def loss(self, batch):
        output = self(batch["x"])
        self.log("share", (output.argmax(1) == batch["y"]).float().mean())
        self.log("right", float((output.argmax(1) == batch["y"]).sum().item()))
        scale = torch.where(batch["x"].isnan(), 0.0, batch["x"]).mean()
        self.log("scaled", scale)
        places = F.one_hot(batch["y"], 3).argmax(1)
        return F.cross_entropy(output, batch["y"]) + F.cross_entropy(-output, places) + 0.1 * output.square().mean()


def of(kind, later, first=None):
    torch.manual_seed(1)
    batches = kind().batches(3)
    for at, batch in enumerate(batches):
        batch["counts"] = torch.ones(len(batch["y"]))
        (later if at else first or leave_alone)(batch)
    return kind(), batches


def leave_alone(batch):
    """Its labels are of several classes."""


def one_class(batch):
    batch["y"][:] = 1


def without_data(batch):
    batch["x"][1] = 0


def count_less(batch):
    batch["counts"][:3] = 0


def count_one_less(batch):
    batch["counts"][0] = 0


def count_none(batch):
    batch["counts"][:] = 0


def pad(batch):
    batch["y"][:3] = 7


def from_one(batch):
    batch["y"] += 1


def none_of(batch):
    from_one(batch)
    batch["y"][:3] = 0


def leave_out(batch):
    batch["y"][:3] = -100


def leave_out_evenly(batch):
    batch["y"][::2] = -100


class Divided(Chain):
    """A mean of all samples scales what passes blocks by. Those normalize, so they give the same values."""

    behind = 3

    def forward(self, x):
        x = self.blocks[: self.behind](x)
        x = x / x.abs().mean()
        return self.blocks[4](x + self.blocks[self.behind : 4](F.layer_norm(x, [8])))


class DividedEarly(Divided):
    behind = 1


@pytest.mark.parametrize("scope", ["auto", "batch"])
def test_a_value_of_all_samples_that_passes_blocks_by_is_of_the_full_batch(scope):
    check(partial(of, Divided, leave_alone), 2, {"num_microbatches": 4, "loss_scope": scope})
    with pytest.raises(WorkerError, match=r"behind 'blocks\.0' and ahead of the last block \(test_later_batches\.py:"):
        run(fit, partial(of, DividedEarly, leave_alone), {**FOUR, "loss_scope": scope}, world=2)


def test_the_remedy_of_a_value_that_passes_blocks_by():
    check(partial(of, DividedEarly, leave_alone), 2, {"num_microbatches": 1})


def test_a_value_that_other_samples_meet_is_said():
    scopes, said = run(scope_of, partial(of, Scaled, without_data), world=2)[0]
    assert scopes == {"microbatch"}
    assert any("other samples meet it ahead of the last block (test_later_batches.py:" in each for each in said)
    check(partial(of, Scaled, without_data), 2, {"num_microbatches": 1})


COUNTS = (Counted, CountedInPython, CountedAhead, Share, Rescaled, Chosen, Selected, SelectedByIndex, NotNan)


@pytest.mark.parametrize(
    ("kind", "later", "first"),
    [*((kind, count_less, None) for kind in COUNTS), (Weighted, leave_alone, one_class),
     (ByClasses, leave_alone, one_class),
     (Labelled, leave_out, leave_out_evenly), (ChosenInPlace, pad, None), (FromOne, none_of, from_one),
     (Capped, leave_alone, None), (Branches, count_less, None),
     *((kind, count_less, count_none) for kind in (CountedAtLeast, CountedAndMore)),
     (HardestHalf, leave_alone, None), (ZeroFirst, leave_alone, None)],
)  # fmt: skip
def test_what_weighs_the_loss_in_a_later_batch_trains_as_on_one_device(kind, later, first):
    """The loss of microbatches would be another one: it is computed on the full batch."""
    check(partial(of, kind, later, first), 2, {"num_microbatches": 4})


def _said(build, text, strategy=FOUR):
    """The number of warnings with `text` on this rank."""
    with caught_warnings() as texts:
        fit(build, strategy)
    return sum(text in each for each in texts)


@pytest.mark.parametrize(
    ("kind", "text", "remedy"),
    [
        (Hardest, "by operations that the first batch did not show (", "loss_scope"),
        (Normed, "or has a hook on a gradient: test_later_batches.py:", "num_microbatches"),
        (Unlike, "code compares a number of its samples", "num_microbatches"),
        (Counts, "each changes 'blocks.1.calls' once", "num_microbatches"),
        (One, "code compares a number of its samples", "num_microbatches"),
        (Mixes, "gives its first block a tensor that it computes from the batch", "num_microbatches"),
        (NormedByFunction, "or has a hook on a gradient: the backward of OfAll. ", "num_microbatches"),
        (LeavesOutLater, "did not show (", "loss_scope"),
        (Centres, "its first steps did not show (Mean, Sub)", "num_microbatches"),
        (CentresInside, "its first steps did not show (Mean, Sub)", "num_microbatches"),
    ],
)
def test_what_may_differ_in_a_later_batch_is_said(kind, text, remedy):
    assert sum(run(_said, partial(of, kind, leave_alone), text, world=2)) == 1
    for other in (AllFinite, TurnedByFunction):
        assert not any(run(_said, partial(of, other, leave_alone), text, world=2))
    check(partial(of, kind, leave_alone), 2, {"num_microbatches": 4, **REMEDIES[remedy]})


class Stops(Chain):
    """No gradient reaches the first blocks after two steps: their activation is detached, or they are frozen."""

    freezes = False

    def forward(self, x):
        x = self.blocks[:4](x)
        return self.blocks[4](x if self.freezes or self.global_step < 2 else x.detach())

    def on_train_batch_start(self, batch, batch_idx):
        self.blocks[:4].requires_grad_(not self.freezes or self.global_step < 2)


class Freezes(Stops):
    freezes = True


class Thaws(Stops):
    def on_train_batch_start(self, batch, batch_idx):
        self.blocks[:4].requires_grad_(self.global_step >= 2)

    def forward(self, x):
        return self.blocks(x)


class ThawsInItsStep(Thaws):
    def on_train_batch_start(self, batch, batch_idx):
        """Its step does."""

    def training_step(self, batch, batch_idx):
        self.blocks[1].requires_grad_(self.global_step >= 2)
        return super().training_step(batch, batch_idx)


class BeginsWithoutGradients(Stops):
    def forward(self, x):
        with torch.set_grad_enabled(self.training and self.global_step >= 2):
            x = self.blocks[:4](x)
        return self.blocks[4](x)

    def on_train_batch_start(self, batch, batch_idx):
        """Its weights may train."""


@pytest.mark.parametrize("kind", [Thaws, ThawsInItsStep])
def test_blocks_that_thaw_later_train_as_on_one_device(kind):
    check(partial(of, kind, leave_alone), 2, FOUR)


def test_blocks_that_begin_with_no_grad_are_refused_on_every_rank():
    with refused_by_both(r"needs a gradient .*call requires_grad_.False."):
        run(fit, partial(of, BeginsWithoutGradients, leave_alone), FOUR, world=2)


@pytest.mark.parametrize("scope", ["microbatch", "batch"])
def test_a_gradient_that_ends_in_a_later_step_is_said(scope):
    strategy, text = {**FOUR, "loss_scope": scope}, "a gradient that crossed a cut of the pipeline in the first step"
    said = [sum(run(_said, partial(of, kind, leave_alone), text, strategy, world=2)) for kind in (Stops, Freezes)]
    assert said == [1, 0]
    check(partial(of, Freezes, leave_alone), 2, strategy)


@pytest.mark.parametrize("kind", [Filtered, FilteredRows, CountedInList])
def test_rows_that_python_leaves_out_in_a_later_batch_are_said(kind):
    text = "from unequal numbers of values"
    assert sum(run(_said, partial(of, kind, count_one_less), text, world=2)) == 1
    assert not any(run(_said, partial(of, kind, leave_alone), text, world=2))
    check(partial(of, kind, count_one_less), 2, {"num_microbatches": 4, "loss_scope": "batch"})


def test_what_the_full_batch_has_is_not_said():
    build = partial(of, NormedBehind, leave_alone)
    text = "or has a hook on a gradient: test_later_batches.py:"
    scopes = [{**FOUR, "loss_scope": scope} for scope in ("microbatch", "batch")]
    assert [sum(run(_said, build, text, scope, world=2)) for scope in scopes] == [1, 0]
    check(build, 2, {"num_microbatches": 4, "loss_scope": "batch"})


REMEDIES = {"loss_scope": {"loss_scope": "batch"}, "num_microbatches": {"num_microbatches": 1}}


def test_labels_that_are_left_out_later_are_refused_on_every_rank():
    with refused_by_both(r"cross_entropy leaves out some labels .*loss_scope='batch'"):
        run(fit, partial(of, Labelled, leave_out), FOUR, world=2)
    check(partial(of, Labelled, leave_out), 2, {"num_microbatches": 4, "loss_scope": "batch"})
    check(partial(of, Labelled, leave_out_evenly), 2, {"num_microbatches": 4})


def test_means_of_what_blocks_give_that_meet_each_other_move_the_loss_to_the_full_batch():
    assert run(scope_of, partial(of, Routed, leave_alone), world=2)[0][0] == {"batch"}


def test_a_plain_mean_is_left_alone():
    scopes, said = run(scope_of, partial(of, Plain, without_data), world=2)[0]
    assert scopes == {"microbatch"} and not [each for each in said if "meet" in each]


class EveryOther(Chain):
    """Each second step leaves out a block, begins a term of an early block, or ends a gradient."""

    choice = "block"

    def training_step(self, batch, batch_idx):
        odd = self.number(batch_idx) % 2
        scale = self.blocks[0].scale if self.choice == "buffer" else self.scale
        x = early = self.blocks[0](batch["x"] * scale)
        if "log" in self.choice and not odd:
            self.log("early", early.mean())
        early = early * 2 if "ahead" in self.choice else early
        x = x if odd and self.choice == "block" else self.blocks[1](x)
        x = self.blocks[2:](x.detach() if odd and self.choice == "gradient" else x)
        loss = F.cross_entropy(x, batch["y"])
        if (odd and self.choice == "term") or "ahead" in self.choice:
            loss = loss + early.square().mean()
        if "weight" in self.choice and (odd or "each" in self.choice):
            loss = loss + odd * self.blocks[0][0].weight.square().sum()
        return loss + self(batch["x"]).square().mean() if odd and self.choice == "chain" else loss

    def number(self, batch_idx):
        return batch_idx


class EveryOtherStep(EveryOther):
    def number(self, batch_idx):
        return self.global_step


def chosen_by(kind, choice):
    module, batches = of(kind, leave_alone)
    module.choice = choice
    for owner in (module, module.blocks[0]):
        owner.register_buffer("scale", torch.ones(batches[0]["x"].shape[-1]))
    return module, batches


_LATE_WEIGHT = "reads a parameter or a buffer of a block that another stage owns, .*multiplied by 0"
CHOICES = [(EveryOther, each) for each in ("block", "term", "gradient")] + [(EveryOtherStep, "term")]
CHOICES += [(EveryOther, each) for each in ("log", "log ahead")]  # by tensors that its second step does not compute


@pytest.mark.parametrize(("kind", "choice"), CHOICES)
def test_choices_by_the_number_of_a_step_train_as_on_one_device(kind, choice):
    check(partial(chosen_by, kind, choice), 2, FOUR)
    if choice == "block":
        check(partial(chosen_by, kind, choice), 2, {"num_microbatches": 1})


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("chain", "calls the chain of blocks twice"),
        ("weight", _LATE_WEIGHT),
        ("buffer", "a buffer of a block .*Keep a buffer that other blocks need on the module around"),
    ],
)
def test_a_second_step_that_cannot_be_cut_is_refused_before_training(choice, words):
    with refused_by_both(words) as error:
        run(fit, partial(chosen_by, EveryOther, choice), FOUR, world=2)
    assert "in set_up" in str(error.value)


def test_a_weight_that_is_read_in_every_step_trains_as_on_one_device():
    check(partial(chosen_by, EveryOther, "weight in each"), 2, FOUR)


class Trims(Chain):
    """Cuts sequences to the longest one of its batch."""

    in_step = True

    def loss(self, batch):
        x = self.trimmed(batch) if self.in_step else batch["x"]
        return self.blocks(x).square().sum((1, 2)).mean()

    def trimmed(self, batch):
        return batch["x"][:, : int(batch["lengths"].max())]


class TrimsBefore(Trims):
    in_step = False

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": self.trimmed(batch)}


def sequences(kind):
    torch.manual_seed(1)
    lengths = torch.arange(2, 10).flip(0)
    return kind(), [{"x": torch.randn(8, 9, 6), "lengths": lengths - step} for step in range(3)]


@pytest.mark.parametrize("count", [1, 4])
def test_sequences_that_a_step_cuts_are_refused_before_training_and_its_remedy_trains(count):
    with refused_by_both("on_after_batch_transfer") as error:
        run(fit, partial(sequences, Trims), {**FOUR, "num_microbatches": count}, world=2)
    assert "in set_up" in str(error.value)
    check(partial(sequences, TrimsBefore), 2, {"num_microbatches": count})


class Adaptive(Chain):
    """Its head computes rows with rare labels apart, by blocks of their own."""

    def __init__(self):
        super().__init__()
        self.blocks[4] = nn.Linear(8, 8)
        self.rare = nn.AdaptiveLogSoftmaxWithLoss(8, 6, [2, 4])

    def loss(self, batch):
        return self.rare(self.blocks(batch["x"]).flatten(0, 1), batch["y"].flatten()).loss


def tokens():
    torch.manual_seed(1)
    return Adaptive(), [{"x": torch.randn(8, 20, 6), "y": torch.randint(6, (8, 20))} for _ in range(3)]


def test_rows_that_code_selects_between_blocks_of_a_loss_on_the_full_batch():
    with pytest.raises(WorkerError, match="They have the shapes of an earlier batch"):
        run(fit, tokens, FOUR, world=2)
    check(tokens, 2, {"num_microbatches": 1})


class Complains(Chain):
    def loss(self, batch):
        z = self.blocks[:3](batch["x"]) * 2
        if self.global_step and len(z) == 8:  # of the full batch, behind blocks that have run on microbatches
            raise RuntimeError("the user's own words")
        return F.cross_entropy(self.blocks[3:](z), batch["y"])


def test_an_error_of_the_user_s_own_is_not_said_to_be_of_shapes():
    with pytest.raises(WorkerError, match="the user's own words") as error:
        run(fit, partial(of, Complains, leave_alone), {**FOUR, "loss_scope": "batch"}, world=2)
    assert "shapes of an earlier batch" not in str(error.value)


class Turned(nn.Linear):
    """Its result lies in memory as that of an LSTM with batch_first."""

    def forward(self, x):
        return super().forward(x).t().contiguous().t()


class Drops(Chain):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Turned(6, 8), nn.Linear(8, 3))

    def loss(self, batch):
        return F.cross_entropy(self.blocks[1](F.dropout(self.laid(self.blocks[0](batch["x"])))), batch["y"])

    def laid(self, x):
        return x


class DropsLaid(Drops):
    def laid(self, x):
        return x.contiguous()


def test_dropout_of_a_result_that_is_not_contiguous_is_refused_and_its_remedy_trains():
    with refused_by_both(r"write dropout\(x.contiguous\(\)\)"):
        run(fit, partial(of, Drops, leave_alone), FOUR, world=2)
    run(fit, partial(of, DropsLaid, leave_alone), FOUR, world=2)

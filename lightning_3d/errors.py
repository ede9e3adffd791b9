"""The errors of this package, text for a terminal, and `explain_shard_errors` for torch's errors about shards.

A message contains the problem with its numbers, and the remedy. Configuration errors are raised before training starts.
"""

import linecache
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from traceback import walk_tb
from types import FrameType
from typing import Any

NO_PIPELINE = "pipeline_parallel_size=1"
"""The remedy where stages cannot do what one device can."""


class Lightning3DError(Exception):
    """Base of every error that this package raises on purpose."""

    rank: int | None = None
    """The rank that raised it first, where others raise it too."""


class ConfigurationError(Lightning3DError, ValueError):
    """Something the user set, or the module they gave, cannot be used."""


class LayoutError(ConfigurationError):
    """Degrees, ranks, schedule or ZeRO stage do not fit together or the world."""


def check_one_of(
    name: str, value: object, known: Sequence[object], error: type[ConfigurationError] = ConfigurationError
) -> None:
    """Raise `error` where an argument has a value that it does not take."""
    if value not in known:
        raise error(f"{name}={value!r} is not one of {', '.join(map(repr, known))}.")


class TensorPlanError(ConfigurationError):
    """A tensor plan matches nothing, or does not compute the same thing as the unsplit module."""


class PipelineSplitError(ConfigurationError):
    """The module cannot be cut into the stages asked for."""


class UnsupportedError(ConfigurationError):
    """A feature of the Trainer or the module that this layout cannot keep."""


class WritesError(UnsupportedError):
    """The step changes weights or other state by itself, in a way that this layout cannot keep."""


class PlannerError(ConfigurationError):
    """A question to the planner that has no answer."""


class RunError(Lightning3DError, RuntimeError):
    """Something went wrong while running."""


class PeerError(RunError):
    """Another rank died, hung or failed."""


class DivergenceError(RunError):
    """Ranks that must agree do not."""


OTHER_BLOCKS = (
    "Data ranks have called the blocks of the module in different orders in one step. Each has drawn which blocks to"
    " skip (LayerDrop, stochastic depth), its data has chosen them, or some called one in a transform of torch.func"
    " (jvp, vmap). ZeRO gathers and adds shards of a block on all ranks at once. Call each block on every rank in the"
    " same way, and use its result or not, or use zero_stage=0, where each rank may do otherwise."
)
"""The start of a DivergenceError."""


class CheckpointError(RunError):
    """A checkpoint is incomplete, damaged, or does not fit the module."""


_ATTRIBUTES = ("'Parameter' object has no", "'DTensor' object has no", "`jac` fields were not populated")
_IN_PLACE = re.compile(r"aten\.\w+_\.")
"""An operation that writes to its first argument: aten.mul_.Tensor, aten._foreach_mul_.Scalar."""
_MIXED = ("DTensor", "sharding strategy", "DeviceMesh")
_OF_TORCH = {
    "setStorage.*storage of size 0": "The backward of {step} needs weights that are freed already ({layout}; {first})."
    " ZeRO frees them when a backward has ended, and ZeRO 3 those of a block when its call has ended. A step that takes"
    " derivatives by itself (torch.autograd.grad, as for GradNorm) or sets p.grad needs zero_stage=0. Where the graph"
    " alone is kept outside of the call, zero_stage=2 is enough.",
    "RegisterPostBackwardFunction": "A block changes an argument in place ({layout}). FSDP2 gives blocks views of their"
    " arguments, which torch does not let change. Write `x = x + y` for `x += y` in the block, or use zero_stage=0.",
    "functorch transforms|forward mode AD": "A transform of torch.func (jvp, vjp, grad, jacrev, vmap) or forward mode"
    " calls what ranks divide ({layout}; {first}), and cannot follow their messages. Keep the blocks that it calls"
    ' whole: tensor_plan={{"name of the block": "whole"}} and context_parallel_size=1.',
    "invalid gradient.*expected device meta": "An autograd function of yours takes logits that are not computed yet"
    " ({first}). Large logits, those that tensor ranks divide, and what context ranks divide behind the last block,"
    " are computed when an operation of torch first uses them, which apply() of a torch.autograd.Function is not."
    " Their gradient would be lost. Pass it `logits + 0`. A hook of the head's backward (register_full_backward_hook)"
    " is such a function: in place of it call x.register_hook for the tensor that goes in.",
    "tensor subclass inputs": "torch cannot compile a graph around blocks whose weights ranks divide ({layout})."
    " Compile the blocks, and nothing around them: blocks[i] = torch.compile(blocks[i]).",
}
"""Patterns of torch's errors, and the words that explain them."""
NOT_USERS = ("torch.", "lightning.", "lightning_3d.")


def hooks_around(step: str) -> str:
    """The hooks before and behind a step, for errors."""
    kind = step.removesuffix("_step").replace("training", "train")
    return "on_test_batch_start or on_test_batch_end".replace("test", kind)


@contextmanager
def explain_shard_errors(layout: Any, step: str = "training_step") -> Iterator[None]:
    """Replace torch's errors about shards in a step or its backward by errors that name the remedy."""
    try:
        yield
    except (AttributeError, RuntimeError, AssertionError, ValueError) as error:
        text = str(error)
        if LateWrites.by and re.search("modified (by an )?in-?place", text):
            raise changed_late(LateWrites.by) from error
        if any(words in text for words in _ATTRIBUTES):
            raise UnsupportedError(
                f"{step} reads an attribute that code has given to a parameter ({layout}; {_first(text)}). ZeRO"
                " computes with gathered weights, and their attributes are not those of the parameters (gradients of"
                " each sample by hooks, as in opacus; Jacobians of torchjd). Use zero_stage=0. A step that sets p.grad"
                " by itself averages it over data ranks there: p.grad = self.trainer.strategy.reduce(p.grad)."
            ) from error
        if isinstance(error, RunError | AttributeError | ValueError):
            raise
        for pattern, why in _OF_TORCH.items():
            if re.search(pattern, text, re.DOTALL):
                raise UnsupportedError(why.format(step=step, layout=layout, first=_first(text))) from error
        if "differentiated Tensor" in text and layout.pipelined:
            raise UnsupportedError(
                f"{step}, or a backward of the module's own, differentiates what has no graph ({layout};"
                f" {_first(text)}). A pipeline computes gradients between the forwards of its stages, and has them when"
                f" that is called. Change p.grad in on_after_backward, or use {NO_PIPELINE}."
            ) from error
        if "differentiated Tensor" in text and layout.zero_stage == 3:
            raise UnsupportedError(
                f"{step} differentiates by what its result does not depend on ({layout}). Blocks compute with"
                " gathered weights, so none depends on their parameters (meta-learning). Use zero_stage=0."
            ) from error
        mixed = any(word in text for word in _MIXED) or (not text and _in_dtensor(error))
        if mixed and _IN_PLACE.search(text) and "Partial" not in text:  # which no weight is
            raise UnsupportedError(
                f"{step} changes sharded weights in place ({layout}; {_first(text)}). Full tensors (a mask, the weights"
                f" of a network that follows) would mix with shards. Do so in {hooks_around(step)}, where each rank"
                " changes its shard."
            ) from error
        if "shapes cannot be multiplied" in text and "lightning_3d.tensor.block_forward" in _modules(error):
            raise UnsupportedError(
                f"A block that tensor ranks divide takes another path than in runs ahead of training ({layout};"
                f" {_first(text)}): what has a part of the features met what takes all of them, as where a module is"
                ' skipped from some step on. Keep it whole: tensor_plan={"name of a module in it": "whole"}.'
            ) from error
        sizes = "size" in text and ("must match" in text or "is invalid for" in text)  # of a shard with no rows, too
        if mixed or (sizes and (_names_shard(error) or _in_dtensor(error))):
            raise UnsupportedError(
                f"{step} computes with sharded weights ({layout}; {_first(text)}), which would mix shards with"
                " full tensors. Join norms of gradients, not gradients. A penalty on weights belongs in the optimizer"
                " (weight_decay), or its gradient in on_before_optimizer_step: p.grad.add_(...). In the step it needs"
                " zero_stage=0 (1 and 2 behind the blocks), tensor_parallel_size=1 and expert_parallel_size=1. Under"
                ' tensor parallelism, if it reads the weight of a block: tensor_plan={"name of the block": "whole"}.'
            ) from error
        raise
    finally:
        LateWrites.by = ""


class LateWrites:
    """Writes to weights that are gathered for the backward."""

    by = ""
    """The hook that wrote to some of them since the forward."""


def changed_late(name: str) -> UnsupportedError:
    """The error where the hook `name` changes what the backward of the batch uses."""
    return UnsupportedError(
        f"{name} changes weights between the forward and the backward of a batch, or freezes them in a pipeline. With"
        " ZeRO ranks, tensor ranks or a pipeline the backward, or the next batch of an accumulation window, would not"
        " compute with the values of one device. Do so in on_train_batch_start. zero_stage=0 on data ranks alone keeps"
        " this hook."
    )


class GivenArrays:
    """Arrays of numpy that code has got."""

    read_only = False
    """True once code has got an array that refuses writes: before, one that does is the user's own."""


@contextmanager
def explain_writes(name: str) -> Iterator[None]:
    """Name the remedy where numpy refuses to write into an array, maybe that of a weight, or torch into shards."""
    try:
        yield
    except NotImplementedError as error:
        if "sharding strategy" not in str(error):
            raise
        raise UnsupportedError(
            f"{name} does something with a weight that torch cannot do with the shard of a rank ({_first(str(error))})."
            " In place of weight.set_(values) use weight.copy_(values), under torch.no_grad() in a hook between steps."
        ) from error
    except ValueError as error:
        if "read-only" not in str(error) or not GivenArrays.read_only:
            raise
        raise UnsupportedError(
            f"{name} writes into an array of numpy ({error}). That of a weight, a gradient or a state is a copy where"
            " ranks have shards: the write would be lost. Write by torch, in a hook between steps. Copy your own first."
        ) from error


def module_of(frame: FrameType) -> str:
    """The name of the module whose code `frame` runs."""
    return str(frame.f_globals.get("__name__"))


def outside(frame: FrameType, *packages: str) -> FrameType:
    """The first frame from `frame` outwards that is in none of `packages`, whose names end with a dot."""
    while frame.f_back is not None and f"{module_of(frame)}.".startswith(packages):
        frame = frame.f_back
    return frame


def _modules(error: BaseException) -> list[str]:
    """Names of the modules whose code ran when `error` was raised, outer ones first."""
    return [module_of(frame) for frame, _ in walk_tb(error.__traceback__)]


def _in_dtensor(error: BaseException) -> bool:
    """Return True if the code of DTensor raised `error`, or called what did: some of its assertions have no text."""
    return any(name.startswith("torch.distributed.tensor.") for name in _modules(error)[-2:])


def _names_shard(error: BaseException) -> bool:
    """Return True if the line that failed in the user's code names a shard, which torch may take for a full tensor."""
    words: dict[str, object] = {}
    for frame, line in walk_tb(error.__traceback__):
        if not module_of(frame).startswith(NOT_USERS):
            named = re.findall(r"\w+", linecache.getline(frame.f_code.co_filename, line))
            words = {word: frame.f_locals.get(word) for word in named}
    return any(type(value).__name__ == "DTensor" for value in words.values())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about `name`: the most similar of the `known` names; empty if none is similar."""
    found = get_close_matches(name, list(known))
    return f": did you mean {' or '.join(found)}?" if found else ""


def printable(text: str) -> str:
    """`text` for a terminal, with control characters (escape sequences, right-to-left marks) as their numbers."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )


def is_meta_error(error: Exception) -> bool:
    """True for torch's errors about meta tensors: only tensors of other stages are on meta."""
    return any(text in str(error) for text in ("meta tensor", "on meta", "device meta", "meta device", "register_meta"))


def _first(text: str) -> str:
    return (text or "an assertion of DTensor").partition("\n")[0][:120].rstrip(".! ")

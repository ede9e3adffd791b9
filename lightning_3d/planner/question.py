"""The question of `lightning-3d plan`: flags, names and files read into a job, clusters and fixed sizes."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_3d.errors import PlannerError
from lightning_3d.planner.catalogue import Catalogue, apply_overrides, number
from lightning_3d.planner.hardware import Accelerator, Cluster, Price
from lightning_3d.planner.job import Job, usual_batch
from lightning_3d.planner.model_config import read_config
from lightning_3d.planner.model_names import named_model
from lightning_3d.planner.profile import Profile
from lightning_3d.planner.search import Pins
from lightning_3d.planner.serve import Serving, serving
from lightning_3d.planner.show import parse_count, positive, show_count
from lightning_3d.planner.transformer import MOST_SIZE, Transformer

TOKENS_PER_PARAMETER = 20
"""Assumed where no amount of data is given: compute-optimal for a decoder (Hoffmann et al. 2022)."""


def profile_of(args: Namespace) -> Profile:
    """The profile of the model in `args`."""
    if args.sequence is not None and not 1 <= args.sequence <= MOST_SIZE:
        raise PlannerError(f"--sequence {args.sequence} must be at least 1 and at most {MOST_SIZE:g} tokens.")
    shape = _shape_of(args)
    if shape is None:
        from lightning_3d.planner.profile_module import profile_module

        if args.attention is not None:
            raise PlannerError(f"--attention is for models that the planner knows by their sizes, not {args.model}.")
        return profile_module(args.model, args.arg, precision=args.precision, tokens=args.sequence, inputs=args.inputs)
    if args.arg or args.inputs is not None:
        raise PlannerError(f"--arg and --inputs are for a module.Class, and {args.model!r} is not one.")
    if args.sequence is not None:
        shape = shape.with_sequence(args.sequence)
    return shape.profile(precision=args.precision, attention=args.attention or "flash")


def serving_of(args: Namespace, catalogue: Catalogue) -> Serving:
    """The serving that `args` describe."""
    shape = _shape_of(args)
    if shape is None or args.accelerator is None:
        raise PlannerError("--serve needs a named model, a size or a config.json, and --accelerator.")
    device = accelerator_of(args, catalogue, args.accelerator)
    context = shape.sequence if args.context is None else args.context
    return serving(shape, device, precision=args.precision, users=args.users, context=context, rate=args.rate)


def job_of(args: Namespace, profile: Profile, devices: int) -> Job:
    """The training that `args` describe, in batches that suit `devices` unless the batch is given."""
    batch = usual_batch(profile, devices, args.micro or 1) if args.batch is None else args.batch
    job = Job(
        profile=profile,
        samples=_samples(args, profile),
        batch=batch,
        precision=args.precision,
        optimizer=args.optimizer,
        sustained=None if args.sustained is None else positive(args.sustained, "--sustained") * 1e12,
    )
    if job.steps < 1:
        of = f" of {profile.tokens:,} tokens" if profile.tokens > 1 else ""
        raise PlannerError(
            f"{show_count(job.samples)} samples{of} are less than one step of {batch:,} samples: give more --tokens or"
            " --samples, or a smaller --batch."
        )
    return job


def pins_of(args: Namespace) -> Pins:
    """The sizes of the layout that `args` fix."""
    for name in ("tensor", "pipeline", "micro", "stages_per_rank"):
        size = getattr(args, name)
        if size is not None and size < 1:
            raise PlannerError(f"--{name.replace('_', '-')} {size} must be at least 1.")
    return Pins(
        tensor=args.tensor,
        pipeline=args.pipeline,
        zero=args.zero,
        schedule=args.schedule,
        chunks=args.stages_per_rank,
        micro=args.micro,
        recompute=args.recompute,
        offload=args.offload,
        sequence_parallel=args.sequence_parallel,
    )


def catalogue_of(args: Namespace) -> Catalogue:
    return Catalogue.load(*(Path(path) for path in args.hardware))


def accelerator_of(args: Namespace, catalogue: Catalogue, name: str) -> Accelerator:
    """The accelerator called `name` with the overrides of `args`."""
    accelerator = apply_overrides(catalogue.find(name), args.set)
    if args.price is not None:
        price = Price(dollars_per_hour=number("price", args.price, "--price"))
        accelerator = replace(accelerator, price=price)
    peak = accelerator.peak(args.precision) / 1e12
    if args.sustained is not None and args.sustained > peak:
        raise PlannerError(
            f"--sustained {args.sustained:g} is above the peak of {accelerator.name}, {peak:g} TFLOP/s at"
            f" {args.precision}: give what a device sustains, or its true peak with --set peak_tflops=."
        )
    return accelerator


def cluster_of(args: Namespace, catalogue: Catalogue, text: str) -> Cluster:
    """The cluster that `text` describes, with the overrides of `args`."""
    nodes, devices, name = catalogue.split(text)
    return Cluster.shaped(accelerator_of(args, catalogue, name), nodes, devices)


def refuse_ignored(args: Namespace) -> None:
    """Raise if a flag would have no effect with the others: it is a slip of the hand."""
    pipeless = [name for name in ("schedule", "stages_per_rank") if getattr(args, name) is not None]
    if args.pipeline == 1 and pipeless:
        raise PlannerError(f"--{pipeless[0].replace('_', '-')} has no effect with --pipeline 1: leave one out.")
    if args.epochs is not None and args.tokens is None and args.samples is None:
        raise PlannerError("--epochs multiplies --tokens or --samples: give one of them too.")
    if args.accelerator is not None and args.compare is not None:
        raise PlannerError("--accelerator and --compare both name the hardware: give one.")
    if args.price is not None and any(text.partition("=")[0].startswith("price") for text in args.set):
        raise PlannerError("--price and --set price= both set the price of a device: give one.")
    if args.plot == "":
        raise PlannerError("--plot '' names no folder: write --plot pictures.")


def _shape_of(args: Namespace) -> Transformer | None:
    """The transformer that `args` name, or None where they name a `module.Class`."""
    sizes = {name: getattr(args, name) for name in ("layers", "hidden", "heads", "vocabulary")}
    if args.model is None or args.model.strip() in ("", "custom"):
        return _custom(sizes, args.sequence)
    given = [name for name, size in sizes.items() if size is not None]
    if given:
        raise PlannerError(f"--{given[0]} describes a model of your own: leave out {args.model!r} or the flag.")
    path = Path(args.model)
    if path.suffix == ".json" or path.is_dir():
        return read_config(path / "config.json" if path.is_dir() else path)
    head, _, tail = args.model.rpartition(".")
    if head and all(part.isidentifier() for part in (*head.split("."), tail)):
        return None
    return named_model(args.model)


def _custom(sizes: dict[str, int | None], sequence: int | None) -> Transformer:
    missing = [name for name, size in {**sizes, "sequence": sequence}.items() if size is None]
    if missing:
        raise PlannerError(
            f"which model? Give a name (llama-7b), a size (7b), a config.json, a module.Class, or all of --layers"
            f" --hidden --heads --vocabulary --sequence (missing: {', '.join(missing)})."
        )
    known: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    return Transformer(**known, sequence=sequence or 1, positions=sequence or 1)


def _samples(args: Namespace, profile: Profile) -> float:
    if args.tokens is not None and args.samples is not None:
        raise PlannerError("--tokens and --samples both set the amount of data: give one.")
    epochs = 1.0 if args.epochs is None else positive(args.epochs, "--epochs")
    if args.samples is not None:
        return positive(parse_count(args.samples, "--samples") * epochs, "--samples x --epochs,")
    if args.tokens is not None:
        return positive(parse_count(args.tokens, "--tokens") * epochs, "--tokens x --epochs,") / profile.tokens
    return TOKENS_PER_PARAMETER * profile.parameters / profile.tokens

"""What the user asked, as a job and clusters: from names, files, flags."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning_3d.errors import PlannerError
from lightning_3d.planner.catalogue import Catalogue, apply_overrides
from lightning_3d.planner.hardware import Accelerator, Cluster, split_cluster
from lightning_3d.planner.huggingface import read_config
from lightning_3d.planner.job import Job, usual_batch
from lightning_3d.planner.names import named_model
from lightning_3d.planner.profile import Profile
from lightning_3d.planner.search import Pins
from lightning_3d.planner.transformer import Transformer
from lightning_3d.planner.units import parse_count, positive

TOKENS_PER_PARAMETER = 20
"""Assumed where no amount of data is given: compute-optimal for a decoder (Hoffmann et al. 2022)."""


def profile_of(args: Namespace) -> Profile:
    """The model that `args` name."""
    shape = _shape_of(args)
    if shape is None:
        from lightning_3d.planner.inspection import profile_module

        return profile_module(args.model, args.arg, precision=args.precision, tokens=args.sequence, inputs=args.inputs)
    if args.arg or args.inputs:
        raise PlannerError(f"--arg and --inputs are for a module.Class, and {args.model!r} is none.")
    if args.sequence is not None:
        shape = shape.with_sequence(args.sequence)
    return shape.profile(precision=args.precision, attention=args.attention)


def job_of(args: Namespace, profile: Profile, devices: int) -> Job:
    """The training that `args` describe, in batches that suit `devices` unless the batch is given."""
    batch = usual_batch(profile, devices, args.micro or 1) if args.batch is None else args.batch
    sustained = None if args.sustained is None else positive(args.sustained, "--sustained") * 1e12
    return Job(
        profile=profile,
        samples=_samples(args, profile),
        batch=batch,
        precision=args.precision,
        optimizer=args.optimizer,
        sustained=sustained,
    )


def pins_of(args: Namespace) -> Pins:
    """What `args` fix of the layout."""
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
    overrides = [*args.set, *([] if args.price is None else [f"price={args.price}"])]
    return apply_overrides(catalogue.find(name), overrides)


def cluster_of(args: Namespace, catalogue: Catalogue, text: str) -> Cluster:
    """The cluster that `text` describes, with the overrides of `args`."""
    nodes, devices, name = split_cluster(text)
    accelerator = accelerator_of(args, catalogue, name)
    if devices is not None and (devices < 1 or nodes == 0):
        raise PlannerError(f"cluster {text!r} has no devices: give at least 1x1.")
    if nodes is None:
        return Cluster.of(accelerator, devices or 1)
    return Cluster(accelerator=accelerator, nodes=nodes, devices_per_node=devices or 1)


def _shape_of(args: Namespace) -> Transformer | None:
    """The transformer that `args` name, or None where they name a `module.Class`."""
    sizes = {name: getattr(args, name) for name in ("layers", "hidden", "heads", "vocabulary")}
    if args.model is None or args.model == "custom":
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
        raise PlannerError("--tokens and --samples both say how much data there is: give one.")
    epochs = positive(args.epochs, "--epochs")
    if args.samples is not None:
        return parse_count(args.samples, "--samples") * epochs
    if args.tokens is not None:
        return parse_count(args.tokens, "--tokens") / profile.tokens * epochs
    return TOKENS_PER_PARAMETER * profile.parameters / profile.tokens

"""Write a sharded checkpoint as one file that a stock Lightning Trainer can resume from.

One tensor is in memory at a time. The directory of the file needs room for the state twice.
"""

import argparse

from lightning_3d.checkpoint.full_files import consolidate

EXAMPLE = "examples:\n  lightning-3d consolidate checkpoints/last.ckpt last-single.ckpt"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the sharded checkpoint")
    parser.add_argument("out", metavar="OUT.ckpt", help="the file to write")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also unpickle hyperparameters that are not plain values (this can run any code in the checkpoint)",
    )


def run(args: argparse.Namespace) -> int:
    consolidate(args.directory, args.out, weights_only=False if args.trust else None)
    print(f"wrote {args.out}")
    return 0

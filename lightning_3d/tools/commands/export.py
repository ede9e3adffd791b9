"""Write the weights of a checkpoint as safetensors, in the layout of Hugging Face.

One tensor is in memory at a time. `from_pretrained` loads the result if the module has a Hugging Face model.
"""

import argparse

from lightning_3d.checkpoint.full_files import export

EXAMPLE = """\
examples:
  lightning-3d export checkpoints/last.ckpt --to safetensors --out my-model
  lightning-3d export checkpoints/last.ckpt --adapters --out my-adapter"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="CHECKPOINT", help="a sharded checkpoint or a single file")
    parser.add_argument("--to", default="safetensors", choices=["safetensors"], help="the format")
    parser.add_argument(
        "--out", metavar="FOLDER", help="the folder to write to (default: CHECKPOINT with -export after it)"
    )
    parser.add_argument("--prefix", help="export only names that start with PREFIX, without it")
    parser.add_argument("--adapters", action="store_true", help="export adapters of PEFT, in PEFT's own format")


def run(args: argparse.Namespace) -> int:
    out = args.out or f"{args.directory.rstrip('/')}-export"
    for file in export(args.directory, out, to=args.to, prefix=args.prefix, adapters=args.adapters):
        print(f"wrote {file}")
    return 0

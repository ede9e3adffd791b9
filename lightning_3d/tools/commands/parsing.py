"""The parser of the command line: jsonargparse, with errors in one line that name the nearest known option."""

import re
from argparse import Action
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from lightning_3d.errors import did_you_mean, printable

_NOISE = re.compile(
    r"\s*-?\s*(Does not validate against any of the Union subtypes.*|Subtypes: .*|Errors:|Given value type: .*"
    r"|Given value: NestedArg.*|Expected a <class 'NoneType'>|Expected a path but .*)?"
)
"""Lines in which jsonargparse lists its attempts, not the error."""
_CLASS = re.compile(r"\s*- Expected a <class .*")


class OneLine(ArgumentParser):
    """Reports an error as one line on stderr with exit code 2, without the usage of every flag."""

    def parse_args(self, args: Any = None, *more: Any, **kwargs: Any) -> Any:
        return super().parse_args(None if args is None else _with_amounts(args), *more, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # an inner parser: the outer one reports its errors
            super().error(f"{message}{_hint(message, self._actions)}", ex)
        text = f"{_in_one_line(message)}{_hint(message, self._actions)}".rstrip(".")
        self.exit(2, printable(f"{self.prog.replace(' [options]', '')}: {text} (--help shows more)") + "\n")


def _with_amounts(arguments: Sequence[str]) -> list[str]:
    """`--tokens -5B` as `--tokens=-5B`: argparse reads -5B as a flag, and its error does not name the amount."""
    joined: list[str] = []
    for argument in arguments:
        amount = argument[:1] == "-" and (argument[1:2].isdigit() or argument[1:2] == ".")
        if amount and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _in_one_line(message: str) -> str:
    """The cause, from the tree of all types that jsonargparse tried."""
    lines = [line for line in message.splitlines() if not _NOISE.fullmatch(line)]
    if any("Problem with given class_path" in line for line in lines):
        lines = [line for line in lines if not _CLASS.fullmatch(line)]
    text = " ".join(line.strip().removeprefix("- ") for line in lines).replace("typing.", "")
    return re.sub(r"Parser key \"(.*?)\":", r"\1:", re.sub(r"<class '(.*?)'>", r"\1", text))


def _hint(message: str, actions: Sequence[Action]) -> str:
    """The nearest valid option or choice for the error `message`; empty if there is none."""
    options = [option for action in actions for option in action.option_strings if not option.endswith("+")]
    if unknown := re.search(r"[Uu]nrecognized arguments: .*?(--[^\s=]+)", message):
        return did_you_mean(unknown[1], options)
    if choice := re.search(r"invalid choice: '?(.+?)'? \(choose from (.*)\)", message):
        return did_you_mean(choice[1], re.findall(r"[^\s,']+", choice[2]))
    if option := re.fullmatch(r"Option '([\w.]+)' is not accepted", message):
        return did_you_mean(option[1], [each.removeprefix("--") for each in options])
    return ""

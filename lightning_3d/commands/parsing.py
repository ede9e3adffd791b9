"""The one parser of the command line: jsonargparse, with one line for an error and the nearest name that is known."""

import re
from argparse import Action
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from lightning_3d.commands.printable import printable

_NOISE = re.compile(
    r"\s*-?\s*(Does not validate against any of the Union subtypes.*|Subtypes: .*|Errors:|Given value type: .*"
    r"|Given value: NestedArg.*|Expected a <class 'NoneType'>|Expected a path but .*)?"
)
"""Lines of jsonargparse that say how it tried, not what is wrong."""
_CLASS = re.compile(r"\s*- Expected a <class .*")


class OneLine(ArgumentParser):
    """One line on stderr and exit code 2, without the usage of every flag."""

    def parse_args(self, args: Any = None, *more: Any, **kwargs: Any) -> Any:
        return super().parse_args(None if args is None else _with_amounts(args), *more, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # an inner parser, of whose errors the outer one makes its own
            super().error(f"{message}{_hint(message, self._actions)}", ex)
        said = f"{_in_one_line(message)}{_hint(message, self._actions)}".rstrip(".")
        self.exit(2, printable(f"{self.prog.replace(' [options]', '')}: {said} (--help shows more)") + "\n")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about `name`; empty where nothing like it is known."""
    found = get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f": did you mean {' or '.join(found)}?" if found else ""


def _with_amounts(arguments: Sequence[str]) -> list[str]:
    """`--tokens -5B` as `--tokens=-5B`: argparse takes it for a flag of its own and says nothing of the amount."""
    joined: list[str] = []
    for argument in arguments:
        amount = argument[:1] == "-" and (argument[1:2].isdigit() or argument[1:2] == ".")
        if amount and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _in_one_line(message: str) -> str:
    """What is wrong, of the tree that jsonargparse shows of every type that it tried."""
    lines = [line for line in message.splitlines() if not _NOISE.fullmatch(line)]
    if any("Problem with given class_path" in line for line in lines):
        lines = [line for line in lines if not _CLASS.fullmatch(line)]
    text = " ".join(line.strip().removeprefix("- ") for line in lines).replace("typing.", "")
    return re.sub(r"Parser key \"(.*?)\":", r"\1:", re.sub(r"<class '(.*?)'>", r"\1", text))


def _hint(message: str, actions: Sequence[Action]) -> str:
    """The nearest of what could have been meant, where that is known."""
    options = [option for action in actions for option in action.option_strings if not option.endswith("+")]
    if unknown := re.search(r"[Uu]nrecognized arguments: .*?(--[^\s=]+)", message):
        return nearest(unknown[1], options)
    if choice := re.search(r"invalid choice: '?(.+?)'? \(choose from (.*)\)", message):
        return nearest(choice[1], re.findall(r"[^\s,']+", choice[2]))
    if option := re.fullmatch(r"Option '([\w.]+)' is not accepted", message):
        return nearest(option[1], [each.removeprefix("--") for each in options])
    return ""

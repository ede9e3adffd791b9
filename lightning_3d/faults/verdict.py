"""The rank that made a job fail, decided once for all ranks, and the error that each of them raises."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Literal, cast

from lightning_3d import errors
from lightning_3d.errors import ConfigurationError, Lightning3DError

How = Literal["failed", "interrupted", "left", "lost", "stopped", "late", "apart"]
_WORDS = {
    "failed": "failed",
    "interrupted": "was interrupted (Ctrl-C)",
    "left": "ended itself (sys.exit)",
    "lost": "does not answer any more: its process was killed or stopped, or its machine cannot be reached",
    "stopped": "was stopped for a while",
    "late": "did not come",
    "apart": "was elsewhere",
}


@dataclass(frozen=True)
class Verdict:
    """The rank that made a job fail."""

    how: How
    ranks: dict[int, str]
    """The ranks to blame, each with its last known place."""
    detail: str = ""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> "Verdict | None":
        """The verdict that `dumps` wrote; None where the text is something else."""
        try:
            content = json.loads(text)
            how, detail = content["how"], content["detail"]
            ranks = {int(rank): str(where) for rank, where in content["ranks"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        known = isinstance(how, str) and how in _WORDS and isinstance(detail, str)
        return cls(cast(How, how), ranks, detail) if known else None

    def explain(self, places: dict[int, str]) -> str:
        at = {rank: f" ({place})" for rank, place in places.items() if place}
        ranks = sorted(self.ranks.items())
        parts = [f"rank {rank}{at.get(rank, '')} {_WORDS[self.how]}, last seen at {where}" for rank, where in ranks]
        return ": ".join(filter(None, ["; ".join(parts), self.detail.partition("\n")[0][:300]]))

    def refusal(self) -> ConfigurationError | None:
        """The refusal of a rank in the middle of training, for the ranks that wait for it; None for other failures."""
        name, _, text = self.detail.partition(": ")
        kind = getattr(errors, name, None)
        if self.how != "failed" or not (isinstance(kind, type) and issubclass(kind, ConfigurationError)):
            return None
        error = kind(text)
        error.rank = next(iter(self.ranks))
        return error


def confession(error: BaseException, rank: int, where: str) -> Verdict:
    """The verdict on `rank`, which raised `error` by itself, or on the rank whose error it raises too."""
    if isinstance(error, Lightning3DError) and error.rank is not None:
        rank = error.rank
    if isinstance(error, KeyboardInterrupt):
        return Verdict("interrupted", {rank: where})
    if isinstance(error, SystemExit):
        return Verdict("left", {rank: where}, f"exit code {error.code!r}"[:300])
    text = f"{type(error).__name__}: {error}"
    return Verdict(
        "failed", {rank: where}, text if isinstance(error, ConfigurationError) else text.splitlines()[0][:300]
    )


def judge(silent: dict[int, str], announced: dict[int, str], standing: dict[int, str]) -> Verdict:
    """Return the rank to blame where no rank reported an error of its own.

    Ranks that stopped waiting have `announced` the operation they waited in; others have their last known places.
    """
    if silent:
        return Verdict("lost", silent)
    if standing:
        return Verdict("late", standing, "the others waited for it longer than the timeout")
    counts = Counter(announced.values())
    usual = counts.most_common(1)[0][0]
    strange = {rank: where for rank, where in announced.items() if where != usual}
    why = f"the others were at {usual}" if strange else "all waited in vain"
    if any("data_parallel" in each for each in counts):
        why += ". Data may have chosen the blocks that each rank calls: under ZeRO all call the same, or zero_stage=0"
    return Verdict("apart", strange or announced, why)

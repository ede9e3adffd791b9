"""A day with a GPU, in order of worth: `python -m tests.gpu.day`, with nothing but the wheels of `make gpu-wheels`.

Each part is ended after its seconds. The results are in `build/gpu/day.json`, and as a table in `build/gpu/day.md`.
"""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).parents[2]
WHEELS, SITE, FOLDER = (ROOT / "build" / name for name in ("wheels", "site-packages", "gpu"))


@dataclass(frozen=True)
class Part:
    name: str
    tests: str
    chosen: str
    workers: int
    seconds: int


PARTS = (
    Part("layouts on one card", "tests/gpu/test_shared_card.py", "a_layout_trains_with or host_memory", 6, 150),
    Part("experts", "tests/gpu/test_shared_card.py", "experts or group_of_the_run", 6, 120),
    Part("models of Hugging Face", "tests/gpu/test_shared_card.py", "hugging_face", 4, 120),
    Part(
        "stages and precisions",
        "tests/gpu/test_gpu.py",
        "not throughput and not beside_kernels and not waits and not several",
        8,
        120,
    ),
    Part("half precision, compiled", "tests/gpu/test_shared_card.py", "a_layout_in_half or compiled", 6, 120),
    Part("checkpoints, later batches", "tests/gpu/test_shared_card.py", "goes_on or later_batch", 6, 90),
    Part("waits of the host", "tests/gpu", "waits", 6, 90),
    Part("memory beside the report", "tests/gpu/test_shared_card.py", "counts", 4, 90),
    Part("speed", "tests/gpu/test_gpu.py", "throughput or beside_kernels", 1, 160),
    Part("several cards", "tests/gpu/test_gpu.py", "several or large_embeddings", 1, 240),
)


@dataclass(frozen=True)
class Result:
    part: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    ended: bool
    """True where its seconds were over before its tests were."""
    lines: tuple[str, ...]
    """What tests printed as results, and the names of those that failed."""


def run_part(part: Part, environment: dict[str, str]) -> Result:
    workers = ["-n", str(part.workers)] if part.workers > 1 else []
    options = ["-q", "-rA", "-o", "addopts=--strict-markers", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    command = [sys.executable, "-m", "pytest", part.tests, "-k", part.chosen, *workers, *options]
    began, log, ended = perf_counter(), FOLDER / f"{part.name.replace(' ', '_')}.log", False
    with log.open("w") as file:
        own = {"cwd": ROOT, "env": environment, "start_new_session": True}
        running = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **own)
        try:
            running.wait(part.seconds)
        except subprocess.TimeoutExpired:
            ended = True
            os.killpg(running.pid, signal.SIGKILL)  # its workers would go on beside the next part
            running.wait()
    text = log.read_text()
    said = tuple(re.findall(r"^(?:FAILED .*|ERROR .*|[\w ]+ \{'kept'.*|a step of .*)$", text, re.MULTILINE))
    passed, failed, skipped = (_count(text, word) for word in ("passed", "failed", "skipped"))
    return Result(part.name, passed, failed, skipped, perf_counter() - began, ended, said)


def _count(text: str, word: str) -> int:
    found = re.findall(rf"(\d+) {word}", text)
    return int(found[-1]) if found else 0


def install() -> dict[str, str]:
    """Install the wheels that were brought along; the environment in which they are found."""
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if wheels:
        options = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target"]
        subprocess.run([sys.executable, *options, str(SITE), *wheels], check=True)
    paths = [str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def table(results: list[Result]) -> str:
    head = "| part | passed | failed | skipped | seconds |\n|---|---:|---:|---:|---:|\n"
    rows = "".join(
        f"| {each.part} | {each.passed} | {each.failed} | {each.skipped} | {each.seconds:.0f}"
        f"{' (its time was over)' if each.ended else ''} |\n"
        for each in results
    )
    return head + rows


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    environment, results = install(), []
    for part in PARTS:
        results.append(run_part(part, environment))
        print(table(results[-1:]).splitlines()[-1], *results[-1].lines, sep="\n", flush=True)
        (FOLDER / "day.json").write_text(json.dumps([asdict(each) for each in results], indent=1))
        (FOLDER / "day.md").write_text(table(results))
    return int(any(each.failed or each.ended for each in results))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.soak --minutes 30 --ranks 2 4 --seed 1`: nothing hangs, nothing leaks, no number is wrong.

Half of the time goes to steady sessions, in which processes stay alive over all rounds, so that a leak shows; the rest
to sessions that end when a rank is killed or stopped. A round is drawn from its name: `--again 1/2/0/17` does it again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.runtime.forked import Ended, run_ranks
from tests.soak.session import LIMIT, Session

MEASURED = ("rss", "tensors", "threads", "files")
RSS_A_ROUND = 256
"""KiB that the memory of a process may grow in a round: torch.fx keeps the text of each module that it makes."""


class Soak:
    """What has happened so far."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rounds: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slopes: list[str] = []
        self.sessions = 0

    def play(self, ranks: int, seconds: float, faults: Sequence[str], often: float, *, steady: bool) -> None:
        """Run one session."""
        folder = Path(tempfile.mkdtemp())
        session = Session(
            f"{self.seed}/{ranks}/{self.sessions}", faults, often, time.monotonic() + seconds, folder=folder
        )
        self.sessions += 1
        ended = run_ranks(ranks, session.run, seconds=seconds + LIMIT + 30.0)
        self.judge(ranks, ended, [_diary(folder, rank) for rank in range(ranks)], steady=steady)
        shutil.rmtree(folder)

    def judge(
        self, ranks: int, ended: Sequence[Ended], diaries: Sequence[list[dict[str, Any]]], *, steady: bool
    ) -> None:
        """Look at what ranks said and how they ended."""
        lost = None
        for rank, (end, diary) in enumerate(zip(ended, diaries, strict=True)):
            self.problems += [
                f"{line['round']} ({line['text']}) rank {rank}: {'; '.join(line['wrong'])}"
                for line in diary
                if line.get("wrong")
            ]
            last = diary[-1] if diary else {}
            if end.code == 0:
                continue
            begun = last.get("begun", "")
            text = last.get("text", "")
            if begun and (f"kill on rank {rank} " in text or f"stop on rank {rank} " in text):
                lost = text
            else:
                self.problems.append(f"{begun} ({text}) rank {rank} ended with {end.code}: {end.text}\n{end.stderr}")
        survivor = max(diaries, key=len)
        finished = [line for line in survivor if "round" in line]
        self.rounds[ranks] += len(finished)
        for line in finished:
            if line["struck"]:
                self.faults[next(word for word in ("raise", "kill", "stop") if f", {word} on" in line["text"])] += 1
        if steady:
            for rank, diary in enumerate(diaries):
                lines = [line for line in diary if "round" in line]
                self.slopes.append(_slopes(ranks, rank, lines))
                self.problems += [f"rank {rank} of {ranks}: {text}" for text in _growing(lines)]
        what = f" ended by {lost.rpartition(', ')[2]}" if lost else ""
        print(f"session {self.sessions - 1}: {ranks} ranks, {len(finished)} rounds{what}", flush=True)

    def report(self, seconds: float) -> None:
        """Print what there is to know."""
        rounds = ", ".join(f"{count} on {ranks} ranks" for ranks, count in sorted(self.rounds.items()))
        faults = ", ".join(f"{count} {what}" for what, count in sorted(self.faults.items())) or "none"
        print(f"seed {self.seed}: {seconds / 60:.1f} minutes, {self.sessions} sessions, rounds: {rounds}")
        print(f"faults that struck: {faults}")
        print(*self.slopes, sep="\n")
        print(f"problems: {len(self.problems)}", *self.problems, sep="\n")


def _diary(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _growing(lines: list[dict[str, Any]]) -> list[str]:
    """Return what has grown in the last two thirds of the rounds."""
    third = len(lines) // 3
    if third < 3:
        return []
    found = []
    for name in ("tensors", "threads", "files"):
        early, late = (max(line[name] for line in part) for part in (lines[third : 2 * third], lines[2 * third :]))
        if late > early + 2:
            found.append(f"{name} grow from {early} to {late}")
    grown = lines[-1]["rss"] - lines[third]["rss"]
    if len(lines) >= 60 and grown > RSS_A_ROUND * 2 * third:
        found.append(f"memory grows by {grown} KiB in {2 * third} rounds")
    return found


def _slopes(ranks: int, rank: int, lines: list[dict[str, Any]]) -> str:
    """Return by how much each measure grows in a round, after the first third."""
    lines = lines[len(lines) // 3 :]
    if len(lines) < 3:
        return f"rank {rank} of {ranks}: too few rounds for a slope"
    parts = []
    for name in MEASURED:
        values = [float(line[name]) for line in lines]
        slope = statistics.linear_regression(range(len(values)), values).slope
        unit = " KiB" if name == "rss" else ""
        parts.append(f"{name} {values[0]:.0f} to {values[-1]:.0f}{unit} ({slope:+.3f} a round)")
    return f"rank {rank} of {ranks}, {len(lines)} rounds: {', '.join(parts)}"


def main() -> int:
    """Run it; the exit status is 1 when something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--again", help="do one round again: seed/ranks/session/round")
    given = parser.parse_args()
    soak, begun = Soak(given.seed), time.monotonic()
    print(f"seed {given.seed}", flush=True)
    if given.again:
        return _again(given.again)
    end = begun + 60 * given.minutes
    for ranks in given.ranks:
        soak.play(ranks, 30 * given.minutes / len(given.ranks), ("raise",), 0.05, steady=True)
    for number in range(10**6):
        left = end - time.monotonic()
        if left <= 0:
            break
        ranks = given.ranks[number % len(given.ranks)]
        soak.play(ranks, min(left, 60.0), ("raise", "kill", "stop"), 0.4, steady=False)
    soak.report(time.monotonic() - begun)
    return 1 if soak.problems else 0


def _again(name: str) -> int:
    session, _, number = name.rpartition("/")
    ranks = int(session.split("/")[1])
    code = 0
    for faults, often in ((("raise",), 0.05), (("raise", "kill", "stop"), 0.4)):
        folder = Path(tempfile.mkdtemp())
        once = Session(session, faults, often, float("inf"), folder=folder, first=int(number), rounds=1)
        ended = run_ranks(ranks, once.run, seconds=LIMIT + 30.0)
        for rank, end in enumerate(ended):
            print(f"rank {rank} ended with {end.code}: {end.text}\n{end.stderr}")
            for line in _diary(folder, rank):
                print(json.dumps(line, indent=1))
                code = code or bool(line.get("wrong"))
        shutil.rmtree(folder)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())

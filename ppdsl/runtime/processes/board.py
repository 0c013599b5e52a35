"""What ranks tell each other beside the tensors: agreement before a step, and why one of them stopped.

Everything goes through the store of torch.distributed, which works while tensors do not flow, and outlives a rank that
failed; only what is agreed on before each step goes from rank to rank, where all are on one machine. Nothing here waits
without looking at the failures of others and at the clock.
"""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.distributed_c10d import Store

from ppdsl.diagnostics import CallError, Diagnostic, PpdslError, RunError
from ppdsl.runtime.processes.near import LARGEST, Near
from ppdsl.runtime.processes.store import PatientStore
from ppdsl.runtime.processes.waits import Waits

__all__ = ["Board"]

_FAILED = "failed"
_SAME_CALLS = "all ranks must make the same calls, for the same number of batches"
_LINGER = 2.0
"""Seconds a failed rank stays at most until the others know why: a launcher ends them all when the first one ends."""
_GRACE = 0.2
"""Seconds it then gives them to say so."""
_GLANCE = 0.05
"""Seconds between two looks at the failures of others, while notes are awaited through lines."""
_NOTES = 1 << 60
"""Tag of the notes of the first agreement."""
_STAMP = struct.Struct("<d")
"""When a note was sent, by the clock of the machine."""


class Board:
    """The notes of all ranks of one pipeline.

    Args:
        store: A store that all ranks share, for this pipeline alone.
        rank: This process.
        ranks: Number of processes.
        timeout: Seconds to wait for another rank.

    Attributes:
        names: What to call each process in a message.
        pipelines: The processes of each pipeline.
        told: What each process said in the last agreement, by name.
        lines: What notes go through when all processes are on one machine; None: the store.
    """

    def __init__(self, store: Store, rank: int, ranks: int, timeout: float) -> None:
        self._store = PatientStore(store, rank, timeout)
        self.waits = Waits(self._store, rank, timeout)
        self.rank = rank
        self.ranks = ranks
        self.timeout = timeout
        self.silent: set[int] = set()
        """Ranks that will not say anything any more."""
        self.names: Sequence[str] = tuple(map(str, range(ranks)))
        self.pipelines: Sequence[Sequence[int]] = (tuple(range(ranks)),)
        self.told: Sequence[Mapping[str, str]] = ()
        self.lines: Near | None = None
        self._round = 0
        self._gathered = 0

    @property
    def name(self) -> str:
        """What to call this process."""
        return self.names[self.rank]

    # ---------------------------------------------------------------- agreement

    def agree(self, moment: str, facts: Mapping[str, str], own: Mapping[str, str] | None = None) -> None:
        """Return when every rank has come to its next agreement with the same facts.

        Args:
            moment: When this happens, to be read after "before" (`step 3`).
            facts: What has to be equal, by name (`the mode` -> `train`), causes before consequences.
            own: What has to be equal on the ranks of a pipeline; its replicas may differ.

        Raises:
            CallError: Facts differ, or another rank refused.
            RunError: A rank failed, left or does not come.
        """
        own = own or {}
        notes = self._exchange(moment, {"facts": {**facts, **own}})
        refused = [(rank, note["error"]) for rank, note in enumerate(notes) if "error" in note]
        if refused:
            raise CallError(*(_refusal(self.names[rank], error, moment) for rank, error in refused))
        self.told = [note["facts"] for note in notes]
        everyone = tuple(range(self.ranks))
        for name in (*facts, *own):
            # What comes later in the list mostly follows from it: another mode has another plan.
            for group in (everyone,) if name in facts else self.pipelines:
                values = [self.told[rank].get(name) for rank in group]
                if len(set(values)) > 1:
                    names = [self.names[rank] for rank in group]
                    raise CallError(_difference(name, moment, values, names))

    def refuse(self, moment: str, error: Exception) -> None:
        """Take this rank's part in the next agreement by refusing."""
        self._note({"moment": moment, "error": _text_of(error)})
        self._round += 1

    def _note(self, note: dict[str, Any]) -> bytes:
        text = json.dumps(note)
        packet = _STAMP.pack(time.monotonic()) + text.encode()
        if self.lines is None or len(packet) > LARGEST:
            self._store.set(self._key(self.rank), text)
        if self.lines is not None:
            self.lines.tell(_NOTES + self._round, packet if len(packet) <= LARGEST else packet[: _STAMP.size])
        return packet

    def _key(self, rank: int) -> str:
        return f"agree/{self._round}/{rank}"

    def _exchange(self, moment: str, note: dict[str, Any]) -> list[dict[str, Any]]:
        self._store.doing = f"before {moment}"
        notes = self._through_store(moment, note) if self.lines is None else self._through(self.lines, moment, note)
        self._round += 1
        return notes

    def _through(self, lines: Near, moment: str, note: dict[str, Any]) -> list[dict[str, Any]]:
        own, begun = self._note(note), time.monotonic()
        tag = _NOTES + self._round
        while len(packets := lines.hear(tag, _GLANCE)) < self.ranks - 1:
            self.raise_failure(f"before {moment}")
            absent = [rank for rank in range(self.ranks) if rank != self.rank and rank not in packets]
            gone = [rank for rank in absent if self._has([f"left/{rank}"])]
            # It may have written its note, and then left, since the notes were read.
            packets = lines.hear(tag, 0.0) if gone else packets
            gone = [rank for rank in gone if rank not in packets]
            if gone or time.monotonic() > begun + self.timeout:
                self.silent.update(gone or absent)
                raise RunError(self._missing(absent, gone, moment))
            if lines.ended:
                time.sleep(_GLANCE)
        if time.monotonic() - min(_STAMP.unpack_from(packet)[0] for packet in packets.values()) > self.timeout / 2:
            # Who comes last finds all the notes, and perhaps that one of the others has waited in vain.
            self.raise_failure(f"before {moment}")
        lines.forget(tag)
        text = own[_STAMP.size :]
        notes = []
        for rank in range(self.ranks):
            said = packets.get(rank, own)[_STAMP.size :]
            notes.append(note if said == text else json.loads(said or self._store.get(self._key(rank))))
        return notes

    def _through_store(self, moment: str, note: dict[str, Any]) -> list[dict[str, Any]]:
        if self._round == 0:
            self._require_fresh()
        self._note(note)
        keys = [self._key(rank) for rank in range(self.ranks)]
        self._await(keys, moment)
        # Who comes last finds all the notes, and perhaps that one of the others has waited in vain.
        self.raise_failure(f"before {moment}")
        notes = [json.loads(self._store.get(key)) for key in keys]
        if self._round > 1:
            # Who is in this round has read the one before the last.
            self._store.delete_key(f"agree/{self._round - 2}/{self.rank}")
        return notes

    def _require_fresh(self) -> None:
        if self._has([f"agree/0/{self.rank}"]):
            message = (
                "The store of torch.distributed still holds what processes wrote that have ended: torchrun has started "
                f"rank {self.name} again with the old store."
            )
            advice = "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
            raise RunError(Diagnostic("stale-store", message, help=advice))

    def gather(self, text: str, moment: str = "the end of the step") -> tuple[str, ...]:
        """Return the text of every rank.

        Args:
            text: This rank's.
            moment: When this happens, to be read after "before".

        Raises:
            RunError: A rank failed, left or does not come.
        """
        keys = [f"gather/{self._gathered}/{rank}" for rank in range(self.ranks)]
        self._store.set(keys[self.rank], text)
        self._await(keys, moment)
        texts = tuple(self._store.get(key).decode() for key in keys)
        if self._gathered:
            self._store.delete_key(f"gather/{self._gathered - 1}/{self.rank}")
        self._gathered += 1
        return texts

    def _await(self, keys: list[str], moment: str) -> None:
        end = time.monotonic() + self.timeout
        pause = 0.0001
        while not self._has(keys):
            self.raise_failure(f"before {moment}")
            absent = [rank for rank, key in enumerate(keys) if not self._has([key])]
            gone = [rank for rank in absent if self._has_left(rank, keys[rank])]
            if gone or time.monotonic() > end:
                self.silent.update(gone or absent)
                raise RunError(self._missing(absent, gone, moment))
            time.sleep(pause)
            pause = min(0.005, pause * 1.5)

    def _has_left(self, rank: int, key: str) -> bool:
        # It may have written its note, and then left, since the note was looked for.
        return self._has([f"left/{rank}"]) and not self._has([key])

    def _has(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def _missing(self, absent: list[int], gone: list[int], moment: str) -> Diagnostic:
        if gone:
            message = f"Rank {self.names[gone[0]]} ended before {moment}, which rank {self.name} has begun."
            text = self._store.get(f"left/{gone[0]}").decode()
            quoted = "\n".join(f"rank {self.names[gone[0]]} | {line}".rstrip() for line in text.splitlines()) or None
            return Diagnostic("rank-ended", message, help=_SAME_CALLS, excerpt=quoted)
        names = ", ".join(self.names[rank] for rank in absent)
        noun = "Rank" if len(absent) == 1 else "Ranks"
        waited = f"within {self.timeout:g} seconds; rank {self.name} waits there"
        message = f"{noun} {names} did not come to {moment} {waited}."
        return Diagnostic("rank-missing", message, help=f"{_SAME_CALLS}; timeout= sets the wait")

    # ---------------------------------------------------------------- failures

    def publish(self, error: BaseException) -> None:
        """Tell all ranks why this one stops; the first failure stands."""
        with contextlib.suppress(Exception):
            note = json.dumps({"rank": self.rank, "text": _text_of(error)})
            self._store.compare_set(_FAILED, "", note)

    def failure(self) -> tuple[int, str] | None:
        """Return the rank that failed first and its text, or None.

        Raises:
            RunError: The store is gone.
        """
        if not self._has([_FAILED]):
            return None
        note = json.loads(self._store.get(_FAILED))
        return note["rank"], note["text"]

    def raise_failure(self, waiting: str, patience: float = 0.0) -> None:
        """Raise the failure of another rank, if there is one.

        Args:
            waiting: What this rank was doing, to be read after "Rank 0 stopped".
            patience: Seconds to give the other rank to publish it.

        Raises:
            RunError: Another rank failed, or the store is gone.
        """
        self._store.doing = waiting
        end = time.monotonic() + patience
        while (failure := self.failure()) is None:
            if time.monotonic() >= end:
                return
            time.sleep(0.02)
        rank, text = failure
        name = self.names[rank]
        message = f"Rank {self.name} stopped {waiting}, because rank {name} failed."
        quoted = "\n".join(f"rank {name} | {line}".rstrip() for line in text.splitlines())
        raise RunError(Diagnostic("other-rank-failed", message, excerpt=quoted))

    def linger(self) -> None:
        """Say that this rank knows of the failure; the one that failed first stays until the others know, too."""
        with contextlib.suppress(Exception):
            self._store.set(f"knows/{self.rank}", "")
            failure = self.failure()
            if failure is None or failure[0] != self.rank:
                return
            keys = [f"knows/{rank}" for rank in range(self.ranks) if rank not in self.silent]
            end = time.monotonic() + min(_LINGER, self.timeout)
            while not self._store.check(keys) and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(_GRACE)

    def leave(self) -> None:
        """Say that this process ends, and which error of the user's own ends it, if one does."""
        # At the end of a script that an error ended, Python keeps that error; in a session it may be an old one.
        error = sys.exc_info()[1] or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
        with contextlib.suppress(Exception):
            self._store.set(f"left/{self.rank}", "" if error is None else _text_of(error))
        self._store.close()


def _text_of(error: BaseException) -> str:
    if isinstance(error, PpdslError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _refusal(rank: str, error: str, moment: str) -> Diagnostic:
    quoted = "\n".join(f"rank {rank} | {line}".rstrip() for line in error.splitlines())
    return Diagnostic("refused-elsewhere", f"Rank {rank} refused {moment}, so all ranks do.", excerpt=quoted)


def _difference(name: str, moment: str, values: list[str | None], names: Sequence[str]) -> Diagnostic:
    groups: dict[str, list[str]] = {}
    for rank, value in zip(names, values, strict=True):
        groups.setdefault(value or "missing", []).append(rank)
    parts = [
        f"{value} on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}" for value, ranks in groups.items()
    ]
    message = f"Ranks disagree before {moment}: {name} is {' and '.join(parts)}."
    return Diagnostic("ranks-disagree", message, help="all ranks must build the same model and make the same calls")

"""A checked spec: every expression evaluated, every family unfolded, nothing looked up in a model yet.

`check` makes it from the syntax tree; `resolve` holds it against a model's outline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from ppdsl.source import Span
from ppdsl.units import Bytes

__all__ = [
    "AtCutpoint", "Balance", "CallOf", "CutDecl", "Difference", "Expectation", "InlineOrder", "Measure", "Mesh",
    "OfType", "Options", "Part", "PartKind", "Partition", "Path", "Regex", "Replica", "Rest", "ScheduleDecl",
    "Selection", "Settings", "SplitDecl", "StageDecl", "TieDecl", "TiePolicy", "Weight",
]  # fmt: skip

Key: TypeAlias = int | str
"""A stage's name: `embed`, `block[3]`, or a number."""


# ---------------------------------------------------------------- selections


class PartKind(StrEnum):
    """One piece of a dotted path."""

    NAME = "name"  # encoder
    INDEX = "index"  # [3], [-1]
    SLICE = "slice"  # [0:6], half-open; bounds may be None
    ALL = "all"  # [*]
    STAR = "star"  # * : any one name
    DEEP = "deep"  # ** : any names, also none


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a path; `name` for NAME, `index` for INDEX, `start` and `stop` for SLICE."""

    kind: PartKind
    name: str = ""
    index: int = 0
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Path:
    """Modules by their dotted names: `model.layers[0:6]`, `encoder.*`, `**`."""

    parts: tuple[Part, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Regex:
    """Modules whose whole dotted name matches; only constructs that cannot blow up are accepted by `check`."""

    pattern: str
    span: Span


@dataclass(frozen=True, slots=True)
class OfType:
    """Modules with this class name among their classes: `type(LlamaDecoderLayer)`."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Rest:
    """All that nothing else claims."""

    span: Span


@dataclass(frozen=True, slots=True)
class CallOf:
    """One call of a module that is called several times: `call(block, 1)` is the second."""

    path: Path
    number: int
    span: Span


@dataclass(frozen=True, slots=True)
class AtCutpoint:
    """What runs from the named `pp.cutpoint` on, up to the next border: `cut(name)`."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Difference:
    """What `left` selects without what `right` selects: `h[*] - h[3]`."""

    left: Selection
    right: Selection
    span: Span


Selection: TypeAlias = Path | Regex | OfType | Rest | CallOf | AtCutpoint | Difference


# ---------------------------------------------------------------- declarations


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one stage; None where the spec says nothing."""

    memory: Bytes | None = None
    recompute: str | tuple[Selection, ...] | None = None  # "full", "none", or modules
    dtype: str | None = None
    compile: bool | None = None
    freeze: bool | None = None


@dataclass(frozen=True, slots=True)
class StageDecl:
    """`stage NAME @ RANK { MEMBERS }`.

    Attributes:
        key: Its name; a member of a family has its number in it (`block[3]`).
        members: What it claims; empty for a stage that is declared empty.
        ranks: None: placed by the schedule's rule. Several: a stage replicated on these ranks.
        options: Memory limit and others.
        span: Of the head.
    """

    key: Key
    members: tuple[Selection, ...]
    ranks: tuple[int, ...] | None
    options: Options
    span: Span


class Balance(StrEnum):
    """What the parts of a `split` are balanced by."""

    COUNT = "count"
    PARAMS = "params"
    FLOPS = "flops"
    TIME = "time"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class SplitDecl:
    """`split SELECTIONS into N by BALANCE as NAME[i] @ EXPR`.

    Attributes:
        selections: What is divided.
        keys: The stages' names, one for each part.
        ranks: For each part its rank, or None: placed by the schedule's rule.
        balance: What is balanced.
        file: Path of the cost file, for `FILE` (already known to lie inside the spec's folder).
        options: Of each part.
        span: Of the head.
    """

    selections: tuple[Selection, ...]
    keys: tuple[Key, ...]
    ranks: tuple[int | None, ...]
    balance: Balance
    file: str | None
    options: Options
    span: Span


@dataclass(frozen=True, slots=True)
class CutDecl:
    """`cut before SELECTION as NAME @ RANK`: from there on the next stage runs.

    Attributes:
        after: From the end of the selected call on, instead of from its beginning.
        selection: A module (its first call), one call of it, or a named cutpoint.
        key: Of the stage that begins here; what runs before the first cut is stage 0, unless a stage is declared empty
            before it.
        rank: Or None: placed by the schedule's rule.
        span: Of the statement.
    """

    after: bool
    selection: Selection
    key: Key
    rank: int | None
    span: Span


@dataclass(frozen=True, slots=True)
class Replica:
    """`replicate SELECTION`: small modules without state of their own that run in every stage that needs them."""

    selection: Selection
    span: Span


class TiePolicy(StrEnum):
    """What a `tie` asks for."""

    SYNC = "sync"
    COLOCATE = "colocate"


@dataclass(frozen=True, slots=True)
class TieDecl:
    """`tie a.weight = b.weight`: asserts that the parameters are one; may choose how they are kept equal."""

    names: tuple[str, ...]
    policy: TiePolicy | None
    span: Span


@dataclass(frozen=True, slots=True)
class Weight:
    """`weight SELECTION = FACTOR`: multiplies the cost of these modules in every split."""

    selection: Selection
    factor: float
    span: Span


# ---------------------------------------------------------------- schedule, settings, contracts


@dataclass(frozen=True, slots=True)
class InlineOrder:
    """An order written in the spec: for each rank the text of its actions, repetitions unfolded (`0F0`, `1B3`)."""

    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class ScheduleDecl:
    """A family by name with arguments, a CSV file, or an inline order; exactly one of the three is set."""

    span: Span
    family: str | None = None
    arguments: tuple[tuple[str, int | str], ...] = ()
    file: str | None = None
    order: InlineOrder | None = None


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the device mesh by axis name, in the order written."""

    axes: tuple[tuple[str, int], ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Settings:
    """Run settings; None where the spec says nothing."""

    microbatches: int | None = None
    ranks: int | None = None
    memory: Bytes | None = None
    batch_axis: tuple[tuple[str, int | None], ...] | int | None = None
    loss: str | None = None
    device: str | None = None
    mesh: Mesh | None = None
    spans: tuple[tuple[str, Span], ...] = ()


class Measure(StrEnum):
    """What an `expect` measures."""

    IMBALANCE = "imbalance"  # work of the busiest rank over the mean
    BUBBLE = "bubble"
    MEMORY = "memory"
    PARAMS = "params"
    FLOPS = "flops"
    STAGES = "stages"
    RANKS = "ranks"
    MESSAGES = "messages"
    EDGES = "edges"


@dataclass(frozen=True, slots=True)
class Expectation:
    """A contract: `expect MEASURE(STAGE) OP BOUND`, or `expect edges a -> {b, c} -> d`.

    Attributes:
        measure: What is measured.
        stage: The stage it is about; None: the whole plan.
        comparison: `<=`, `<`, `>=`, `>`, `==` or `!=`; empty for edges.
        bound: As a plain number: bytes, share from 0 to 1, count.
        edges: For `EDGES`: pairs (from, to) that must be exactly the edges between the named stages.
        text: As the spec writes it, for the report.
        span: Of the statement.
    """

    measure: Measure
    stage: Key | None
    comparison: str
    bound: float
    edges: tuple[tuple[Key, Key], ...]
    text: str
    span: Span


@dataclass(frozen=True)
class Partition:
    """A whole spec, checked by itself.

    Attributes:
        name: Of the pipeline.
        file: Path of the spec, as it was given.
        stages, splits, cuts: In the order written.
        order: Keys of all stages in the order written, parts of splits and cuts among them; without the stage 0 that a
            first cut makes when nothing is declared before it.
        parameters: Values of the spec's own parameters, after `-D`.
        source_digest: Hash of all text that went into it, includes and parameters too.
    """

    name: str
    file: str
    stages: tuple[StageDecl, ...] = ()
    splits: tuple[SplitDecl, ...] = ()
    cuts: tuple[CutDecl, ...] = ()
    replicas: tuple[Replica, ...] = ()
    ties: tuple[TieDecl, ...] = ()
    weights: tuple[Weight, ...] = ()
    nosplit: tuple[Selection, ...] = ()
    schedule: ScheduleDecl | None = None
    settings: Settings = field(default_factory=Settings)
    expectations: tuple[Expectation, ...] = ()
    order: tuple[Key, ...] = ()
    parameters: tuple[tuple[str, int], ...] = ()
    source_digest: str = ""

"""Includes: the items of other files as if written here, and which of two declarations counts.

Only files inside the folder of the including file can be included, after links are followed, each once. What the
including file says about a setting or a parameter counts, wherever it says it; all else must not be declared twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.source import Span
from ppdsl.spec.context import Context
from ppdsl.spec.files import resolved_inside
from ppdsl.spec.nodes import IncludeNode, Item, LetNode, ParamNode, PipelineNode
from ppdsl.spec.parse import Parsed, parse
from ppdsl.spec.scan import MAX_BYTES

__all__ = ["MAX_INCLUDES", "Gathered", "gather"]

MAX_INCLUDES = 32


@dataclass
class Gathered:
    """The items of a spec and of all that it includes.

    Attributes:
        file: The main file.
        start: Its first place.
        names: Parameters and `let`s, in the order in which they are worked out.
        body: Items of pipelines, those of included files first.
        head: The pipeline; that of the main file if it has one.
        texts: All text that was read.
        parents: For each included file the file that includes it.
    """

    file: str
    start: Span
    names: list[ParamNode | LetNode] = field(default_factory=list)
    body: list[Item] = field(default_factory=list)
    head: PipelineNode | None = None
    texts: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)

    def overrides(self, file: str, earlier: str) -> bool:
        """Return whether what `file` says replaces what `earlier` says: it includes it, itself or through others."""
        while earlier in self.parents:
            earlier = self.parents[earlier]
            if earlier == file:
                return True
        return False


def gather(parsed: Parsed, file: str, path: Path | None, context: Context) -> Gathered:
    """Return the items of a spec and of all that it includes; findings go to the context.

    Args:
        parsed: The main file.
        file: Its name, for spans.
        path: Where it lies; None for a text without a file.
        context: Takes findings; learns the folders.
    """
    gathered = Gathered(file, Span(file, 1, 1, 1, 1))
    _Gatherer(gathered, context).add(parsed, file, path, () if path is None else (path,))
    return gathered


class _Gatherer:
    def __init__(self, gathered: Gathered, context: Context) -> None:
        self.gathered, self.context = gathered, context
        self.seen: dict[Path, Span] = {}
        self.at: dict[str, int] = {}  # positions of names

    def add(self, parsed: Parsed, file: str, path: Path | None, chain: tuple[Path, ...]) -> None:
        self.context.folders[file] = self.context.folder if path is None else path.parent
        self.context.findings += parsed.diagnostics
        self.context.complete &= parsed.complete
        self.gathered.texts.append(parsed.text)
        pipeline: PipelineNode | None = None
        for item in parsed.tree.items:
            if pipeline is not None:
                message = f"Nothing can stand after the end of pipeline `{pipeline.name}`."
                first = Label(pipeline.head, "the pipeline")
                self.context.report(
                    "after-pipeline", message, item.span, first, help="move it before, or between its braces"
                )
            match item:
                case ParamNode() | LetNode():
                    self.name(item)
                case IncludeNode():
                    self.include(item, chain)
                case PipelineNode():
                    if pipeline is None:
                        pipeline = item
                        self.pipeline(item)
                case _ if pipeline is None:
                    message = "Stages and settings stand between the braces of a pipeline."
                    self.context.report("outside-pipeline", message, item.span, help="write `pipeline NAME { ... }`")
                case _:
                    pass

    def pipeline(self, node: PipelineNode) -> None:
        self.gathered.head = node
        for item in node.items:
            if isinstance(item, ParamNode | LetNode | IncludeNode | PipelineNode):
                kind = {ParamNode: "param", LetNode: "let", IncludeNode: "include"}.get(type(item), "pipeline")
                message = f"`{kind}` cannot stand between the braces of a pipeline."
                self.context.report("inside-pipeline", message, item.span, help="write it before the pipeline")
                if isinstance(item, ParamNode | LetNode):
                    self.name(item)
            else:
                self.gathered.body.append(item)

    def name(self, node: ParamNode | LetNode) -> None:
        names = self.gathered.names
        position = self.at.setdefault(node.name, len(names))
        if position == len(names):
            names.append(node)
            return
        earlier = names[position]
        if self.gathered.overrides(node.span.file, earlier.span.file):
            names[position] = node
        elif not self.gathered.overrides(earlier.span.file, node.span.file):
            label = Label(earlier.span, "first declared here")
            self.context.report("duplicate-name", f"`{node.name}` is declared twice.", node.span, label)

    def include(self, node: IncludeNode, chain: tuple[Path, ...]) -> None:
        folder = self.context.folder_of(node.span.file)
        path = resolved_inside(node.path, node.span, folder, self.context)
        if path is None:
            return
        if path in [one.resolve() for one in chain]:
            message = f"`{node.path}` includes itself" + ("." if len(chain) == 1 else ", through other files.")
            self.context.report("recursive-include", message, node.span, help="take one of the includes out")
            return
        if path in self.seen:
            message = f"`{node.path}` is included twice."
            self.context.report("duplicate-include", message, node.span, Label(self.seen[path], "first included here"))
            return
        if len(self.seen) >= MAX_INCLUDES:
            self.context.report("too-many-includes", f"A spec includes at most {MAX_INCLUDES} files.", node.span)
            return
        self.seen[path] = node.span
        parsed, name = self.read(path, node, folder)
        if parsed is not None:
            self.gathered.parents[name] = node.span.file
            self.add(parsed, name, path, (*chain, path))

    def read(self, path: Path, node: IncludeNode, folder: Path | None) -> tuple[Parsed | None, str]:
        name = str(Path(node.span.file).parent / node.path) if folder is not None else node.path
        try:
            with path.open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
        except OSError as error:
            message = f"`{node.path}` cannot be read: {error.strerror}."
            self.context.findings.append(Diagnostic("unreadable-spec", message, (Label(node.span),)))
            return None, name
        return parse(data, name), name

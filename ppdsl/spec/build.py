"""From what the grammar recognizes to the items of a file."""

from __future__ import annotations

from dataclasses import dataclass

from ppdsl.source import Span
from ppdsl.spec import nodes, terms
from ppdsl.spec.build_terms import EXPRESSION, Block, Children, TermBuilder, Token, kept

__all__ = ["Builder", "Version"]


@dataclass(frozen=True, slots=True)
class Version:
    """The first line."""

    number: int
    span: Span


@dataclass(frozen=True, slots=True)
class _Balance:
    left: Token
    right: Token | None
    span: Span


@dataclass(frozen=True, slots=True)
class _Link:
    stages: tuple[nodes.StageReference, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class _Chain:
    links: tuple[tuple[nodes.StageReference, ...], ...]
    span: Span


def _pairs(block: Block | None) -> tuple[terms.Pair, ...]:
    return () if block is None else block.pairs


class Builder(TermBuilder):
    """All rules."""

    def stage_name(self, children: Children) -> nodes.StageReference:
        """NAME or INT."""
        token = children[0]
        name = self.integer(token) if token.type == "INT" else str(token)
        return nodes.StageReference(name, None, self.span(children))

    def stage_reference(self, children: Children) -> nodes.StageReference:
        """Name, or name[expr]."""
        return nodes.StageReference(children[0].name, children[2], self.span(children))

    def family(self, children: Children) -> nodes.Family:
        """[NAME in range]."""
        return nodes.Family(str(children[1]), children[3], self.span(children))

    def placement(self, children: Children) -> nodes.Placement:
        """@ expr, or @ [expr, expr]."""
        several = len(children) > 2
        return nodes.Placement(kept(children, EXPRESSION), several, self.span(children))

    def member(self, children: Children) -> nodes.Member:
        """A selection."""
        return nodes.Member(children[0], span=self.span(children))

    def members(self, children: Children) -> tuple[nodes.Member, ...]:
        """Members between commas."""
        return kept(children, nodes.Member)

    def options(self, children: Children) -> Block:
        """With { pairs }."""
        return Block(children[2], self.span(children))

    def stage(self, children: Children) -> nodes.StageNode:
        """Stage NAME[FAMILY] @ PLACEMENT { MEMBERS } with { OPTIONS }."""
        _, name, family, placement, _, members, _, options = children
        return nodes.StageNode(
            name.name, family, placement, members or (), _pairs(options), span=self.span(children),
            head=self.span(children[:4]),
        )  # fmt: skip

    def split(self, children: Children) -> nodes.SplitNode:
        """Split SELECTIONS into PARTS by BALANCE as NAME[INDEX] @ PLACEMENT."""
        _, selections, _, parts, _, balance, _, name, _, index, _, placement, options = children
        measure, file = balance.left, balance.right
        return nodes.SplitNode(
            selections, parts, str(measure), None if file is None else str(file)[1:-1], name.name, str(index),
            placement, _pairs(options), span=self.span(children), balance_span=balance.span,
        )  # fmt: skip

    def balance(self, children: Children) -> _Balance:
        """NAME, or NAME("file")."""
        return _Balance(children[0], children[2], self.span(children))

    def cut(self, children: Children) -> nodes.CutNode:
        """Cut before|after SELECTION as NAME @ RANK."""
        _, where, selection, _, name, placement = children
        return nodes.CutNode(str(where), selection, name and name.name, placement, span=self.span(children))

    def cut_at(self, children: Children) -> nodes.CutNode:
        """Cut at NAME as NAME @ RANK."""
        return self.cut(children)

    def weight(self, children: Children) -> nodes.WeightNode:
        """Weight SELECTION = FACTOR."""
        _, selection, _, factor = children
        if not isinstance(factor, EXPRESSION):
            factor = self.literal([factor])
        return nodes.WeightNode(selection, factor, span=self.span(children))

    def nosplit(self, children: Children) -> nodes.NosplitNode:
        """Nosplit SELECTION."""
        return nodes.NosplitNode(children[1], span=self.span(children))

    def replicate(self, children: Children) -> nodes.ReplicateNode:
        """Replicate SELECTION."""
        return nodes.ReplicateNode(children[1], span=self.span(children))

    def tie(self, children: Children) -> nodes.TieNode:
        """Tie PATH = PATH POLICY."""
        policy = None if children[-1] is None else str(children[-1])
        return nodes.TieNode(kept(children, terms.PathNode), policy, span=self.span(children))

    def expect(self, children: Children) -> nodes.ExpectNode:
        """Expect MEASURE(STAGE) COMPARISON BOUND."""
        _, measure, _, stage, _, comparison, bound = children
        return nodes.ExpectNode(
            str(measure), stage, str(comparison), bound, span=self.span(children), measure_span=self.spot(measure)
        )

    def expect_edges(self, children: Children) -> nodes.EdgesNode:
        """Expect edges CHAIN, CHAIN."""
        chains = kept(children, _Chain)
        return nodes.EdgesNode(tuple(chain.links for chain in chains), span=self.span(children))

    def chain(self, children: Children) -> _Chain:
        """Link -> link."""
        return _Chain(tuple(link.stages for link in kept(children, _Link)), self.span(children))

    def chain_link(self, children: Children) -> _Link:
        """Stage, or { stages }."""
        return _Link(kept(children, nodes.StageReference), self.span(children))

    def setting(self, children: Children) -> nodes.SettingNode:
        """NAME = value, or NAME { pairs }."""
        value = (children[2] or ()) if len(children) == 4 else children[2]
        return nodes.SettingNode(str(children[0]), value, span=self.span(children))

    def param(self, children: Children) -> nodes.ParamNode:
        """Param NAME = default."""
        return nodes.ParamNode(str(children[1]), children[3], span=self.span(children))

    def let(self, children: Children) -> nodes.LetNode:
        """Let NAME = value."""
        return nodes.LetNode(str(children[1]), children[3], span=self.span(children))

    def include(self, children: Children) -> nodes.IncludeNode:
        """Include "path"."""
        return nodes.IncludeNode(str(children[1])[1:-1], span=self.span(children))

    def pipeline_head(self, children: Children) -> nodes.PipelineNode:
        """Pipeline NAME {."""
        return nodes.PipelineNode(str(children[1]), (), span=self.span(children), head=self.span(children[:2]))

    def pipeline(self, children: Children) -> nodes.PipelineNode:
        """Pipeline NAME { items }."""
        head, *items, _ = children
        return nodes.PipelineNode(head.name, tuple(items), span=self.span(children), head=head.head)

    def version(self, children: Children) -> Version:
        """Ppspec INT."""
        return Version(self.integer(children[1]), self.span(children))

    def file(self, children: Children) -> tuple[Version | None, tuple[nodes.Item, ...]]:
        """Version and items."""
        version = children[0]
        return version, tuple(children[1:])

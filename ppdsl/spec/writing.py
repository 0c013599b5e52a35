"""Nodes as canonical text: expressions, selections, values, and items on one line."""

from __future__ import annotations

from ppdsl.spec import nodes, terms
from ppdsl.spec.terms import Expression, LiteralKind, PathPartKind, SelectionNode

__all__ = [
    "action_text", "expression_text", "item_text", "pairs_text", "placement_text", "range_text", "row_head",
    "selection_text", "stage_head", "value_text", "with_text",
]  # fmt: skip

# How tightly operators bind; a negation binds less than `**` to its right and more than `*`.
_STRENGTH = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2, "**": 4}
_NEGATION = 3


def expression_text(node: Expression, strength: int = 0) -> str:
    """Return an expression, in parentheses where something around it would bind tighter than `strength` allows."""
    match node:
        case terms.Number(value):
            return str(value)
        case terms.Name(name):
            return name
        case terms.Negative(operand):
            own, text = _NEGATION, f"-{expression_text(operand, _NEGATION)}"
        case _:
            own, text = _STRENGTH[node.operator], _binary(node)
    return f"({text})" if own < strength else text


def _binary(node: terms.Binary) -> str:
    own = _STRENGTH[node.operator]
    # The right side of a power may be a negation or another power; all other operators take from the left.
    left, right = (own + 1, _NEGATION) if node.operator == "**" else (own, own + 1)
    return f"{expression_text(node.left, left)} {node.operator} {expression_text(node.right, right)}"


def selection_text(node: SelectionNode) -> str:
    """Return a selection."""
    match node:
        case terms.PathNode(parts):
            return _path(parts)
        case terms.RegexNode(pattern):
            return f"/{_escaped(pattern)}/"
        case terms.TypeNode(name):
            return f"type({name})"
        case terms.RestNode():
            return "rest"
        case terms.CallNode(path, number):
            return f"call({_path(path.parts)}, {expression_text(number)})"
        case terms.CutpointNode(name):
            return f"cut({_cutpoint(name)})"
        case terms.DifferenceNode(first, removed):
            return " - ".join(selection_text(one) for one in (first, *removed))


def _path(parts: tuple[terms.PathPart, ...]) -> str:
    text = ""
    for part in parts:
        piece = _part(part)
        text += piece if piece.startswith("[") or not text else f".{piece}"
    return text


def _part(part: terms.PathPart) -> str:
    match part.kind:
        case PathPartKind.NAME:
            return part.name
        case PathPartKind.INDEX:
            return f"[{'' if part.index is None else expression_text(part.index)}]"
        case PathPartKind.SLICE:
            start, stop = (None if end is None else expression_text(end) for end in (part.start, part.stop))
            return f"[{start or ''}:{stop or ''}]"
        case PathPartKind.ALL:
            return "[*]"
        case PathPartKind.STAR:
            return "*"
        case PathPartKind.DEEP:
            return "**"


def _escaped(pattern: str) -> str:
    text, escaped = "", False
    for letter in pattern:
        text += f"\\{letter}" if letter == "/" and not escaped else letter
        escaped = letter == "\\" and not escaped
    return text


def _cutpoint(name: str) -> str:
    plain = name.isidentifier()
    return name if plain else f'"{name}"'


def range_text(node: terms.Range) -> str:
    """Return a range; both spellings become the one that shows that its end is not in it."""
    return f"{expression_text(node.start)}..<{expression_text(node.stop)}"


def value_text(node: terms.Value) -> str:
    """Return a value on one line."""
    match node:
        case terms.Literal(LiteralKind.STRING, text):
            return f'"{text}"'
        case terms.Literal(_, text):
            return text
        case terms.CallValue(name, arguments):
            return f"{name}({', '.join(_argument(argument) for argument in arguments)})"
        case terms.ListValue(selections):
            return f"[{', '.join(selection_text(selection) for selection in selections)}]"
        case terms.OrderValue(rows):
            inner = " ".join(f"{row_head(row)}{''.join(f' {action_text(one)}' for one in row.actions)}" for row in rows)
            return f"order {{ {inner} }}" if rows else "order { }"
        case _:
            return expression_text(node)


def _argument(node: terms.Argument) -> str:
    value = value_text(node.value)
    return value if node.name is None else f"{node.name} = {value}"


def row_head(row: terms.RowNode) -> str:
    """Return what stands before the actions of a row."""
    if row.range is not None:
        return f"rank {row.index} in {range_text(row.range)}:"
    return f"rank {'' if row.rank is None else expression_text(row.rank)}:"


def action_text(node: terms.OrderAction) -> str:
    """Return an action of an order, or a repetition."""
    match node:
        case terms.WrittenAction(text):
            return text
        case terms.ActionNode(stage, kind, microbatch):
            inner = expression_text(microbatch)
            if isinstance(stage, terms.Number):
                return f"{stage.value}{kind}[{inner}]"
            return f"[{expression_text(stage)}]{kind}[{inner}]"
        case terms.RepeatNode(actions, name, numbers):
            return f"({' '.join(action_text(one) for one in actions)} for {name} in {range_text(numbers)})"


def pairs_text(pairs: tuple[terms.Pair, ...]) -> str:
    """Return pairs between braces."""
    inner = ", ".join(f"{pair.name} = {value_text(pair.value)}" for pair in pairs)
    return f"{{ {inner} }}" if inner else "{ }"


def placement_text(node: nodes.Placement | None) -> str:
    """Return a placement with a space before it, or nothing."""
    if node is None:
        return ""
    ranks = ", ".join(expression_text(rank) for rank in node.ranks)
    return f" @ [{ranks}]" if node.several else f" @ {ranks}"


def _reference(node: nodes.StageReference) -> str:
    return str(node.name) if node.index is None else f"{node.name}[{expression_text(node.index)}]"


def _link(stages: tuple[nodes.StageReference, ...]) -> str:
    names = ", ".join(_reference(stage) for stage in stages)
    return names if len(stages) == 1 else f"{{{names}}}"


def stage_head(node: nodes.StageNode) -> str:
    """Return what stands before the braces of a stage."""
    family = "" if node.family is None else f"[{node.family.name} in {range_text(node.family.range)}]"
    return f"stage {node.name}{family}{placement_text(node.placement)}"


def with_text(options: tuple[terms.Pair, ...]) -> str:
    """Return the options behind a stage, or nothing."""
    return f" with {pairs_text(options)}" if options else ""


def item_text(node: nodes.Item) -> str:  # noqa: C901 - one case for each kind of item
    """Return an item on one line, without its comments; of a pipeline only its head."""
    match node:
        case nodes.ParamNode(name, default):
            return f"param {name} = {expression_text(default)}"
        case nodes.LetNode(name, value):
            return f"let {name} = {expression_text(value)}"
        case nodes.IncludeNode(path):
            return f'include "{path}"'
        case nodes.SettingNode(name, value):
            return f"{name} {pairs_text(value)}" if isinstance(value, tuple) else f"{name} = {value_text(value)}"
        case nodes.StageNode():
            inner = ", ".join(selection_text(member.selection) for member in node.members)
            return f"{stage_head(node)} {f'{{ {inner} }}' if inner else '{ }'}{with_text(node.options)}"
        case nodes.SplitNode():
            return _split(node)
        case nodes.CutNode():
            return _cut(node)
        case nodes.WeightNode(selection, factor):
            return f"weight {selection_text(selection)} = {value_text(factor)}"
        case nodes.NosplitNode(selection):
            return f"nosplit {selection_text(selection)}"
        case nodes.ReplicateNode(selection):
            return f"replicate {selection_text(selection)}"
        case nodes.TieNode(paths, policy):
            return f"tie {' = '.join(selection_text(path) for path in paths)}{f' {policy}' if policy else ''}"
        case nodes.ExpectNode():
            about = "" if node.stage is None else f"({_reference(node.stage)})"
            return f"expect {node.measure}{about} {node.comparison} {value_text(node.bound)}"
        case nodes.EdgesNode(chains):
            return f"expect edges {', '.join(' -> '.join(_link(link) for link in chain) for chain in chains)}"
        case nodes.PipelineNode(name):
            return f"pipeline {name} {{"


def _split(node: nodes.SplitNode) -> str:
    what = ", ".join(selection_text(selection) for selection in node.selections)
    balance = node.balance if node.file is None else f'{node.balance}("{node.file}")'
    name = f"{node.name}[{node.index}]{placement_text(node.placement)}{with_text(node.options)}"
    return f"split {what} into {expression_text(node.parts)} by {balance} as {name}"


def _cut(node: nodes.CutNode) -> str:
    if node.where == "at" and isinstance(node.selection, terms.CutpointNode):
        what = _cutpoint(node.selection.name)
    else:
        what = selection_text(node.selection)
    name = "" if node.name is None else f" as {node.name}"
    return f"cut {node.where} {what}{name}{placement_text(node.placement)}"

"""Trees of specs for hypothesis: everything that the grammar can say, sensible or not."""

from __future__ import annotations

from hypothesis import strategies as st

from ppdsl.spec import nodes, terms
from ppdsl.spec.terms import LiteralKind, PathPartKind

names = st.sampled_from(
    ["a", "h", "layers", "model", "stage", "rest", "cut", "type", "in", "order", "sync", "with", "_x", "äpfel"]
)
# The first name of a path is no word that the grammar gives another meaning there.
plain = st.sampled_from(["a", "h", "layers", "model", "stage", "in", "_x", "äpfel", "split", "weight"])
# Behind an item that may go on, a setting's name is no word that another item begins with.
settings = st.sampled_from(["memory", "ranks", "anything", "x"])

numbers = st.builds(terms.Number, st.integers(0, 10**18 - 1))
expressions = st.recursive(
    numbers | st.builds(terms.Name, plain),
    lambda inner: (
        st.builds(terms.Negative, inner)
        | st.builds(terms.Binary, st.sampled_from(["+", "-", "*", "//", "%", "**"]), inner, inner)
    ),
    max_leaves=8,
)
ranges = st.builds(terms.Range, expressions, expressions)

indices = st.builds(lambda index: terms.PathPart(PathPartKind.INDEX, index=index), expressions)
slices = st.builds(
    lambda start, stop: terms.PathPart(PathPartKind.SLICE, start=start, stop=stop),
    st.none() | expressions,
    st.none() | expressions,
)
stars = st.sampled_from([PathPartKind.ALL, PathPartKind.STAR, PathPartKind.DEEP]).map(terms.PathPart)
named = names.map(lambda name: terms.PathPart(PathPartKind.NAME, name))
heads = plain.map(lambda name: terms.PathPart(PathPartKind.NAME, name)) | stars | indices
paths = st.builds(
    lambda head, more: terms.PathNode((head, *more)),
    heads,
    st.lists(named | indices | slices | stars, max_size=4),
)
patterns = st.lists(
    st.sampled_from(["a", ".", "*", "\\.", "/", "[0-9]", " ", "#", '"', "\\\\"]), min_size=1, max_size=6
).map("".join)
regexes = st.builds(terms.RegexNode, patterns.filter(lambda text: text[0] not in "/* " and not text.endswith("\\" * 3)))
cutpoints = st.builds(terms.CutpointNode, st.sampled_from(["half", "two words", "a.b", "1st", "stage"]))
primaries = (
    paths
    | regexes
    | st.builds(terms.TypeNode, plain)
    | st.builds(terms.RestNode)
    | st.builds(terms.CallNode, paths, expressions)
    | cutpoints
)
differences = st.builds(terms.DifferenceNode, primaries, st.lists(primaries, min_size=1, max_size=3).map(tuple))
selections = primaries | differences

literals = st.sampled_from(
    [
        terms.Literal(LiteralKind.QUANTITY, "80GiB"),
        terms.Literal(LiteralKind.QUANTITY, "1f1b"),
        terms.Literal(LiteralKind.QUANTITY, "1.5M"),
        terms.Literal(LiteralKind.DECIMAL, "1.10"),
        terms.Literal(LiteralKind.PERCENT, "12%"),
        terms.Literal(LiteralKind.PERCENT, "12.5%"),
    ]
)
strings = st.sampled_from(["", "order.csv", "a # b", "/x/"]).map(lambda text: terms.Literal(LiteralKind.STRING, text))
arguments = st.builds(terms.Argument, st.none() | plain, expressions | strings)
calls = st.builds(
    terms.CallValue, st.sampled_from(["zero_bubble", "1f1b", "csv"]), st.lists(arguments, max_size=3).map(tuple)
)
lists = st.builds(terms.ListValue, st.lists(selections, min_size=1, max_size=3).map(tuple))
actions = st.recursive(
    st.builds(terms.WrittenAction, st.sampled_from(["0F0", "12I3", "1W2", "0B10"]))
    | st.builds(terms.ActionNode, expressions, st.sampled_from("FBIW"), expressions),
    lambda inner: st.builds(terms.RepeatNode, st.lists(inner, min_size=1, max_size=3).map(tuple), plain, ranges),
    max_leaves=4,
)
some_actions = st.lists(actions, max_size=4).map(tuple)
rows = st.builds(lambda rank, acts: terms.RowNode(rank, "", None, acts), expressions, some_actions) | st.builds(
    lambda name, numbers, acts: terms.RowNode(None, name, numbers, acts), plain, ranges, some_actions
)
orders = st.builds(terms.OrderValue, st.lists(rows, max_size=3).map(tuple))
values = expressions | literals | strings | calls | lists | orders
pairs = st.lists(st.builds(terms.Pair, plain, values), min_size=1, max_size=3).map(tuple)
no_pairs = st.just(()) | pairs

comments = st.sampled_from(["# why", "#", "# a { b } # c", '# "', "# ü"])
leading = st.lists(comments, max_size=2).map(tuple)
notes = st.builds(nodes.Notes, leading, st.just("") | comments, blank=st.booleans())
block_notes = st.builds(nodes.Notes, leading, st.just("") | comments, st.just("") | comments, leading, st.booleans())
member_notes = st.builds(nodes.Notes, leading, st.just("") | comments)

stage_names = plain | st.integers(0, 99)
placements = (
    st.none()
    | st.builds(lambda rank: nodes.Placement((rank,)), expressions)
    | st.builds(
        lambda ranks: nodes.Placement(tuple(ranks), several=True), st.lists(expressions, min_size=1, max_size=3)
    )
)
families = st.none() | st.builds(nodes.Family, plain, ranges)
references = st.builds(nodes.StageReference, stage_names, st.none() | expressions)
links = st.lists(references, min_size=1, max_size=3).map(tuple)
chains = st.lists(links, min_size=2, max_size=3).map(tuple)
members = st.lists(st.builds(nodes.Member, selections, member_notes), min_size=1, max_size=4).map(tuple)

full_stages = st.builds(nodes.StageNode, stage_names, families, placements, members, no_pairs, block_notes)
empty_stages = st.builds(nodes.StageNode, stage_names, families, placements, st.just(()), no_pairs, notes)
splits = st.builds(
    lambda what, parts, balance, name, index, placement, options, note: nodes.SplitNode(
        tuple(what), parts, balance[0], balance[1], name, index, placement, options, note
    ),
    st.lists(selections, min_size=1, max_size=3), expressions,
    st.sampled_from([("params", None), ("file", "costs.csv")]),
    stage_names, plain, placements, no_pairs, notes,
)  # fmt: skip
cuts = st.builds(
    nodes.CutNode, st.sampled_from(["before", "after"]), selections, st.none() | stage_names, placements, notes
) | st.builds(nodes.CutNode, st.just("at"), cutpoints, st.none() | stage_names, placements, notes)
policies = st.none() | st.sampled_from(["sync", "colocate"])
tied = st.lists(paths, min_size=2, max_size=3).map(tuple)
comparisons = st.sampled_from(["<=", "<", ">=", ">", "==", "!="])
measures = st.sampled_from(["bubble", "memory", "stages"])

inner_items = (
    st.builds(nodes.SettingNode, settings, values | no_pairs, notes)
    | full_stages
    | empty_stages
    | splits
    | cuts
    | st.builds(nodes.WeightNode, selections, expressions | st.just(terms.Literal(LiteralKind.DECIMAL, "1.5")), notes)
    | st.builds(nodes.NosplitNode, selections, notes)
    | st.builds(nodes.ReplicateNode, selections, notes)
    | st.builds(nodes.TieNode, tied, policies, notes)
    | st.builds(nodes.ExpectNode, measures, st.none() | references, comparisons, expressions | literals, notes)
    | st.builds(nodes.EdgesNode, st.lists(chains, min_size=1, max_size=2).map(tuple), notes)
)
outer_items = (
    st.builds(nodes.ParamNode, plain, expressions, notes)
    | st.builds(nodes.LetNode, plain, expressions, notes)
    | st.builds(nodes.IncludeNode, st.sampled_from(["base.ppspec", "a b.ppspec"]), notes)
)
pipelines = st.builds(nodes.PipelineNode, plain, st.lists(inner_items, max_size=5).map(tuple), block_notes)

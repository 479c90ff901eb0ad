"""A picture as DOT, the language of Graphviz."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from fractrain_fx.drawing.labels import bits_text
from fractrain_fx.drawing.picture import Arrow, Picture, Shape
from fractrain_fx.errors import require_packages

if TYPE_CHECKING:
    from graphviz import Digraph

__all__ = ["COLOURS", "digraph"]

COLOURS = {
    "gated": "#ffd9a8",
    "scheduled": "#cfe3ff",
    "pinned": "#e3d4f7",
    "float": "#e4e7eb",
    "uncounted": "#f7c6c6",
    "mixed": "#f3ead9",
    "gate": "#ffe14d",
    "controller": "#ffc300",
    "stage": "#8fbdf7",
    "skip": "#fff3b0",
    "cost": "#c3ebc9",
    "step": "#ffffff",
    "add": "#ffffff",
    "input": "#333f4d",
    "output": "#333f4d",
}
"""Fill of a shape: by mode for blocks and ops, by kind for others. All but the last two have black text."""

_QUANTIZER = "#ff9d3c"
_OPERANDS = {"forward": "in", "weight": "weight", "backward": "grad"}
_LEGEND = {
    "gated": "gated: bits chosen for each sample",
    "scheduled": "scheduled: bits by stage",
    "pinned": "pinned by a rule",
    "float": "float",
    "uncounted": "no formula for its cost",
    "mixed": "ops of several kinds",
    "gate": "gate: reads the entry, chooses",
    "controller": "controller: one LSTM for all gates",
    "stage": "stage: bits of all scheduled ops",
    "skip": "acts on what a block gives",
    "cost": "cost of the step",
}
_ARROWS = {
    "data": {"color": "#333f4d", "weight": "8"},
    "skip": {"color": "#1f77b4", "style": "dashed", "penwidth": "1.6", "constraint": "false"},
    "reads": {"color": "#b58900", "arrowsize": "0.6"},
    "choice": {"color": "#d97b00", "penwidth": "1.4", "arrowsize": "0.7", "constraint": "false"},
    "state": {"color": "#b58900", "style": "dotted", "penwidth": "1.4", "arrowsize": "0.6"},
    "cost": {"color": "#2e8b57", "style": "dotted", "penwidth": "1.4"},
}


def digraph(picture: Picture) -> Digraph:
    """The picture with colours, frames and a legend.

    Raises:
        MissingPackageError: the package ``graphviz`` is missing.
    """
    require_packages("a drawing (.svg, .png, .pdf or .dot)", "draw")
    from graphviz import Digraph

    graph = Digraph(
        "fractrain",
        graph_attr={
            "rankdir": "TB",
            "nodesep": "0.25",
            "ranksep": "0.28",
            "fontname": "Helvetica",
            "bgcolor": "white",
            "label": f"<{escape(picture.title)}>",
            "labelloc": "t",
            "fontsize": "20",
            "newrank": "true",
        },
        node_attr={
            "fontname": "Helvetica",
            "fontsize": "11",
            "shape": "box",
            "style": "filled,rounded",
            "margin": "0.09,0.05",
            "height": "0.3",
            "color": "#5b6673",
        },
        edge_attr={"fontname": "Helvetica", "fontsize": "9"},
    )
    _shapes(graph, picture)
    for arrow in _drawn(picture):
        graph.edge(_id(arrow.source), _id(arrow.target), **_ARROWS[arrow.kind])
    _legend(graph, picture)
    return graph


def _id(name: str) -> str:
    return name.replace(":", "_").replace("\\", "_")  # Graphviz reads text after a colon as a port


def _shapes(graph: Digraph, picture: Picture) -> None:
    """Draw shapes, and those of a block inside its frame if blocks are frames."""
    framed: dict[str, list[Shape]] = {name: [] for name in picture.blocks}
    for shape in picture.shapes.values():
        if shape.block in framed:
            framed[shape.block].append(shape)
        else:
            _shape(graph, shape, group="" if picture.blocks else "gates" if shape.kind == "gate" else "blocks")
    for name, shapes in framed.items():
        block = picture.blocks[name]
        with graph.subgraph(name=f"cluster_{_id(name)}") as frame:
            subtitle = "; ".join((block.lines[0], *((block.tensors,) if block.tensors else ()), block.lines[-1]))
            title = f"<<b>{escape(block.title)}</b>  {escape(subtitle)}>"
            frame.attr(
                label=title,
                labeljust="l",
                fontsize="11",
                style="rounded,filled",
                fillcolor="#f8f9fa",
                color="#9aa5b1",
                margin="8",
            )
            for shape in shapes:
                _shape(frame, shape)
    if not picture.blocks:
        for shape in picture.shapes.values():
            if shape.kind == "gate":
                with graph.subgraph() as row:
                    row.attr(rank="same")
                    row.node(_id(shape.id))
                    row.node(_id(f"block {shape.block}"))


def _shape(graph: Digraph, shape: Shape, group: str = "") -> None:
    fill = COLOURS[shape.mode or shape.kind]
    text = {"fontcolor": "white"} if shape.kind in ("input", "output") else {}
    form = {"shape": "circle", "width": "0.3", "fixedsize": "true", "fontsize": "14"} if shape.kind == "add" else {}
    graph.node(_id(shape.id), _text(shape), fillcolor=fill, tooltip=_tip(shape), group=group, **text, **form)


def _text(shape: Shape) -> str:
    """Title and lines. An op also has its bits as cells, coloured if a quantize node rounds."""
    title = f"<b>{escape(shape.title)}</b>" if shape.kind in ("block", "op") else escape(shape.title)
    lines = [title, *(f'<font point-size="9">{escape(line)}</font>' for line in shape.lines)]
    if shape.kind != "op" or shape.mode in ("float", "uncounted"):
        if shape.kind == "block" and shape.mode != "float":
            lines.append(f'<font point-size="9">{escape(_bits(shape))}</font>')
        return f"<{'<br/>'.join(lines)}>"
    cells = "".join(_cell(_OPERANDS[name], bits) for name, bits in shape.bits.items())
    return (
        '<<table border="0" cellborder="0" cellspacing="1" cellpadding="1">'
        f'<tr><td colspan="3">{"<br/>".join(lines)}</td></tr><tr>{cells}</tr></table>>'
    )


def _cell(name: str, bits: tuple[int, int]) -> str:
    text = bits_text(bits)
    colour = "" if text == "float" else f' bgcolor="{_QUANTIZER}"'
    return f'<td{colour}><font point-size="8"> {name} {text} </font></td>'


def _bits(shape: Shape) -> str:
    return ", ".join(f"{_OPERANDS[name]} {bits_text(bits)}" for name, bits in shape.bits.items()) + " bit"


def _tip(shape: Shape) -> str:
    facts = [f"{name}: {value}" for name, value in shape.facts()]
    return "&#10;".join(escape(fact).replace("\\", "\\\\") for fact in facts)


def _drawn(picture: Picture) -> Iterator[Arrow]:
    """All arrows, except that a gate has only the first one to the ops in its frame; the legend explains this."""
    gates: set[str] = set()
    for arrow in picture.arrows:
        if arrow.kind == "choice" and picture.shapes[arrow.target].kind == "op":
            if arrow.source in gates:
                continue
            gates.add(arrow.source)
        yield arrow


def _legend(graph: Digraph, picture: Picture) -> None:
    shown = {shape.mode or shape.kind for shape in picture.shapes.values()}
    rows = [
        f'<tr><td bgcolor="{COLOURS[key]}" width="24"> </td><td align="left">{escape(words)}</td></tr>'
        for key, words in _LEGEND.items()
        if key in shown
    ]
    if any(shape.kind == "op" and shape.mode in ("gated", "scheduled", "pinned") for shape in picture.shapes.values()):
        words = "quantize node, with its bits"
        rows.append(f'<tr><td bgcolor="{_QUANTIZER}" width="24"> </td><td align="left">{words}</td></tr>')
    kinds = {arrow.kind for arrow in picture.arrows}
    choice = "choice of a gate: bits of all ops in its frame" if picture.blocks else "choice of a gate"
    for kind, dash, words in (
        ("skip", "- - -", "skip path"),
        ("choice", "——", choice),
        ("state", "· · ·", "state of the controller"),
    ):
        if kind in kinds:
            colour = _ARROWS[kind]["color"]
            rows.append(f'<tr><td><font color="{colour}"><b>{dash}</b></font></td><td align="left">{words}</td></tr>')
    table = f'<<table border="0" cellborder="0" cellspacing="2">{"".join(rows)}</table>>'
    graph.node("legend", table, shape="box", style="rounded", color="#9aa5b1", fontsize="10")

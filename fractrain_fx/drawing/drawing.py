"""Draw a rewritten model: for people (SVG, PNG, PDF) and for other programs (DOT, GraphML)."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import networkx as nx

from fractrain_fx.drawing.build import Level, picture
from fractrain_fx.drawing.dot import digraph
from fractrain_fx.drawing.picture import Picture
from fractrain_fx.durable import write_text
from fractrain_fx.errors import ConfigError, RunError
from fractrain_fx.model import FracModel, rewritten_in

__all__ = ["FORMATS", "draw"]

_RENDERED = (".svg", ".png", ".pdf")
FORMATS = (*_RENDERED, ".dot", ".graphml")
"""Suffixes that ``draw`` writes."""


def draw(model: FracModel, path: str | Path, *, level: Level = "blocks", shapes: bool = False) -> list[Path]:
    """Draw a rewritten model.

    Args:
        model: a rewritten model; the graph of its present mode is drawn.
        path: the file to write; its suffix, one of ``FORMATS``, is the format. SVG, PNG and PDF need Graphviz's
            program ``dot``, the others need nothing.
        level: ``blocks``, or ``ops``: every contraction, in a frame for each block.
        shapes: whether blocks and ops name the shapes of the tensors that enter and leave them.

    Returns:
        The files that were written.

    Raises:
        ConfigError: the suffix or level is unknown.
        InputError: the model was not rewritten.
        RunError: Graphviz is not installed or fails, or the file cannot be written.
    """
    model = rewritten_in(model, "draw")
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in FORMATS:
        raise ConfigError(f"{target} cannot be drawn: end its name with one of {', '.join(FORMATS)}")
    if level not in get_args(Level):
        raise ConfigError(f"level={level!r} is unknown: write one of {', '.join(get_args(Level))}")
    try:
        return _write(picture(model, level, shapes=shapes), target, suffix)
    except OSError as error:
        raise RunError(f"{target} could not be written: {error}") from error


def _write(drawn: Picture, target: Path, suffix: str) -> list[Path]:
    if suffix == ".graphml":
        nx.write_graphml(_network(drawn), target)
    elif suffix == ".dot":
        write_text(target, digraph(drawn).source)
    else:
        target.write_bytes(_rendered(drawn, suffix.removeprefix("."), target))
    return [target]


def _rendered(drawn: Picture, form: str, target: Path) -> bytes:
    graph = digraph(drawn)
    from graphviz import CalledProcessError, ExecutableNotFound

    try:
        image: bytes = graph.pipe(form)
    except ExecutableNotFound:
        other = target.with_suffix(".dot").name
        raise RunError(
            f"{target.name} takes Graphviz's program 'dot', which is not installed: install Graphviz (apt install "
            f"graphviz, brew install graphviz, conda install graphviz, or graphviz.org), or write {other} instead"
        ) from None
    except CalledProcessError as error:
        raise RunError(f"Graphviz could not draw {target.name}: {error}; a .dot file has its input") from error
    return image


def _network(drawn: Picture) -> nx.MultiDiGraph:
    network = nx.MultiDiGraph(title=drawn.title)
    for shape in drawn.shapes.values():
        network.add_node(shape.id, **dict(shape.facts()))
    for arrow in drawn.arrows:
        network.add_edge(arrow.source, arrow.target, key=arrow.kind, kind=arrow.kind)
    return network

"""Colours that can be read: WCAG's contrast on both grounds."""

from __future__ import annotations

import pytest

from fractrain_fx.report.theme import PATH_COLOURS, THEMES


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", THEMES)
def test_text_and_marks_stand_out_from_their_ground(name: str) -> None:
    theme = THEMES[name]
    assert min(contrast(theme[text], theme["ground"]) for text in ("text", "muted")) >= 4.5
    assert min(contrast(colour, theme["ground"]) for colour in (*theme["series"], *PATH_COLOURS)) >= 3

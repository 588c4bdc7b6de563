"""Pictures for the UI."""

import base64
import math
from pathlib import Path

from artifacts.cache import write_cached
from llm_assets.assets.figures import Picture, curve

LOSSES = [(1, 2.5), (2, math.nan), (3, 2.25)]


def loss_curve(points: list[tuple[float, float]]) -> Picture:
    return curve("Training loss", "step", "loss", {"loss": points})


def content(picture: Picture, cache: Path | None = None) -> bytes:
    shown = picture.markdown(str(cache) if cache else None).md_str or ""
    assert shown.startswith("![Training loss](data:image/png;base64,")
    return base64.b64decode(shown.partition("base64,")[2].removesuffix(")"))


def test_a_picture_is_drawn_once_and_another_where_the_figures_differ(tmp_path: Path) -> None:
    drawn = content(loss_curve(LOSSES), tmp_path)
    assert drawn.startswith(b"\x89PNG") and drawn == content(loss_curve(LOSSES))

    (kept,) = tmp_path.iterdir()
    write_cached(str(tmp_path), kept.name, b"kept")
    assert content(loss_curve(LOSSES), tmp_path) == b"kept"
    kept.write_bytes(b"cut")
    assert content(loss_curve(LOSSES), tmp_path) == drawn

    other = content(loss_curve([*LOSSES, (4, 1.0)]), tmp_path)
    assert other != drawn and len(list(tmp_path.iterdir())) == 2

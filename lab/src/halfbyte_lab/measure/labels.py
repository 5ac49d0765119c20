"""Where the labels of points go, so that they do not lie on each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle in pixels, y upwards."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlap(self, other: Box) -> float:
        """Area that two rectangles share."""
        width = min(self.x1, other.x1) - max(self.x0, other.x0)
        height = min(self.y1, other.y1) - max(self.y0, other.y0)
        return max(0.0, width) * max(0.0, height)


def place_labels(anchors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], bounds: Box) -> list[Box]:
    """A rectangle for each label, near its anchor, inside `bounds`, off the other labels and the points.

    Greedy: for each label in turn the candidate (eight directions, growing distance) that covers least of what is there already.
    """
    points = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in anchors]
    boxes: list[Box] = []
    for (x, y), (width, height) in zip(anchors, sizes, strict=True):

        def cost(box: Box) -> float:
            outside = (box.x1 - box.x0) * (box.y1 - box.y0) - box.overlap(bounds)
            return 4 * outside + sum(box.overlap(other) for other in [*boxes, *points])

        boxes.append(min(_candidates(x, y, width, height), key=cost))
    return boxes


def _candidates(x: float, y: float, width: float, height: float) -> Iterator[Box]:
    for gap in (10, 15, 22, 32, 44, 60, 80):
        corners = [
            (x + gap, y - height / 2),
            (x - gap - width, y - height / 2),
            (x - width / 2, y + gap),
            (x - width / 2, y - gap - height),
            (x + gap, y + gap / 2),
            (x + gap, y - gap / 2 - height),
            (x - gap - width, y + gap / 2),
            (x - gap - width, y - gap / 2 - height),
        ]
        yield from (Box(a, b, a + width, b + height) for a, b in corners)

"""The metrics of a run as JSONL, and a picture of the loss."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """A JSONL file of metrics, one object a line with its `step`; each line is on disk when `write` returns.

    Args:
        path: The file; lines are added to one that exists.
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._path.touch()

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines; the last one may have been cut off when a process died."""
        lines = self._path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1] if line]

    def write(self, values: Mapping[str, Any]) -> None:
        """Add a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(values)) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop what was written after a step that the run now goes on from; all of it where that is step 0."""
        kept = [json.dumps(values) + "\n" for values in self.read() if values["step"] <= step and step > 0]
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(self._path)

    @property
    def has_losses(self) -> bool:
        """Whether any step is in the file."""
        return any("loss" in values for values in self.read())


def plot_losses(metrics: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Draw the loss of each step, and of each evaluation, as a PNG.

    Args:
        metrics: Objects with `step` and `loss` or `eval_loss`, as a `MetricsFile` holds them.
        path: The picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("The picture of the loss needs matplotlib: pip install 'flax-paged[train]'.") from None
    axes = (figure := Figure(figsize=(7, 4), dpi=120, layout="constrained")).subplots()
    for name, label, style in (("loss", "training", {"linewidth": 1.2}), ("eval_loss", "evaluation", {"marker": "o"})):
        points = [(values["step"], values[name]) for values in metrics if name in values]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss a token (nats)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)

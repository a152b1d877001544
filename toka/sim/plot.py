"""Simulations over time, as a picture. Needs matplotlib, which is an optional extra."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from toka.errors import ConfigError
from toka.sim.meter import Series


def require(path: Path) -> None:
    """Raises ConfigError if no picture could be drawn to `path`: before a long simulation rather than after it."""
    if not path.parent.is_dir():
        raise ConfigError(f"plot={path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError:
        raise ConfigError("plot=… needs matplotlib; install it with: pip install 'toka[plot]'") from None


def draw(path: Path, title: str, series: Mapping[str, Series], blocks: int) -> None:
    """Write a PNG: KV use, running and waiting sequences, and output tokens, by second. `blocks`: of all replicas
    together. Raises ConfigError if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    use, running, waiting, rate = figure.subplots(4, 1, sharex=True)
    for name, one in series.items():
        seconds = np.arange(len(one.used)) + 0.5
        use.plot(seconds, 100 * one.used / blocks, label=name)
        running.plot(seconds, one.running, label=name)
        waiting.plot(seconds, one.waiting, label=name)
        rate.plot(seconds, one.tokens, label=name)
    use.set_ylabel("blocks in use, %")
    use.set_ylim(0, 105)
    running.set_ylabel("running sequences")
    waiting.set_ylabel("waiting sequences")
    rate.set_ylabel("output tokens/s")
    rate.set_xlabel("seconds")
    use.set_title(title.replace("; ", "\n"), fontsize="medium")
    for axes in (use, running, waiting, rate):
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    use.legend(loc="lower center", ncols=len(series))
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"plot={path}: {error.strerror}") from None

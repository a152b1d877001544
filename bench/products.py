"""Times the matrix products of few rows on a GPU, alone and with the norm and the gate that stand around them.

    python bench/products.py                      1B and 8B shapes, 1 to 16 rows, bfloat16
    python bench/products.py shapes=1b rows=1,3
    python bench/products.py sweep=T              the best kernels, as lines of workers/kernels/product.py's table

A time is the median over replays of a CUDA graph of many calls, each with a weight of its own, so that together they
read more than the second-level cache holds. A row of the table: µs of torch's product and of the chosen kernel, with
the share that reading the weight takes at the bandwidth of a large copy; then µs of all that a step does there, with
torch's product and with what is chosen. A sweep, whose rows are powers of two, compares the latter and stops after
`seconds`.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from msgspec import Meta, Struct
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.attention import copied, graph_us
from bench.shapes import SHAPES
from toka.errors import TokaError
from toka.options import build, from_words, help_lines
from workers.kernels.ops import TritonOps
from workers.kernels.product import FEW, Tiles, Tuning, Vector, tuning

DTYPE = torch.bfloat16
ROTATED = 256 * 2**20
"""Bytes that the calls of a graph read together, at least."""
EPS = 1e-5


class Options(Struct, frozen=True, kw_only=True):
    """What to measure."""

    shapes: Annotated[str, Meta(description="shapes of models, with commas between")] = "1b,8b"
    rows: Annotated[str, Meta(description="numbers of rows, with commas between")] = "1,2,4,8,16"
    sweep: Annotated[bool, Meta(description="find the best kernels instead")] = False
    seconds: Annotated[float, Meta(gt=0, description="after which a sweep stops")] = 85.0
    best: Annotated[int, Meta(ge=1, description="kernels that a sweep shows of each product")] = 3


class Product(NamedTuple):
    """One of a model's weights."""

    name: str
    outputs: int
    depth: int
    around: Literal["", "norm", "norm, gate"] = ""
    """What else a step does there."""

    @property
    def read(self) -> int:
        """Bytes of the weight."""
        return self.outputs * self.depth * DTYPE.itemsize


def products(name: str) -> list[Product]:
    """Of the shape `name`: those of a layer, then the output projection."""
    shape = SHAPES[name]
    heads = shape.heads * shape.head_dim
    return [
        Product("qkv", heads + 2 * shape.kv_heads * shape.head_dim, shape.hidden, "norm"),
        Product("o", shape.hidden, heads),
        Product("gate_up", 2 * shape.intermediate, shape.hidden, "norm, gate"),
        Product("down", shape.hidden, shape.intermediate),
        Product("lm_head", shape.vocab, shape.hidden),
    ]


def main() -> int:
    """Measure and print; returns the exit code."""
    if "--help" in sys.argv[1:]:
        show("\n".join(["python bench/products.py [key=value …]", *help_lines(Options)]))
        return 0
    try:
        options = build(Options, from_words(sys.argv[1:]))
    except TokaError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    if not torch.cuda.is_available():
        sys.stderr.write("bench: this needs a CUDA device\n")
        return 1
    measure(options)
    return 0


@torch.inference_mode()
def measure(options: Options) -> None:
    """Print the tables."""
    until = time.monotonic() + options.seconds
    bandwidth = copied()
    show(f"{torch.cuda.get_device_name()}: a large copy moves {bandwidth / 1e12:.2f} TB/s")
    rows = [int(count) for count in options.rows.split(",")]
    for name in options.shapes.split(","):
        if options.sweep:
            sweep(name, rows, options.best, bandwidth, until)
        else:
            table(name, rows, bandwidth)


def table(name: str, rows: list[int], bandwidth: float) -> None:
    """A line a product and number of rows, and at the end what they come to in a step."""
    show(f"\n{name:<8} rows |  torch µs share | kernel µs share | all of it: torch's  chosen µs  chosen")
    steps = {count: [0.0, 0.0, 0.0] for count in rows}
    for product in products(name):
        bed = Bed(product, max(rows))
        floor = product.read / bandwidth * 1e6
        times = 1 if product.name == "lm_head" else SHAPES[name].layers
        for count in rows:
            tuned = tuning(count, product.outputs, product.depth, DTYPE)
            alone = [bed.time(count, choice, around=False) for choice in (None, tuned)]
            whole = [bed.time(count, choice, around=True) for choice in (None, tuned)]
            for at, us in enumerate((floor, *whole)):
                steps[count][at] += times * us / 1e3
            show(
                f"{product.name:<8} {count:>4} | {alone[0]:>9.1f} {floor / alone[0]:>5.0%} | {alone[1]:>9.1f} "
                f"{floor / alone[1]:>5.0%} | {whole[0]:>18.1f} {whole[1]:>10.1f}  {written(tuned)}"
            )
    for count, (floor, theirs, ours) in steps.items():
        show(f"a step of {count}: reading the weights {floor:.3f} ms, with torch's {theirs:.3f}, chosen {ours:.3f}")


def sweep(name: str, rows: list[int], best: int, bandwidth: float, until: float) -> None:
    """A line of the table for each product and number of rows, and as a comment its time and those next to it."""
    for product in products(name):
        bed = Bed(product, max(rows))
        floor = product.read / bandwidth * 1e6
        show(f"    # {name}, {product.name}: {floor:.1f} µs to read it")
        for count in rows:
            times: dict[Tuning | None, float] = {None: bed.time(count, None, around=True)}
            tried = list(candidates(product, count))
            for tuned in tried:
                if time.monotonic() < until:
                    times[tuned] = bed.attempt(count, tuned)
            order = sorted(times, key=lambda tuned: times[tuned])
            shown = "".join(f"; {times[tuned]:.1f} {written(tuned)}" for tuned in order[1:best])
            missed = f"; {len(tried) + 1 - len(times)} untried" if len(times) <= len(tried) else ""
            show(
                f"    ({count}, {product.outputs}, {product.depth}): {written(order[0])},"
                f"  # {times[order[0]]:.1f} µs; torch's {times[None]:.1f}{shown}{missed}"
            )


def candidates(product: Product, rows: int) -> Iterator[Tuning]:
    """Kernels that may be best."""
    if rows <= FEW:
        shapes = [(8, 2), (16, 2), (4, 4), (8, 4), (16, 4), (4, 8), (8, 8), (16, 8), (4, 16), (8, 16)]
        splits = [] if product.around else [Vector(8, 4, splits=2), Vector(8, 8, splits=2), Vector(8, 8, splits=4)]
        for tuned in (
            *(Vector(*shape) for shape in shapes),
            *(Vector(*shape, stages=3) for shape in ((4, 4), (8, 4), (4, 8))),
            *splits,
        ):
            # A program's threads have something to do in each of its splits, and registers for it.
            if tuned.warps * 32 * 8 * tuned.splits <= product.depth and rows * tuned.outputs * tuned.warps <= 256:
                yield tuned
    if rows > 1:
        for shape in (
            (16, 256, 1, 4), (32, 128, 2, 5), (32, 256, 4, 4), (64, 64, 4, 6),
            (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 5), (128, 128, 4, 3),
        ):  # fmt: skip
            blocks = -(-product.outputs // shape[0])
            for count in (1, 2, 4, 8, 16):
                # Enough programs for the multiprocessors, each with something to do, and not too much to merge.
                if 128 <= blocks * count <= (1024 if count > 1 else blocks) and shape[1] * count <= product.depth:
                    yield Tiles(*shape, splits=count)


def written(tuned: Tuning | None) -> str:
    """As the table has it."""
    if tuned is None:
        return "None"
    values = list(tuned)
    while len(values) > 2 and values[-1] == type(tuned)._field_defaults.get(type(tuned)._fields[len(values) - 1]):
        values.pop()
    return f"{type(tuned).__name__}({', '.join(map(str, values))})"


class Bed:
    """As many weights of a product as it takes, and rows for it."""

    def __init__(self, product: Product, rows: int) -> None:
        device = torch.device("cuda")
        count = max(2, -(-ROTATED // product.read))
        shape = (count, product.outputs, product.depth)
        self.weights = torch.empty(shape, dtype=DTYPE, device=device).normal_(std=product.depth**-0.5)
        self.x, self.residual = torch.randn((2, rows, product.depth), dtype=torch.float32, device=device).to(DTYPE)
        self.scale = torch.ones(product.depth, dtype=DTYPE, device=device)
        self.device, self.around = device, product.around

    def time(self, rows: int, tuned: Tuning | None, *, around: bool) -> float:
        """µs of a call, of the product alone or with what stands around it; None: with torch's own product."""
        ops = TritonOps(self.device, lambda *shape: tuned)
        call = self._call(ops, rows) if around else partial(_alone, ops, self.x[:rows])
        return graph_us([partial(call, weight) for weight in self.weights])

    def attempt(self, rows: int, tuned: Tuning) -> float:
        """As `time`, with what stands around it; ∞ where the GPU has not what the kernel asks for."""
        from triton.runtime.errors import OutOfResources

        try:
            return self.time(rows, tuned, around=True)
        except OutOfResources:
            return float("inf")

    def _call(self, ops: TritonOps, rows: int) -> Callable[[Tensor], None]:
        x, residual, scale = self.x[:rows], self.residual[:rows], self.scale

        def normed(weight: Tensor) -> None:
            ops.norm_product(x, residual, scale, EPS, weight, None)

        def gated(weight: Tensor) -> None:
            ops.norm_gated(x, residual, scale, EPS, weight, None)

        calls: dict[str, Callable[[Tensor], None]] = {"": partial(_alone, ops, x), "norm": normed, "norm, gate": gated}
        return calls[self.around]


def _alone(ops: TritonOps, x: Tensor, weight: Tensor) -> None:
    ops.product(x, weight, None)


def show(line: str) -> None:
    """Print."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

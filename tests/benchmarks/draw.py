"""How long it takes to draw a model with some 5,000 nodes at every level, from the graph to SVG.

``python -m tests.benchmarks.draw``
"""

from __future__ import annotations

import time

import torch

import fxpipe
from fxpipe.inspect.draw import render_svg
from tests.zoo import Transformer

DEPTH = 240  # layers, of some twenty nodes each
STAGES, CHUNKS = 4, 8


def main() -> None:
    """Print a line a level."""
    tokens = torch.randint(11, (CHUNKS, 6))
    model = Transformer(depth=DEPTH)
    with fxpipe.compile(
        model,
        ["cpu"] * STAGES,
        chunks=CHUNKS,
        example_inputs=(tokens,),
        loss_fn=lambda output, target: output.mean(),
    ) as pipe:
        pipe.step(tokens)
        graphs = {
            "model": pipe.model_graph,
            "stage": pipe.stage_graph,
            "pipeline": pipe.graph_module,
            "step": pipe.step_graph,
        }
        for level, gm in graphs.items():
            begin = time.perf_counter()
            svg = render_svg(pipe.draw(level))
            seconds = time.perf_counter() - begin
            boxes = svg.count('class="node"')
            print(f"{level:9} {len(gm.graph.nodes):6,} nodes in {boxes:3} boxes: {seconds:.2f} s")


if __name__ == "__main__":
    main()

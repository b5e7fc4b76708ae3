"""Compiled: each stage is replaced by one that a backend of ``torch.compile`` compiles.

::

    before     ── stage_0 ──── stage_1 ──

    after      ── stage_0* ─── stage_1* ──        * compiled when it is first called: the calls,
                                                    and the graphs of the stages, are the same

The pipeline graph is not compiled as a whole: what travels between stages stays in the hands of the
pipeline. Segments of a checkpointed stage are compiled one by one, as they are run again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxpipe.ir.graph import STAGE, attribute
from fxpipe.runtime.compiled.stage import CompiledStages


@dataclass(frozen=True)
class Compiled:
    """Pipeline or step graph → the same, with compiled stages in place of its stages.

    ``stages`` makes the compiled stages; a stage that is in both graphs is compiled once.
    """

    stages: CompiledStages
    name: str = "compiled"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.nodes:
            if node.op not in ("call_module", "get_attr") or STAGE not in node.meta:
                continue
            path = str(node.target)
            module = attribute(gm, path)
            if isinstance(module, fx.GraphModule):
                gm.set_submodule(path, self.stages.of(module, path))
        return gm

"""Memory that a plan predicts for each stage, beside what a training step holds.

Run: python -m tests.benchmarks.memory [stages ...]

The model is GPT-2 with tied embeddings, cut into 2, 3 and 4 stages, with 8 micro-batches, in the
order of 1F1B. A stage is said to hold the most bytes that autograd has saved there at one time
(memory that several views share counts once), and its replica of the weight that several devices
share. Gradients, parameters and the optimizer's states are not counted. The inputs of micro-batches
are views of the mini-batch, so that the whole mini-batch counts.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import DeviceSpec
from tests.benchmarks.timing import show

CHUNKS = 8
DEVICE = DeviceSpec(link_bytes_per_s=1e30, link_latency_s=0.0)


class Held:
    """Counts what is saved for the backward, stage by stage, while it is."""

    def __init__(self, model: nn.Module) -> None:
        self.own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.uses: Counter[tuple[int, int]] = Counter()
        self.now: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self.lock = threading.RLock()

    def watch(self, stage: fxpipe.Stage) -> None:
        """From now on count what a stage saves."""
        forward = stage.module.forward

        def pack(tensor: Tensor) -> tuple[Tensor, _Use | None]:
            memory = tensor.untyped_storage()
            if memory.data_ptr() in self.own:
                return tensor, None
            return tensor, _Use(self, stage.index, memory)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0]):
                return forward(*args, **kwargs)

        stage.module.forward = watched  # type: ignore[method-assign]


class _Use:
    """One tensor that is saved, until it is not any more."""

    def __init__(self, held: Held, stage: int, memory: torch.UntypedStorage) -> None:
        self.held, self.key, self.size = held, (stage, memory.data_ptr()), memory.nbytes()
        with held.lock:
            held.uses[self.key] += 1
            if held.uses[self.key] == 1:
                held.now[stage] += self.size
                held.most[stage] = max(held.most[stage], held.now[stage])

    def __del__(self) -> None:
        with self.held.lock:
            self.held.uses[self.key] -= 1
            if not self.held.uses[self.key]:
                self.held.now[self.key[0]] -= self.size


def mean_square(output: Any, target: Any = None) -> Tensor:
    """Some loss."""
    loss: Tensor = output.logits.square().mean()
    return loss


def main(counts: list[int]) -> None:
    import transformers  # which takes its time, and is not needed to count

    config = transformers.GPT2Config(
        vocab_size=2000,
        n_embd=64,
        n_head=4,
        n_layer=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    example = {"input_ids": torch.randint(2000, (16, 32))}
    rows = []
    for stages in counts:
        model = transformers.GPT2LMHeadModel(config)
        options: dict[str, Any] = {"chunks": CHUNKS, "example_kwargs": example}
        plan = fxpipe.plan(model, [DEVICE] * stages, schedule="1f1b", **options)
        devices = [("cpu", "cpu:0")[stage % 2] for stage in range(stages)]  # neighbours differ
        options |= {"partition": plan.partition, "schedule": plan.schedule, "loss_fn": mean_square}
        with fxpipe.compile(model, devices, **options) as pipe:
            held = Held(model)
            for stage in pipe.stages:
                held.watch(stage)
            pipe.step(**example)
            replicas = Counter({hop.target: hop.bytes for hop in pipe.skip_layout.brought})
        for i, planned in enumerate(plan.stages):
            predicted = planned.activation_bytes + replicas[i]
            ratio = predicted / held.most[i]
            rows.append(
                [str(stages), str(i), f"{predicted:,}", f"{held.most[i]:,}", f"{ratio:.4f}"]
            )
    show("bytes held for the backward", ["stages", "", "predicted", "measured", "ratio"], rows)


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])) or [2, 3, 4])

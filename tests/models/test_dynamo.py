"""Models from libraries by way of ``torch.compile``, against the loop over their micro-batches."""

from __future__ import annotations

import pytest
import torch

import fxpipe
from tests.models.compare import (
    BATCH,
    CHUNKS,
    STAGES,
    TOLERANCE,
    build,
    difference,
    micro_batches,
    one_thread,
    run_step,
)
from tests.models.registry import entries

pytestmark = pytest.mark.one_thread  # as the loop has

T5 = pytest.param(
    "T5ForConditionalGeneration",
    marks=pytest.mark.skipif(
        torch.__version__ < "2.12", reason="Dynamo 2.11 cannot trace T5, which copies a config"
    ),
)


@pytest.mark.long  # tests/fxpipe/test_dynamo.py has the models of tests/zoo.py
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["BertForMaskedLM", T5, "UNet2DModel"])
def test_outputs_gradients_and_buffers_are_those_of_the_loop(name):
    entry = entries()[name]
    pytest.importorskip(entry.library)
    torch._dynamo.reset()
    model, plain = build(entry, True), build(entry, True)
    backend = fxpipe.backend(devices=["cpu"] * STAGES, chunks=CHUNKS)
    call = torch.compile(model, backend=backend)
    with one_thread():
        for batch in (BATCH, BATCH + 3):
            inputs = entry.inputs(batch)
            actual = run_step(model, lambda inputs=inputs: [call(**inputs)])
            parts = micro_batches(inputs, batch)
            rows = batch // CHUNKS
            expected = run_step(plain, lambda parts=parts: [plain(**part) for part in parts], rows)
            assert difference(expected, actual) <= TOLERANCE
            model.zero_grad()
            plain.zero_grad()
    assert len(backend.pipelines) == 1

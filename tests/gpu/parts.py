"""The list of the parts, in the order in which they run: the ones that show whether anything works
come first, and the one that takes longest is the last."""

from __future__ import annotations

from tests.gpu.part import Part

PARTS = (
    Part("about", "device, versions, and what is missing", "tests.gpu.about:about", 30),
    Part("bits", "the loop's bits, on one GPU twice, on GPU and CPU", "tests.gpu.right:bits", 60),
    Part("marked", "the tests that need an accelerator", "tests.gpu.right:marked", 60),
    Part("sync", "the host waits for nothing in a warm step", "tests.gpu.right:sync", 30),
    Part("host", "host time a stage and micro-batch", "tests.gpu.times:host", 40),
    Part("lanes", "lanes against the loop, large stages", "tests.gpu.times:lanes", 40),
    Part("inputs", "inputs pageable, pinned, on the device", "tests.gpu.times:inputs", 30),
    Part("memory", "memory against chunks and predicted", "tests.gpu.times:memory", 60),
    Part(
        "sanitizer",
        "PyTorch's CUDA sanitizer finds nothing",
        "tests.gpu.right:sanitizer",
        60,
        environment={"TORCH_CUDA_SANITIZER": "1"},
    ),
    Part("sleeps", "each stream late in turn, same results", "tests.gpu.right:sleeps", 40),
    Part("zoo", "ten models of the zoo", "tests.gpu.right:zoo", 90),
    Part("streams", "the caller's own streams", "tests.gpu.right:callers_streams", 30),
    Part(
        "blocking",
        "the same with CUDA_LAUNCH_BLOCKING=1",
        "tests.gpu.right:callers_streams",
        40,
        environment={"CUDA_LAUNCH_BLOCKING": "1"},
    ),
    Part("trace", "a profiler's trace of a step", "tests.gpu.times:trace", 40),
    Part("compiled", "compiled stages", "tests.gpu.beside:compiled", 90),
    Part("beside", "beside torchgpipe and torch's pipelining", "tests.gpu.beside:beside", 60),
    Part("large", "GPT-2, a U-Net and ResNet-101", "tests.gpu.beside:large_models", 120),
    Part("steps", "bits over 200 steps on two GPUs", "tests.gpu.several:steps", 60, devices=2),
    Part(
        "far",
        "traces, batch on the first and target on the last",
        "tests.gpu.several:far",
        40,
        devices=2,
    ),
    Part("links", "bandwidth between GPUs, both ways", "tests.gpu.several:links", 30, devices=2),
    Part("triton", "a Triton stage on the second GPU", "tests.gpu.several:triton", 40, devices=2),
    Part("speed", "speed-up against m / (m + s - 1)", "tests.gpu.several:speed_up", 60, devices=2),
    Part("predicted", "memory and time as predicted", "tests.gpu.predicted:predicted", 420),
)

"""Four ranks on two hosts, which are network namespaces of this machine with a cable between them.

    sudo python -m tests.fxpipe.ranks.two_hosts              # the cable as it is
    sudo python -m tests.fxpipe.ranks.two_hosts 20mbit       # and then one that is so slow

Each host starts its two ranks by torchrun, which meet by torchrun's own rendezvous over the cable.
They train a step with the loss of one process, and measure one. The timeline shows the cable: the
action of a rank on the second host begins when its input has come over it. Needs Linux, root and
iproute2. The slow cable is made by netem, or by tbf where the kernel has no netem.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from fxpipe.schedule import Timeline

HOSTS, RANKS, CHUNKS, WIDTH, ROWS = ("fxpipe-a", "fxpipe-b"), 2, 4, 256, 2048
ADDRESSES, CABLE = ("10.79.0.1", "10.79.0.2"), "eth0"


# ------------------------------------------------------------------------------------ on each rank


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output.mean(1) - target).square().mean()


def compiled(where: Any, x: Tensor) -> fxpipe.Pipeline:
    """Four equal stages. A micro-batch between them has half a megabyte."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16)))
    options = {"chunks": CHUNKS, "schedule": "1f1b", "loss_fn": loss_fn, "example_inputs": (x,)}
    return fxpipe.compile(model, where, partition=["4", "8", "12"], **options)


def described(timeline: Timeline) -> str:
    """When each rank begins its first forward and ends, and how long it computes."""
    lines = [f"a step takes {timeline.makespan * 1e3:.1f} ms"]
    for rank in range(len(timeline.lanes)):
        spans = [span for span in timeline.of_lane(rank) if span.action is not None]
        starts = ", ".join(f"{span.action} {span.start * 1e3:.1f}" for span in spans)
        busy = sum(span.seconds for span in spans)
        lines.append(f"rank {rank} computes for {busy * 1e3:.1f} ms; begins, in ms: {starts}")
    return "\n".join(lines)


def train() -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    with compiled(mesh, x) as pipe:
        loss = pipe.step(x, target=y)
        timeline = pipe.measure(x, target=y, rounds=3)
    if dist.get_rank() == 0:
        with compiled(["cpu"] * 4, x) as pipe:
            same = torch.equal(pipe.step(x, target=y), loss)
        print(f"the loss is that of one process, bit by bit: {same}")
        print(described(timeline), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------- both hosts


def _ip(*args: str, host: str = "") -> None:
    subprocess.run(["ip", *(("-n", host) if host else ()), *args], check=True)


@contextmanager
def hosts():
    """Two network namespaces with a cable between them."""
    try:
        for host in HOSTS:
            _ip("netns", "add", host)
        ends = [("type", "veth", "peer", "name", CABLE, "netns", HOSTS[1])]
        _ip("link", "add", CABLE, "netns", HOSTS[0], *ends[0])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            _ip("addr", "add", f"{address}/24", "dev", CABLE, host=host)
            _ip("link", "set", CABLE, "up", host=host)
            _ip("link", "set", "lo", "up", host=host)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False)


def slow_down(rate: str) -> str:
    """Limit the cable to so many bits per second. Returns what has been used."""
    kinds = (
        ["netem", "rate", rate],
        ["tbf", "rate", rate, "burst", "64kbit", "latency", "400ms"],
    )
    for kind in kinds:
        command = ["tc", "qdisc", "replace", "dev", CABLE, "root", *kind]
        done = [
            subprocess.run(["ip", "netns", "exec", host, *command], capture_output=True)
            for host in HOSTS
        ]
        if not any(each.returncode for each in done):
            return kind[0]
    raise OSError("this kernel has neither netem nor tbf: give no rate")


def run() -> None:
    """Start both ranks of both hosts, and wait for them."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE}
    processes = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", str(len(HOSTS)), "--nproc-per-node", str(RANKS)),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500"),
                *("--rdzv-id", "two-hosts", "--local-addr", address),
                # torchrun finds out by the name of the host, which both hosts share here
                *("--rdzv-conf", f"is_host={int(host == HOSTS[0])}"),
                *("-m", "tests.fxpipe.ranks.two_hosts", "train"),
            ],
            env=env,
        )
        for host, address in zip(HOSTS, ADDRESSES, strict=True)
    ]
    if any([process.wait() for process in processes]):
        raise SystemExit("a host has failed")


def main(rate: str | None = None) -> None:
    """Run over the cable as it is, and over a slow one."""
    with hosts():
        print("the cable as it is:", flush=True)
        run()
        if rate:
            print(f"a cable of {rate}, by {slow_down(rate)}:", flush=True)
            run()


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main(*sys.argv[1:])

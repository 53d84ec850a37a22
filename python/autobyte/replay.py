"""Runs a training step whose computation is replayed: layers hold real parameters and gradients of a model
profile, but sleep for as long as the profile says instead of computing. What `autobyte bench` runs.

Communication, copies, hooks and the optimizer are real. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from
whoever starts it. It prints one JSON object a line.

Modes: `ddp` and `autobyte` differ in nothing but the wrapping. `plain` is a check on this harness: DDP
on a model of the same sizes in which nothing of the rest of this file is used, neither its clock nor
its gradients.

How the replayed clock runs: as a GPU's does. Python enqueues layers and runs ahead of it; a layer starts when the one
before it has ended and Python has reached it, so a gate that waits for a parameter delays the layer by all it waits,
and the time that Python takes to call a layer shows only where the device would have idled. In backward each gradient
is handed over when the clock has reached the end of its layer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

PR_SET_TIMERSLACK = 29


class Clock:
    """The time until which an emulated device is busy, in seconds of time.monotonic()."""

    def __init__(self) -> None:
        # Linux delays a sleep's end by up to 50 us by default, to save wake-ups.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._busy_until = 0.0

    def forward(self, seconds: float) -> None:
        """Enqueues a layer that Python has reached now."""
        self._busy_until = max(self._busy_until, time.monotonic()) + seconds

    def begin_backward(self) -> None:
        self._busy_until = max(self._busy_until, time.monotonic())

    def backward(self, seconds: float) -> None:
        """Runs a layer and returns when its gradients are there."""
        self._busy_until += seconds
        sleep_until(self._busy_until)


def sleep_until(end: float) -> None:
    """Sleeps until time.monotonic() is `end`."""
    remaining = end - time.monotonic()
    if remaining > 0:
        time.sleep(remaining)


class Compute(torch.autograd.Function):
    """The computation of one layer on an activation of one element."""

    @staticmethod
    def forward(ctx, activation, layer, *parameters):
        ctx.layer = layer
        layer.clock.forward(layer.forward_seconds)
        return activation.clone()

    @staticmethod
    def backward(ctx, gradient):
        layer = ctx.layer
        layer.clock.backward(layer.backward_seconds)
        # A new tensor object on memory made beforehand: like a real layer's result, autograd takes it for
        # .grad without a copy, and unlike it costs no allocation.
        return (gradient, None, *(g.detach() for g in layer.gradients))


class Layer(nn.Module):
    def __init__(self, spec: dict, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.forward_seconds, self.backward_seconds = spec["forward_s"], spec["backward_s"]
        self.gradients = []
        for i, tensor in enumerate(spec["tensors"]):
            dtype = getattr(torch, tensor["dtype"])
            values = torch.rand(tensor["bytes"] // dtype.itemsize).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(values))
            self.gradients.append(torch.rand_like(values) * 1e-3)

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        parameters = [getattr(self, f"p{i}") for i in range(len(self.gradients))]
        return Compute.apply(activation, self, *parameters)


class Model(nn.Module):
    def __init__(self, profile: dict) -> None:
        super().__init__()
        self.clock = Clock()
        self.layers = nn.ModuleList(Layer(spec, self.clock) for spec in profile["layers"])

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            activation = layer(activation)
        return activation.sum()


class PlainCompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, activation, seconds_forward, seconds_backward, *parameters):
        time.sleep(seconds_forward)
        ctx.seconds, ctx.parameters = seconds_backward, parameters
        return activation + 1

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return (gradient, None, None, *(torch.ones_like(p) for p in ctx.parameters))


class PlainModel(nn.Module):
    """What someone would write who has never seen this harness: plain sleeps, fresh gradients."""

    def __init__(self, profile: dict) -> None:
        super().__init__()
        self.times = [(layer["forward_s"], layer["backward_s"]) for layer in profile["layers"]]
        self.weights = nn.ModuleList(
            nn.ParameterList(
                torch.zeros(t["bytes"] // getattr(torch, t["dtype"]).itemsize, dtype=getattr(torch, t["dtype"]))
                for t in layer["tensors"]
            )
            for layer in profile["layers"]
        )

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        for (forward, backward), weights in zip(self.times, self.weights):
            activation = PlainCompute.apply(activation, forward, backward, *weights)
        return activation.sum()


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    with open(arguments.profile, encoding="utf-8") as file:
        profile = json.load(file)

    model = PlainModel(profile) if arguments.mode == "plain" else Model(profile)
    clock = getattr(model, "clock", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if arguments.mode == "autobyte":
        import autobyte.torch as ab

        options = ("engine", "policy", "partition", "credit", "fusion")
        given = {name: getattr(arguments, name) for name in options if getattr(arguments, name) is not None}
        model, optimizer = ab.wrap(model, optimizer, **given)
    else:
        model = nn.parallel.DistributedDataParallel(model)

    rank, activation = dist.get_rank(), torch.zeros(1)
    starts = []  # when each step started; the last entry is the end of the last
    for step in range(arguments.warm_up + arguments.steps):
        starts.append(time.monotonic())
        if step == arguments.warm_up:
            cpu = time.process_time()
        loss = model(activation)
        if clock is not None:
            clock.begin_backward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            say(event="step", step=step + 1, steps=arguments.warm_up + arguments.steps)
    starts.append(time.monotonic())
    cpu = time.process_time() - cpu

    result = {"stats": ab.stats(model)} if arguments.mode == "autobyte" else {}
    say(
        event="result",
        rank=rank,
        starts=starts,
        warm_up_steps=arguments.warm_up,
        cpu_s=cpu,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        torch=torch.__version__,
        **result,
    )
    if arguments.mode == "autobyte":
        ab.synchronize(model)
    dist.barrier()
    if arguments.mode == "autobyte":
        ab.shutdown()
    dist.destroy_process_group()


def say(**fields: object) -> None:
    print(json.dumps(fields, default=str), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="autobyte.replay", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--mode", required=True, choices=["ddp", "autobyte", "plain"])
    parser.add_argument("--profile", required=True, help="a model profile, as autobyte's internal/model writes it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before these, not counted")
    for option in ("engine", "policy", "partition", "credit", "fusion"):
        parser.add_argument(f"--{option}", help="given to autobyte.torch.wrap as it is")
    arguments = parser.parse_args()
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        sys.exit(f"{', '.join(missing)} not set: start this with torchrun or `autobyte bench`")
    run(arguments)


if __name__ == "__main__":
    main()

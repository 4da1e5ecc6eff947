"""What the judge finds out about a task itself, whatever kernels are written for it."""

from __future__ import annotations

from sandbox.protocol.base import Reply


class TaskFacts(Reply):
    """Facts of a task whose reference runs. What could not be known is None.

    Attributes:
      trivial: answers without any work that would pass ("zeros", "input 0 passed through", ...).
      repeats: two calls on the same inputs agree to the last bit.
      changes, aliases: numbers of the tensor inputs that the reference changes, and of those whose memory it returns.
      input_bytes, output_bytes, state_bytes: of one call's tensors, and of parameters and buffers.
      peak_bytes: what the reference's process held at its highest, on a GPU of the device's memory (with its run in float64, from which
        rounding is known), on a CPU of the host's (with Python and PyTorch).
      needed_bytes: that, and what a candidate's process holds at least: the same state, its input sets and its outputs.
      total_bytes: of the device, or of the host.
      eager_ms, eager_low_ms, eager_high_ms: time of one call in PyTorch eager and its 95 % interval; None where nothing was timed.
      host_ms: what the host takes to issue such a call, on a GPU.
      launch_ms: what the least call takes that launches anything, on a GPU.
      floor_ms: below which no call can be, by what it must read and write (`sandbox.oracle.roofline`), on a GPU.
      trial_s: what drawing inputs, one call and its comparison take on the judge's side.
      judging_s: about what judging a candidate as fast as the reference takes, without its build: getting to know the task, three trials
        and a quick timing.
    """

    trivial: tuple[str, ...] = ()
    repeats: bool = True
    changes: tuple[int, ...] = ()
    aliases: tuple[int, ...] = ()
    input_bytes: int
    output_bytes: int
    state_bytes: int
    peak_bytes: int
    needed_bytes: int
    total_bytes: int
    eager_ms: float | None = None
    eager_low_ms: float | None = None
    eager_high_ms: float | None = None
    host_ms: float | None = None
    launch_ms: float | None = None
    floor_ms: float | None = None
    trial_s: float
    judging_s: float

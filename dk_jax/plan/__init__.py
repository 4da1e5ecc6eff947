"""Memory and time of a recipe's training step on devices that need not be there, from the real programs compiled ahead of time.

    hardware    what an H100, an H200 and a TPU v5p have
    programs    the step's programs for a mesh of emulated devices, from shapes alone
    counting    bytes by shape and sharding, FLOPs by a walk through the traced step, traffic between devices by one through the compiled
    estimate    parts of memory, the microbatch that fits, time
    table       the report as text

Not here: sampling's and judging's time, the sandbox's memory on a shared card.
"""

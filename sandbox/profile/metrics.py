"""The counters that are asked of Nsight Compute, by its own names, and what they say.

They are the 24 groups from which CudaForge's judge picks its three or four (arXiv 2511.01884): cycles and warps active, what limits
occupancy, registers, instructions, use of the FP32 and tensor pipes, traffic and speed of DRAM, hit rate and speed of both caches, why
warps wait, and how uniform branches are. Names as in the metrics reference of Nsight Compute's Profiling Guide and its table of nvprof's
metrics; which of them a card has differs, and one that it lacks is left out of a result.
"""

from __future__ import annotations

DURATION = "gpu__time_duration.sum"
"""Asked for besides, to tell which kernels are the heaviest."""

METRICS = {
    "sm__cycles_active.avg": "cycles in which an SM had a warp",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps resident on an SM, of the most that fit: achieved occupancy",
    "launch__occupancy_limit_blocks": "blocks on an SM that the number of blocks allows",
    "launch__occupancy_limit_registers": "blocks on an SM that the registers allow",
    "launch__occupancy_limit_shared_mem": "blocks on an SM that the shared memory allows",
    "launch__registers_per_thread": "registers of a thread",
    "sm__inst_executed.sum": "instructions of warps",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": "use of the pipe for FP32 arithmetic",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "use of the tensor cores' pipe",
    "dram__bytes_read.sum": "bytes read from DRAM",
    "dram__bytes_write.sum": "bytes written to DRAM",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "speed of DRAM, of its peak",
    "dram__bytes.sum.per_second": "bytes to and from DRAM in a second",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "speed of the whole path to DRAM, of its peak",
    "l1tex__t_sector_hit_rate.pct": "sectors found in L1",
    "l1tex__throughput.avg.pct_of_peak_sustained_active": "speed of L1, of its peak",
    "lts__t_sector_hit_rate.pct": "sectors found in L2",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "speed of L2, of its peak",
    "smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct": "warps' time waiting for global or local memory",
    "smsp__warp_issue_stalled_short_scoreboard_per_warp_active.pct": "warps' time waiting for shared memory and special functions",
    "smsp__warp_issue_stalled_lg_throttle_per_warp_active.pct": "warps' time waiting because too many global accesses are queued",
    "smsp__warp_issue_stalled_barrier_per_warp_active.pct": "warps' time waiting at a barrier",
    "smsp__warp_issue_stalled_branch_resolving_per_warp_active.pct": "warps' time waiting for a branch's target",
    "smsp__sass_average_branch_targets_threads_uniform.pct": "branches that all threads of a warp take alike",
}
"""Name to meaning, in the order in which they are shown."""

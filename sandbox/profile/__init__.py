"""Hardware counters by Nsight Compute, and what a card could do at best. Imports neither torch nor triton."""

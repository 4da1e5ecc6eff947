"""The learner: reinforcement learning in JAX of a language model that writes fast kernels."""

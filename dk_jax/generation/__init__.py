"""From prompts to samples: tokens, log-probs and stop reasons; and the codecs between text and tokens.

Knows nothing of tasks, agents' prompts or rewards.
"""

from dk_jax.generation.sampler import Sample, Sampler, SamplerConfig, make_sampler

__all__ = ["Sample", "Sampler", "SamplerConfig", "make_sampler"]

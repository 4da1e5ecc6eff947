"""From prompts to samples: tokens, log-probs and stop reasons; and the codecs between text and tokens.

Knows nothing of tasks, agents' prompts or rewards.
"""

from dk_jax.generation.engine import Engine
from dk_jax.generation.requests import Conversation, Drawing, Request, Sample
from dk_jax.generation.sampler import Sampler, SamplerConfig, make_sampler
from dk_jax.generation.sizes import EngineConfig

__all__ = ["Conversation", "Drawing", "Engine", "EngineConfig", "Request", "Sample", "Sampler", "SamplerConfig", "make_sampler"]

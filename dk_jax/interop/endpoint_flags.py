"""The flags that say which endpoint is asked and within which limits, for all scripts that ask one: `import` defines them."""

from __future__ import annotations

from absl import flags

from dk_jax.interop.endpoint import EndpointConfig

BASE_URL = flags.DEFINE_string("base_url", None, "Address of the endpoint up to /chat/completions, such as https://host/v1.")
MODEL = flags.DEFINE_string("model", None, "Name of the model there.")
_API_KEY_ENV = flags.DEFINE_string("api_key_env", "OPENAI_API_KEY", "Environment variable that holds the key; empty for none.")
_MAX_TOKENS_FIELD = flags.DEFINE_enum("max_tokens_field", "max_tokens", ["max_tokens", "max_completion_tokens"], "What the endpoint calls it.")
_BUDGET = flags.DEFINE_float("budget", None, "What may be spent in this workdir in all, in the currency of the prices.")
_BUDGET_TOKENS = flags.DEFINE_integer("budget_tokens", None, "The same in tokens.")
_PRICE_IN = flags.DEFINE_float("price_in", None, "Price of a million prompt tokens.")
_PRICE_OUT = flags.DEFINE_float("price_out", None, "Price of a million completion tokens.")
_RPM = flags.DEFINE_integer("rpm", 0, "Requests a minute at most; 0 for no limit.")
_TPM = flags.DEFINE_integer("tpm", 0, "Tokens a minute at most; 0 for no limit.")
PARALLEL = flags.DEFINE_integer("parallel", 8, "Requests in flight at once.")
_DEADLINE_S = flags.DEFINE_float("deadline_s", 600.0, "Seconds that one answer may take.")


def endpoint_config() -> EndpointConfig:
    """By the flags. Raises ValueError for a number out of its range."""
    return EndpointConfig(
        base_url=BASE_URL.value, model=MODEL.value, api_key_env=_API_KEY_ENV.value, parallel=PARALLEL.value,
        requests_per_minute=_RPM.value, tokens_per_minute=_TPM.value, deadline_s=_DEADLINE_S.value, price_in=_PRICE_IN.value,
        price_out=_PRICE_OUT.value, budget=_BUDGET.value, budget_tokens=_BUDGET_TOKENS.value, max_tokens_field=_MAX_TOKENS_FIELD.value,
    )  # fmt: skip

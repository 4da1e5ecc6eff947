"""Memory and time of a recipe's training step, from the real programs compiled ahead of time. No accelerator and no weights are needed.

    python scripts/plan.py --config=configs/davinci_14b.py --mesh=fsdp=8
    python scripts/plan.py --config=configs/davinci_14b.py --mesh=data=2,fsdp=16,tensor=2 --config.rollout.max_rows=128

Devices are emulated on this machine's CPU; a 14B model takes some minutes and a few GB.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import app, flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

_CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe: a file with get_config().", lock_config=True)
_MESH = flags.DEFINE_string("mesh", "", "Devices along each axis, such as data=1,fsdp=8,tensor=1; by default the recipe's learner.mesh.")
_DEVICES = flags.DEFINE_list("devices", ["h100", "h200", "v5p"], "Kinds of device to fit it into.")
_JSON = flags.DEFINE_string("json", "", "File for the numbers.")
MOST_DEVICES = 1024


def main(argv) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: flags look like --mesh=fsdp=8")
    if _CONFIG.value is None:
        raise app.UsageError("--config is missing, e.g. --config=configs/davinci_14b.py")
    try:
        cfg = _CONFIG.value
        cfg.seed  # noqa: B018  a recipe that could not be loaded says so at its first use
        return _plan(cfg)
    except (OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _plan(cfg) -> int:
    # Before JAX is imported: this process has as many devices as the mesh.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={_device_count(cfg)}".strip()
    from dk_jax.plan.estimate import make_plan
    from dk_jax.plan.hardware import DEVICES
    from dk_jax.plan.programs import make_step
    from dk_jax.plan.table import as_data, report
    from dk_jax.train.checks import check_config

    unknown = [name for name in _DEVICES.value if name not in DEVICES]
    if unknown:
        raise ValueError(f"--devices: {unknown[0]!r} is not known; there are {', '.join(DEVICES)}")
    check_config(cfg)
    step = make_step(cfg, _sizes(cfg))
    plan = make_plan(step, [DEVICES[name] for name in _DEVICES.value], lambda text: print(f"compiling {text}", file=sys.stderr, flush=True))
    print(report(plan))
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(as_data(plan), indent=1) + "\n", encoding="utf-8")
    return 0


def _sizes(cfg) -> dict[str, int]:
    from dk_jax.plan.mesh import parse_mesh

    if _MESH.value:
        return parse_mesh(_MESH.value)
    return {name: max(size, 1) for name, size in cfg.learner.mesh.to_dict().items()}


def _device_count(cfg) -> int:
    count = 1
    for size in _sizes(cfg).values():
        count *= size
    if count > MOST_DEVICES:
        raise ValueError(f"a mesh of {count} devices: at most {MOST_DEVICES} are emulated")
    return count


def _parse(argv):
    """Flags, or one line that says what is wrong with them; config_flags itself raises bare errors for unknown keys and files."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, KeyError, AttributeError, TypeError, ValueError, OSError, SyntaxError) as error:
        said = " ".join(str(error).split())
        print(f"error: {said if not isinstance(error, KeyError | AttributeError) else f'the recipe has no key {said}'}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)

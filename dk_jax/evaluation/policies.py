"""Whom an evaluation asks: a run's checkpoint, a Hugging Face folder, an endpoint, a folder of kernels, or the generators.

A policy is looked at twice. `describe` says what is meant, cheaply and without a sandbox: wrong names are told at once, and its facts are
what a folder of results remembers. Then `opened` makes it speak, which for a model loads weights. Nothing is written into a run that is
evaluated, and it may be running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from dk_jax.evaluation.asked_speaker import AskedSpeaker, Listening
from dk_jax.evaluation.usage import Message, Usage, messages_of, tally
from dk_jax.interop.endpoint import UNASKED, AnswerJournal, Endpoint, EndpointConfig
from dk_jax.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from dk_jax.agents.text import TaskView
    from dk_jax.rollout.episode import RolloutConfig
    from dk_jax.tasks.task import Task

log = logging.getLogger(__name__)
FORMS = "run:RUNDIR (also RUNDIR@best, @sft, @STEP), hf:DIR, endpoint, kernels:DIR, expert, naive or wrong"
SCRIPTED = ("expert", "naive", "wrong")
MODELS = ("run", "hf")
"""Kinds whose model this machine computes."""
OUT_OF_BUDGET = UNASKED
"""Why a sample is not finished: the endpoint's budget had no room for a question of it."""
ANSWERS = "answers.jsonl"
_CONTENT_BYTES = 16


class PolicyError(ValueError):
    """There is no such policy; the message says what there is."""


@dataclasses.dataclass(kw_only=True)
class Policy:
    """What speaks.

    Attributes:
        speaker: writes kernels; has what episodes need of dk_jax.rollout.speaker.Speaker.
        greedy: chooses skills; None for a policy that reads no prompts.
    """

    speaker: Any
    greedy: Any = None

    def unfinished(self, trajectory: Trajectory) -> str:
        """Why more could still be had of a trajectory than is there; "" where it is as it will be."""
        return next((reason for s in self._asked() for other, reason in s.unfinished if other is trajectory), "")

    def usage(self, trajectory: Trajectory, further: Sequence[Trajectory] = ()) -> Usage:
        """What a trajectory took, and further calls that were made for it (dk_jax.evaluation.usage.tally)."""
        return tally(self._messages(trajectory), [(call.agent, self._messages(call)) for call in further])

    def _messages(self, trajectory: Trajectory) -> list[Message]:
        for speaker in self._asked():
            if exchanges := speaker.conversation(trajectory):
                answers = [exchange.answer for exchange in exchanges]
                return [Message(prompt=a.prompt_tokens, answer=a.completion_tokens, cost=a.cost) for a in answers]
        return messages_of(trajectory)

    def insisting(self) -> Any:
        """The speaker that raises Unanswered where it has no answer yet that it may still get."""
        return dataclasses.replace(self.speaker, insist=True) if hasattr(self.speaker, "insist") else self.speaker

    def forget(self) -> None:
        """The trajectories that were spoken so far are done with."""
        for speaker in self._asked():
            speaker.conversations.clear()
            speaker.unfinished.clear()

    def _asked(self) -> list[Any]:
        return [speaker for speaker in (self.speaker, self.greedy) if hasattr(speaker, "unfinished")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What is meant by a policy's name.

    Attributes:
        kind: "run", "hf", "endpoint", "kernels" or one of SCRIPTED.
        facts: what the answers depend on, and `policy`, its name.
        path: of a run, a checkpoint or kernels. checkpoint: of a run, and its `step`; None where the model is as it was before training.
        endpoint: how it is asked.
    """

    kind: str
    facts: Mapping[str, Any]
    path: Path = Path()
    checkpoint: Path | None = None
    step: int = 0
    endpoint: EndpointConfig | None = None
    own_sampling: bool = False


def kind_of(name: str) -> tuple[str, str]:
    """Kind and argument of a policy's name. Raises PolicyError."""
    kind, _, argument = name.partition(":")
    if kind in (*SCRIPTED, "endpoint") and not argument or kind in (*MODELS, "kernels") and argument:
        return kind, argument
    raise PolicyError(f"--policy={name}: give {FORMS}")


def describe(
    name: str, cfg: ConfigDict, tasks: Sequence[Task], views: Mapping[str, TaskView], *, endpoint: EndpointConfig | None = None,
    own_sampling: bool = False,
) -> Description:  # fmt: skip
    """What a policy's name means, without making it speak.

    Args:
        views: what the prompts say of each task. endpoint: how to ask it, for the kind "endpoint". own_sampling: it draws with its own
            temperature and top_p.

    Raises:
        PolicyError, FolderError, ScriptedPolicyError: there is no such policy, or not for these tasks.
    """
    kind, argument = kind_of(name)
    if kind == "run":
        return _describe_run(argument, cfg)
    if kind == "hf":
        if not (Path(argument) / "config.json").is_file():
            raise PolicyError(f"--policy={name}: {argument} has no config.json: give the directory of a Hugging Face checkpoint")
        model = _model_config(cfg, Path(argument)).model
        keep = ("init", "train", "head_rank", "lora_rank", "compute_dtype", "param_dtype")
        return Description(kind=kind, path=Path(argument), facts={"policy": "hf", **{key: model[key] for key in keep if key in model}})
    if kind == "endpoint":
        if endpoint is None:
            raise PolicyError("--policy=endpoint: give --base_url and --model")
        if cfg.style != "chat":
            raise PolicyError(f"--policy=endpoint with style={cfg.style!r}: it reads prompts of style 'chat' alone: --config.style=chat")
        facts = {"policy": "endpoint", "host": endpoint.host, "model": endpoint.model, "own_sampling": own_sampling}
        return Description(kind=kind, facts=facts, endpoint=endpoint, own_sampling=own_sampling)
    if kind == "kernels":
        from dk_jax.evaluation.kernel_folder import KernelFolder

        folder = KernelFolder(Path(argument), views, style=cfg.style)
        return Description(kind=kind, path=Path(argument), facts={"policy": "kernels", "content": _content_of(folder)})
    scripted = _scripted(kind, cfg, tasks, views)
    return Description(kind=kind, facts={"policy": kind, "kernels": scripted.digest})


def _scripted(kind: str, cfg: ConfigDict, tasks: Sequence[Task], views: Mapping[str, TaskView]) -> Any:
    from dk_jax.evaluation.scripted_policy import ScriptedPolicy
    from dk_jax.train.setup import kernel_variants

    return ScriptedPolicy(kind, tasks, views, kernel_variants(cfg.sandbox.language)[0], style=cfg.style)


def _content_of(folder: Any) -> str:
    """Digest of the kernels of a KernelFolder that are the tasks'."""
    digest = hashlib.sha256()
    for name, written in sorted(folder.written.items()):
        files = [((s, t), path) for s, turns in sorted(written.samples.items()) for t, path in sorted(turns.items())]
        for place, path in [*files, *([("every", written.every)] if written.every is not None else [])]:
            digest.update(f"{name} {place} ".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:_CONTENT_BYTES]


# --- models ---------------------------------------------------------------------------------------------------------------------------


def _describe_run(argument: str, cfg: ConfigDict) -> Description:
    named = re.fullmatch(r"(.+)@(best|sft|\d+)", argument)
    run, which = Path(named[1] if named else argument), named[2] if named else ""
    for needed in ("config.json", "codec/done"):
        if not (run / needed).is_file():
            raise PolicyError(f"--policy=run:{argument}: {run} has no {needed}: it is no run's folder, or the run has not come that far")
    trained = json.loads((run / "config.json").read_text(encoding="utf-8"))
    for key in ("style", "sandbox.language", "sandbox.form"):
        group, _, name = key.rpartition(".")
        then, now = (trained[group] if group else trained)[name], (cfg[group] if group else cfg)[name]
        if then != now:
            log.warning("run %s was trained with %s=%r and is evaluated with %r", run, key, then, now)
    checkpoint = _sft_checkpoint(run, trained) if which == "sft" else _rl_checkpoint(run, which)
    facts = {"policy": "run", "checkpoint": "before training" if checkpoint is None else str(checkpoint.relative_to(run / "checkpoints"))}
    if checkpoint is not None:
        facts["content"] = _manifest_digest(checkpoint)
    step = int(checkpoint.name) if checkpoint is not None and which != "sft" else 0
    return Description(kind="run", path=run, checkpoint=checkpoint, step=step, facts=facts)


def _numbered(folder: Path) -> dict[int, Path]:
    """Checkpoints of a folder by step, ascending."""
    found = {int(path.name): path for path in folder.glob("[0-9]*") if path.name.isdigit()} if folder.is_dir() else {}
    return dict(sorted(found.items()))


def _rl_checkpoint(run: Path, which: str) -> Path:
    """The newest whole one, the best, or that of a step."""
    newest, best = _numbered(run / "checkpoints" / "rl"), _numbered(run / "checkpoints" / "rl_best")
    there = f"there are steps {', '.join(map(str, sorted(newest | best))) or '(none)'}" + (f", of which {max(best)} is the best" if best else "")
    if which:
        found = best.get(max(best, default=-1)) if which == "best" else (best | newest).get(int(which))
        if found is None:
            raise PolicyError(f"{run} has no such RL checkpoint (@{which}): {there}")
        if problem := _problem(found, found.parent):
            raise PolicyError(f"checkpoint {found} is damaged: {problem}")
        return found
    for path in reversed(newest.values()):
        if not (problem := _problem(path, path.parent)):
            return path
        log.warning("checkpoint %s is damaged (%s): the one before is evaluated", path, problem)
    raise PolicyError(f"{run} has no whole RL checkpoint: {there}; run:{run}@sft evaluates it after its cold start")


def _sft_checkpoint(run: Path, trained: Mapping[str, Any]) -> Path | None:
    """What the cold start ended with, as dk_jax.sft.training.best says; None where the run had none."""
    if not trained["sft"]["steps"]:
        return None
    newest, best = _numbered(run / "checkpoints" / "sft"), _numbered(run / "checkpoints" / "sft_best")
    last = newest.get(trained["sft"]["steps"])
    if last is None:
        raise PolicyError(f"the cold start of {run} has not ended: steps {', '.join(map(str, newest)) or '(none)'} of {trained['sft']['steps']}")
    step = _record(last).get("best_validation", {}).get("step", int(last.name))
    found = last if step == int(last.name) else best.get(step)
    if found is None:
        raise PolicyError(f"the best cold-start checkpoint of {run}, step {step}, is not in checkpoints/sft_best any more")
    if problem := _problem(found, found.parent):
        raise PolicyError(f"checkpoint {found} is damaged: {problem}")
    return found


def _record(checkpoint: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint (dk_jax.train.state)."""
    return json.loads((checkpoint / "record" / "metadata").read_text(encoding="utf-8"))


def _problem(checkpoint: Path, folder: Path) -> str:
    """How a checkpoint is damaged, or ""; where none of its folder has a manifest, all were written before there were any."""
    from dk_jax.train import manifest

    sealed = any((path / manifest.NAME).exists() for path in _numbered(folder).values())
    return manifest.problem(checkpoint) if sealed else ""


def _manifest_digest(checkpoint: Path) -> str:
    """Digest of what a checkpoint's manifest says of its arrays; "" without one."""
    path = checkpoint / "manifest.json"
    files = json.loads(path.read_text(encoding="utf-8"))["files"] if path.exists() else {}
    arrays = {name: entry for name, entry in files.items() if name.startswith("arrays/")}
    return hashlib.sha256(json.dumps(arrays, sort_keys=True).encode()).hexdigest()[:_CONTENT_BYTES] if arrays else ""


def _model_config(cfg: ConfigDict, source: Path) -> ConfigDict:
    """The recipe with the weights of a Hugging Face folder."""
    from dk_jax.models.presets import PRESETS

    own = ConfigDict(cfg.to_dict())
    own.model.source = str(source)
    if own.model.init not in PRESETS:
        own.model.init = "huggingface"
    return own


def _speakers(cfg: ConfigDict, model: Any, trainable: Any) -> Policy:
    from dk_jax.generation.sampler import make_sampler
    from dk_jax.models.lora import combine
    from dk_jax.models.sharding import row_share
    from dk_jax.rollout.speaker import Speaker
    from dk_jax.train import setup
    from dk_jax.train.update import for_sampling

    sampler = make_sampler(model.static, setup.sampler_config(cfg, model.codec.eos_id, row_share(model.mesh)), model.mesh)
    params, c = for_sampling(combine(trainable, model.frozen)), cfg.evaluation
    speakers = [
        Speaker(sampler=drawing, params=params, codec=model.codec, max_context_tokens=cfg.rollout.max_context_tokens)
        for drawing in (sampler.drawing(temperature=c.temperature, top_p=c.top_p), sampler.drawing(temperature=0.0))
    ]
    return Policy(speaker=speakers[0], greedy=speakers[1])


def _open_run(d: Description, cfg: ConfigDict, workdir: Path) -> Policy:
    from dk_jax.generation.tokenizer import load_codec
    from dk_jax.train import model as models
    from dk_jax.train.workdir import WEIGHTS, remember_weights

    trained = ConfigDict(json.loads((d.path / "config.json").read_text(encoding="utf-8")))
    own = ConfigDict(cfg.to_dict())
    source = cfg.model.source if cfg.model.init == trained.model.init and cfg.model.source else trained.model.source
    own.model, own.seed = trained.model, trained.seed  # frozen parameters are drawn from the run's seed
    own.model.source = source
    models.check_source(own.model)
    if (d.path / WEIGHTS).exists() and not (workdir / WEIGHTS).exists():
        shutil.copyfile(d.path / WEIGHTS, workdir / WEIGHTS)  # weights of other content are refused
    remember_weights(own, workdir)
    model = models.make_model(own, load_codec(d.path / "codec"))
    trainable = model.trainable if d.checkpoint is None else restore_trainable(d.checkpoint, model.trainable)
    return _speakers(cfg, model, trainable)


def restore_trainable(checkpoint: Path, like: Any) -> Any:
    """The trainable parameters of a checkpoint (dk_jax.train.state), with the shapes and shardings of `like`. Only they are read, and
    nothing is written.

    Raises:
        PolicyError: it holds a state of other shapes, or its files are gone.
    """
    import jax
    import orbax.checkpoint as ocp

    wanted = {"trainable": jax.tree.map(ocp.utils.to_shape_dtype_struct, like)}
    arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
    with contextlib.closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler())) as reader:
        try:
            found = reader.restore(
                (checkpoint / "arrays").absolute(), args=ocp.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True)
            )["trainable"]
        except (ValueError, KeyError, OSError) as error:
            raise PolicyError(f"{checkpoint} can't be read as this model's: {' '.join(str(error).split())[:300]}") from error
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (found, like)]
    if shapes[0] != shapes[1]:
        raise PolicyError(f"{checkpoint} holds parameters of other shapes than this model has: its run's config.json was changed")
    return found


# --- all ------------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(
    d: Description, cfg: ConfigDict, tasks: Sequence[Task], views: Mapping[str, TaskView], *, config: RolloutConfig, workdir: Path
):
    """The policy, ready to speak, for as long as the context lasts.

    Args:
        config: of the episodes. workdir: where an endpoint's answers are kept.

    Raises:
        PolicyError, ConfigError, EndpointError, ...: weights that can't be had, a key that is not set.
    """
    if d.kind == "run":
        yield _open_run(d, cfg, workdir)
    elif d.kind == "hf":
        from dk_jax.generation.tokenizer import hf_codec
        from dk_jax.train import model as models
        from dk_jax.train.workdir import remember_weights

        own = _model_config(cfg, d.path)
        remember_weights(own, workdir)
        model = models.make_model(own, hf_codec(d.path))
        yield _speakers(own, model, model.trainable)
    elif d.kind == "endpoint":
        with contextlib.closing(AnswerJournal(workdir / ANSWERS)) as answers, Endpoint(d.endpoint, answers) as endpoint:
            fields = dict(max_tokens=config.max_policy_tokens, max_context_tokens=config.max_context_tokens)
            drawn = {} if d.own_sampling else dict(temperature=cfg.evaluation.temperature, top_p=cfg.evaluation.top_p)
            chosen = {} if d.own_sampling else dict(temperature=0.0)
            speakers = [AskedSpeaker(endpoint=Listening(endpoint), **fields, **own) for own in (drawn, chosen)]
            yield Policy(speaker=speakers[0], greedy=speakers[1])
    elif d.kind == "kernels":
        from dk_jax.evaluation.kernel_folder import KernelFolder

        yield Policy(speaker=KernelFolder(d.path, views, style=cfg.style))
    else:
        yield Policy(speaker=_scripted(d.kind, cfg, tasks, views))

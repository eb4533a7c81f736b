"""All that can be wrong with a run's options is found before any work: on each node, and between nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

import cache
import chat
import data
import metrics
from checkpoints import Checkpoint, Checkpoints, by_step, contract, differing, environment
from config import Config, ConfigError
from data import Source
from drafter import drafter_shape
from nodes import ALONE, Nodes
from run_folder import CHECKPOINTS, OPTIONS, RunFolder, Start
from target import Language, Target, check_shareable, choose_taps, language_of, read_config, shape_of


class Prepared(NamedTuple):
    """A run whose options have been checked, before any work."""

    config: Config
    folder: RunFolder
    taps: tuple[int, ...]
    language: Language
    train_on: Source
    held_out: Source
    checkpoints: Checkpoints
    checkpoint: Checkpoint | None
    cache: cache.Cache | None
    nodes: Nodes


def prepare(config: Config, run: Path, start: Start = "fresh", members: Nodes = ALONE) -> Prepared:
    """Check everything that can be wrong with the options, and read the text or the conversations.

    Raises:
        ConfigError: in one sentence that says what to change.
        NodeError: if another node has ended, as where it has something wrong with its options.
    """
    if members.restarts and start == "restart":
        raise ConfigError(
            "--restart with torchrun's --max-restarts would throw away what was learned at each failure: use --resume, which with "
            "torchrun begins where there is nothing to go on from"
        )
    factories = metrics.factories(config.metrics)
    taps, language, train_on, held_out = checked(config)
    stored = cache.open_complete(config.cache, config, train_on, taps) if config.cache is not None else None
    drawn = stored.drawn if stored else None
    if members.count > 1:
        own = {"contract": contract(config, train_on, drawn, members.count), "environment": environment(config)}
        _check_alike(members.gather("options", own, config.collective_timeout), members.rank)
    checkpoints = Checkpoints(run / CHECKPOINTS, config, train_on, drawn, members.count)
    if not members.writes:
        checkpoint = _same_start(members, config, run, start, None)
        folder = RunFolder(run, config, node=members.rank)  # only now: node 0 may have refused it
    else:
        checkpoint = checkpoints.resumable() if start == "resume" else None
        # torchrun starts again with the same command line, and the first time there is nothing to resume.
        begins = start == "resume" and members.restarts is not None and not (run / OPTIONS).exists()
        folder = RunFolder(run, config, "fresh" if begins else start, factories)
        checkpoint = _same_start(members, config, run, start, checkpoint)
    return Prepared(config, folder, taps, language, train_on, held_out, checkpoints, checkpoint, stored, members)


def _check_alike(prepared: list[dict[str, Any]], rank: int) -> None:
    """Refuse to train with a node 0 that would train otherwise, given the contract and the environment of each node."""
    first, own = prepared[0], prepared[rank]
    differences = differing(first["contract"], own["contract"])
    differences += [
        f"{name} is {there} there and {own['environment'][name]} here"
        for name, there in first["environment"].items()
        if there != own["environment"][name]
    ]
    if differences:
        raise ConfigError(f"node {rank} differs from node 0: {'; '.join(differences)}: make them the same")


def _same_start(
    members: Nodes, config: Config, run: Path, start: Start, checkpoint: Checkpoint | None
) -> Checkpoint | None:
    """Return node 0's checkpoint; on other nodes, which may have no such folder, without notes.

    Raises:
        ConfigError: if another node has a newer one: torchrun may give a machine another number when it starts again.
    """
    if members.count == 1:
        return checkpoint
    newest = max((step for step, _ in by_step(run / CHECKPOINTS)), default=0)
    place = [checkpoint.step, checkpoint.seconds] if checkpoint else None
    found = members.gather("start", [newest, place], config.collective_timeout)
    latest = max(range(members.count), key=lambda rank: (found[rank][0], -rank))
    if start == "resume" and latest:
        raise ConfigError(
            f"node {latest} has a checkpoint of step {found[latest][0]} in {run}, and node 0 has none so new: "
            "put the run folder onto a disk that all nodes share, or copy it to node 0"
        )
    if not members.writes and (at := found[0][1]):
        return Checkpoint(run / CHECKPOINTS, at[0], at[1])
    return checkpoint


def checked(config: Config) -> tuple[tuple[int, ...], Language, Source, Source]:
    """Check the options; return tapped layers, the target's language, what to train on and what to evaluate on."""
    config.validate()
    target = read_config(config.target, trust_remote_code=config.trust_remote_code)
    config.check_positions(getattr(target, "max_position_embeddings", None))
    shape = shape_of(target)
    taps = choose_taps(config.taps, shape)
    drafter_shape(config, shape, len(taps))
    if config.eval_every:
        check_shareable(target)
    language = language_of(
        config.target, target, mask_id=config.mask_token_id, trust_remote_code=config.trust_remote_code
    )
    return taps, language, *_sources(config, language)


def load_targets(config: Config, taps: tuple[int, ...], language: Language, count: int) -> list[Target]:
    """Load the target ``count`` times, onto the devices of the first threads.

    One after the other in this thread: loading changes settings of the whole process, such as the default dtype.
    """
    return [
        Target(
            config.target,
            taps,
            device,
            trust_remote_code=config.trust_remote_code,
            language=language,
            dtype=getattr(torch, config.target_dtype),
            compiled=config.compile_target,
        )
        for device in config.devices()[:count]
    ]


def _sources(config: Config, language: Language) -> tuple[Source, Source]:
    """Return what to train on and what to evaluate on."""
    if config.data is not None:
        return chat.load(config, language)
    corpus = data.load_corpus(config.text)
    texts = []
    for part, text, needed in (
        ("to train on", corpus.train, config.prompt_length if config.answers == "target" else config.length),
        ("to evaluate on", corpus.held_out, config.eval_prompt_length),
    ):
        tokens = language.encode(text)
        if len(tokens) < needed:
            raise ConfigError(f"text {part} has only {len(tokens)} tokens, a prompt takes {needed}: add text")
        texts.append(tokens)
    return texts[0], texts[1]

"""Batches of work: what target threads make of texts, and hand to the replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import data
import devices
from cache import Cache
from config import Config
from data import Source
from monitor import Monitor
from nodes import ALONE, Nodes
from pipeline import Crew, OrderedQueue, Stopped, Tickets
from target import Features, Target


@dataclass(frozen=True)
class Work:
    """Sequences for one replica.

    Attributes:
        tokens: int64 ``[sequences, S]``, a text's beginning and the target's answer.
        loss_mask: bool ``[sequences, S]``, on the CPU, where anchors are drawn; True on the answer up to the end of text.
        features: of all tokens.
        documents: int64 ``[sequences, S]`` on the CPU, which of several packed conversations a token is of, -1 on padding; None if each
            sequence is one.
        ready: comes when all that is on a device is there.
    """

    tokens: Tensor
    loss_mask: Tensor
    features: Features
    documents: Tensor | None = None
    ready: devices.Event = None

    def sent(self, device: torch.device) -> Work:
        """Return it on ``device``, for another thread. From one GPU to another nothing passes through the host, and nobody waits."""
        tokens, tapped, normed = (sent(x, device) for x in (self.tokens, *self.features))
        return replace(self, tokens=tokens, features=Features(tapped, normed), ready=devices.mark(device))

    def received(self) -> Work:
        """Return it for what this thread queues from now on; to be called by the thread that uses it."""
        devices.wait(self.tokens.device, [self.ready])
        devices.keep((self.tokens, *self.features))
        return self


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device`` without waiting for a GPU."""
    return tensor.to(device, non_blocking=device.type == "cuda")  # a CPU would read it before it has come


def make_work(
    config: Config,
    source: Source,
    target: Target,
    item: int,
    replica: int,
    check: Callable[[], None] = lambda: None,
    replicas: int | None = None,
) -> Work:
    """Make the work of one item and replica, which depends on nothing but the seed and these two numbers.

    No sequence is another replica's, too: conversations are dealt out in turn, to ``replicas`` on all nodes (``config.drafters`` if None).

    The answers are the target's own, unless ``config.answers`` is ``data``: a drafter learns what the target says, not what the
    text says (paper, A.1). Half of them are greedy, half are sampled at ``config.temperature``. ``check`` is called before each
    token, and may raise to give up.
    """
    rngs = [data.generator(config.seed, "sequence", item, replica, i) for i in range(config.sequences)]
    first = (item * (replicas or config.drafters) + replica) * config.sequences
    device = target.device
    if config.answers == "data":
        tokens, loss_mask, documents = data.draw_answered(
            source, config.prompt_length, config.length, rngs, first, config.seed
        )
        tokens = tokens.to(device)
        if documents is None:
            return Work(tokens, loss_mask, target.forward(tokens))
        return Work(tokens, loss_mask, packed_features(target, tokens, documents), documents)
    prompts = data.draw_prompts(source, config.prompt_length, rngs, first, config.seed)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    noise = torch.stack([torch.rand(config.length - int(lengths.min()), generator=rng) for rng in rngs])
    # Counted through all work: with one sequence a batch, every answer would be greedy.
    temperatures = (first + torch.arange(config.sequences)).remainder(2) * config.temperature
    padded = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    lengths = lengths.to(device)
    tokens = target.respond(padded.to(device), temperatures.to(device), noise.to(device), check, lengths=lengths)
    answered = torch.arange(config.length, device=device) >= lengths.unsqueeze(1)
    # A beginning may hold several texts; the answer is over at its own end.
    ends = torch.isin(tokens, torch.tensor(target.language.eos_ids, dtype=tokens.dtype, device=device)) & answered
    ended = ends.cumsum(1) - ends.long()
    return Work(tokens, (answered & (ended == 0)).cpu(), target.forward(tokens))


def packed_features(target: Target, tokens: Tensor, documents: Tensor) -> Features:
    """Return the features that each of several packed documents has by itself, whatever kinds of layers the target has.

    Args:
        target: reads the documents of a sequence as a batch.
        tokens: int64 ``[sequences, S]``.
        documents: int64 ``[sequences, S]`` on the CPU, see `Work`; padding gets zeros.
    """
    rows = []
    for sequence, numbers in zip(tokens, documents, strict=True):
        _, counts = numbers[numbers >= 0].unique_consecutive(return_counts=True)
        sizes = counts.tolist()
        padding = tokens.shape[1] - sum(sizes)
        apart = sequence[: sum(sizes)].split(sizes)
        batch = target.forward(nn.utils.rnn.pad_sequence(list(apart), batch_first=True))
        rows.append(
            [
                nn.functional.pad(
                    torch.cat([one[:size] for one, size in zip(part, sizes, strict=True)]), (0, 0, 0, padding)
                )
                for part in batch
            ]
        )
    tapped, normed = (torch.stack(part) for part in zip(*rows, strict=True))
    return Features(tapped, normed)


def produce(
    config: Config,
    source: Source,
    target: Target,
    tickets: Tickets[tuple[int, int]],
    queues: list[OrderedQueue[Work]],
    monitor: Monitor,
    nodes: Nodes = ALONE,
) -> None:
    """Be a target thread: make the work of ticket after ticket."""
    to = config.devices()[config.targets :]
    before, all_replicas = nodes.rank * config.drafters, nodes.count * config.drafters
    with devices.own_stream(target.device):
        for item, replica in tickets:
            monitor.now("answers")
            # Not under a name, which would keep it while the next one is made.
            hand_over(
                make_work(config, source, target, item, before + replica, queues[replica].check, all_replicas),
                item,
                queues[replica],
                to[replica],
                monitor,
            )


def read(
    config: Config,
    cache: Cache,
    replica: int,
    items: range,
    queue: OrderedQueue[Work],
    monitor: Monitor,
    nodes: Nodes = ALONE,
) -> None:
    """Be a reader thread, in place of target threads: hand one replica the work that is stored."""
    device = config.devices()[config.targets + replica]
    before, all_replicas = nodes.rank * config.drafters, nodes.count * config.drafters
    with devices.own_stream(device):
        for item in items:
            monitor.now("reads")
            work = Work(*cache.read(item * all_replicas + before + replica))
            hand_over(work, item, queue, device, monitor)


def hand_over(work: Work, item: int, queue: OrderedQueue[Work], device: torch.device, monitor: Monitor) -> None:
    """Put work into a replica's queue, on its ``device`` from when there is room: what waits for room takes no memory there."""
    monitor.now("waits for room")
    queue.admit(item)
    queue.put(item, work.sent(device))
    monitor.count(work.tokens.numel())


def fill(
    config: Config, source: Source, targets: list[Target], cache: Cache, tick: Callable[[], None] = lambda: None
) -> None:
    """Let target threads make all work that a cache lacks.

    Args:
        config: validated options.
        source: what sequences are drawn from.
        targets: one for each thread.
        cache: from `cache.begin`.
        tick: called about ten times a second in this thread.

    Raises:
        WorkerError: if a thread failed.
    """
    over = threading.Event()
    tickets = Tickets(cache.missing())

    def check() -> None:
        if over.is_set():
            raise Stopped

    def make(target: Target) -> None:
        with devices.own_stream(target.device):
            for number in tickets:
                check()
                work = make_work(config, source, target, *divmod(number, config.drafters), check)
                cache.write(number, work.tokens, work.loss_mask, work.features, work.documents)

    crew = Crew([over.set])
    try:
        for index, target in enumerate(targets):
            crew.start(f"target-{index}", partial(make, target))
        crew.join(tick=tick)
    finally:
        over.set()  # an interrupt between two starts leaves no thread that goes on

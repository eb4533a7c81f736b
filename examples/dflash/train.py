"""Training: target threads make work, drafter threads learn from it in step with each other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import attention
import blocks
import data
import optimizer
from config import Config
from drafter import Drafter, DrafterShape
from loss import chunked_loss
from pipeline import Crew, Meeting, OrderedQueue, Tickets
from target import Features, Target, TargetShape, Vocabulary


@dataclass(frozen=True)
class Work:
    """Sequences for one replica.

    Attributes:
        tokens: int64 ``[sequences, S]``, a text's beginning and the target's answer.
        loss_mask: bool ``[sequences, S]``, True on the answer up to the end of text.
        features: of all tokens.
    """

    tokens: Tensor
    loss_mask: Tensor
    features: Features


@dataclass(frozen=True)
class Trained:
    """The result of a run.

    Attributes:
        drafters: the replicas, which are equal.
        losses: mean loss of the replicas at each step.
        largest_difference: the largest difference between weights of two replicas.
        waiting_seconds: for each replica, time spent waiting for work.
        seconds: wall time.
        tokens: context tokens used, of all replicas.
    """

    drafters: list[Drafter]
    losses: list[float]
    largest_difference: float
    waiting_seconds: list[float]
    seconds: float
    tokens: int


def drafter_shape(config: Config, target: TargetShape, taps: int) -> DrafterShape:
    """Return the drafter that fits a target: its width and its heads, but fewer layers."""
    return DrafterShape(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        layers=config.layers,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        taps=taps,
        rope_theta=target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
    )


def new_drafter(config: Config, target: TargetShape, taps: int, device: torch.device) -> Drafter:
    """Return an untrained drafter; its weights follow from the seed alone."""
    drafter = Drafter(drafter_shape(config, target, taps))
    drafter.initialize(target.initializer_range, data.generator(config.seed, "drafter"))
    return drafter.to(device)


def make_work(config: Config, text: Tensor, target: Target, item: int, replica: int) -> Work:
    """Make the work of one item and replica, which depends on nothing but the seed and these two numbers.

    The answers are the target's own: a drafter learns what the target says, not what the text says (paper, A.1). Half of them
    are greedy, half are sampled at temperature 1.
    """
    rngs = [data.generator(config.seed, "sequence", item, replica, i) for i in range(config.sequences)]
    prompts = torch.stack([data.window(text, config.prompt_length, rng) for rng in rngs])
    noise = torch.stack([torch.rand(config.response_length, generator=rng) for rng in rngs])
    temperatures = torch.arange(config.sequences).remainder(2).float()
    device = target.device
    tokens = target.respond(prompts.to(device), temperatures.to(device), noise.to(device))
    ended = (tokens == data.EOS_ID).cumsum(1) - (tokens == data.EOS_ID).long()
    loss_mask = (torch.arange(config.length, device=device) >= config.prompt_length) & (ended == 0)
    return Work(tokens, loss_mask, target.forward(tokens))


def produce(
    config: Config, text: Tensor, target: Target, tickets: Tickets[tuple[int, int]], queues: list[OrderedQueue[Work]]
) -> None:
    """Be a target thread: make the work of ticket after ticket."""
    if target.device.type == "cuda":
        torch.cuda.set_device(target.device)
    for item, replica in tickets:
        queues[replica].put(item, make_work(config, text, target, item, replica))


class GradientExchange:
    """The meeting place where replicas average their gradients.

    Every replica adds all gradients up itself, in the order of the replicas, so that all get the same bits.
    """

    def __init__(self, replicas: int) -> None:
        self._gradients: list[list[Tensor]] = [[] for _ in range(replicas)]
        self._meeting = Meeting(replicas)
        self.stop = self._meeting.stop

    def average(self, replica: int, parameters: list[nn.Parameter]) -> None:
        """Replace the gradients of this replica's parameters by the mean over all replicas.

        Raises:
            Stopped: if the run is over.
        """
        own = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        self._gradients[replica] = own
        self._meeting.wait()
        means = []
        for same in zip(*self._gradients, strict=True):
            total = same[0].to(own[0].device, copy=True)
            for gradient in same[1:]:
                total += gradient.to(total.device)
            means.append(total / len(same))
        self._meeting.wait()  # nobody changes a gradient that another one still reads
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean


class Replica:
    """One drafter thread's model, optimizer and frozen vocabulary."""

    def __init__(self, config: Config, index: int, drafter: Drafter, vocabulary: Vocabulary) -> None:
        self.config = config
        self.index = index
        self.drafter = drafter
        self.losses: list[float] = []
        self.waiting_seconds = 0.0
        self._vocabulary = vocabulary
        self._device = vocabulary.head.device
        self._optimizers = optimizer.build(
            drafter,
            config.optimizer,
            lr=config.lr,
            muon_lr=config.muon_lr,
            steps=config.steps,
            warmup_ratio=config.warmup_ratio,
            clip=config.clip,
        )
        self._context_positions = torch.arange(config.length, device=self._device).unsqueeze(0)
        self._weights = blocks.slot_weights(config.block_size, config.gamma).repeat(config.anchors).to(self._device)
        # A tensor, so that a schedule of it makes no new compiles.
        self._kl_weight = torch.tensor(config.kl_weight, device=self._device)

    def run(self, queue: OrderedQueue[Work], exchange: GradientExchange, report: Callable[[int, float], None]) -> None:
        """Be a drafter thread: take work in order, train on it step by step together with the other replicas."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        steps = iter(range(self.config.steps))
        while following := list(itertools.islice(steps, self.config.uses)):
            asked = time.monotonic()
            work = queue.get()
            self.waiting_seconds += time.monotonic() - asked
            for step in following:
                loss = self.loss(work, step)
                loss.backward()
                exchange.average(self.index, self._optimizers.parameters)
                self._optimizers.step()
                self.losses.append(loss.item())
                report(step, self.losses[-1])

    def loss(self, work: Work, step: int) -> Tensor:
        """Return the loss of one step: some of the work's sequences, with anchors drawn for this step alone."""
        config = self.config
        key = (config.seed, "step", step, self.index)
        rows = torch.randperm(config.sequences, generator=data.generator(*key))[: config.batch].to(work.tokens.device)
        tokens, loss_mask = work.tokens[rows].to(self._device), work.loss_mask[rows].to(self._device)
        tapped, normed = (f[rows].to(self._device) for f in work.features)
        anchors, keep = blocks.sample_anchors(
            loss_mask, config.anchors, [data.generator(*key, i) for i in range(config.batch)]
        )
        inputs = blocks.input_tokens(tokens, anchors, config.block_size, data.MASK_ID)
        labels, counts = blocks.labels(tokens, loss_mask, anchors, keep, config.block_size)
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=config.autocast):
            draft_normed = self.drafter(
                tapped,
                nn.functional.embedding(inputs, self._vocabulary.embedding),
                self._context_positions,
                blocks.positions(anchors, config.block_size),
                attention.build_mask(anchors, keep, config.length, config.block_size),
            )
            return chunked_loss(
                draft_normed,
                blocks.teacher_rows(normed, anchors, config.block_size),
                self._weights,
                counts,
                self._vocabulary.head,
                self._kl_weight,
                labels,
                chunk_rows=config.chunk_rows,
            )


def train(config: Config, text: Tensor, targets: list[Target], report: Callable[[int, float, int], None]) -> Trained:
    """Train ``config.drafters`` replicas on work from ``targets``, each in a thread of its own.

    Args:
        config: validated options.
        text: uint8 ``[bytes]`` to cut beginnings from.
        targets: one for each target thread.
        report: called after each step of the first replica with step, loss and batches of work waiting.

    Raises:
        WorkerError: if a thread failed; all have been told to stop by then.
    """
    items = -(-config.steps // config.uses)
    tickets = Tickets(itertools.product(range(items), range(config.drafters)))
    queues: list[OrderedQueue[Work]] = [OrderedQueue(config.queue_depth) for _ in range(config.drafters)]
    exchange = GradientExchange(config.drafters)
    replicas = []
    for index, device in enumerate(config.devices()[config.targets :]):
        drafter = new_drafter(config, targets[0].shape, len(targets[0].taps), device)
        replicas.append(Replica(config, index, drafter, targets[0].vocabulary(device)))

    started = time.monotonic()
    crew = Crew([exchange.stop, *(queue.stop for queue in queues)])
    for index, target in enumerate(targets):
        crew.start(f"target-{index}", partial(produce, config, text, target, tickets, queues))
    for replica in replicas:

        def tell(step: int, loss: float, first: bool = replica.index == 0) -> None:
            if first:
                report(step, loss, sum(map(len, queues)))

        crew.start(f"drafter-{replica.index}", partial(replica.run, queues[replica.index], exchange, tell))
    crew.join()
    drafters = [replica.drafter for replica in replicas]
    return Trained(
        drafters=drafters,
        losses=[sum(same) / len(same) for same in zip(*(r.losses for r in replicas), strict=True)],
        largest_difference=largest_difference(drafters),
        waiting_seconds=[r.waiting_seconds for r in replicas],
        seconds=time.monotonic() - started,
        tokens=config.steps * config.drafters * config.batch * config.length,
    )


@torch.no_grad()
def largest_difference(drafters: list[Drafter]) -> float:
    """Return the largest absolute difference between the first drafter's weights and any other's."""
    first, *others = ([p.cpu() for p in d.parameters()] for d in drafters)
    return max((float((a - b).abs().max()) for other in others for a, b in zip(first, other, strict=True)), default=0.0)

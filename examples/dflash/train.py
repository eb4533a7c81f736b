"""Training: target threads make work, drafter threads learn from it in step with each other."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import attention
import blocks
import data
import devices
import optimizer
from cache import Cache
from checkpoints import Snapshot
from config import Config
from data import Source
from drafter import Drafter, DrafterShape
from evaluator import Evaluator
from loss import BlockLoss, chunked_loss
from monitor import Monitor
from nodes import ALONE, Nodes
from pipeline import Crew, Meeting, OrderedQueue, Stopped, Tickets
from safecompile import statistics
from target import Features, Target, TargetShape, Vocabulary

Numbers = dict[str, Any]
"""What a replica knows of its step, by names that metrics have, in JSON's types: loss, norm of the gradient, learning rates."""

Report = Callable[[int, Numbers], None]
"""Called after each step with its number, from 0, and its numbers."""


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


def drafter_shape(config: Config, target: TargetShape, taps: int) -> DrafterShape:
    """Return the drafter for a target: of its width, with fewer layers, and with its heads unless the configuration names others.

    Raises:
        ConfigError: if the sizes do not go together.
    """
    layer_types = tuple(config.layer_types or ())
    return DrafterShape(
        hidden_size=target.hidden_size,
        intermediate_size=_own(config.draft_intermediate_size, target.intermediate_size),
        layers=config.layers,
        heads=_own(config.draft_heads, target.heads),
        kv_heads=_own(config.draft_kv_heads, target.kv_heads),
        head_dim=_own(config.draft_head_dim, target.head_dim),
        taps=taps,
        rope_theta=target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        layer_types=layer_types,
        sliding_window=config.sliding_window if attention.SLIDING in layer_types else None,
    )


def new_drafter(config: Config, target: TargetShape, taps: int, device: torch.device) -> Drafter:
    """Return an untrained drafter; its weights follow from the seed alone."""
    drafter = Drafter(drafter_shape(config, target, taps))
    drafter.initialize(target.initializer_range, data.generator(config.seed, "drafter"))
    return drafter.to(device)


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
    first = (item * _own(replicas, config.drafters) + replica) * config.sequences
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


def mean_gradients(gradients: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """Return the mean over replicas of each parameter's gradient, on ``device``, added up in the order of the replicas.

    Args:
        gradients: of each replica, each parameter's.
        device: where to add them up.
    """
    means = []
    for first, *others in zip(*gradients, strict=True):
        total = first.to(device, copy=True)
        for gradient in others:
            total += gradient.to(device)
        means.append(total / (1 + len(others)))
    return means


class GradientExchange:
    """The meeting place where replicas average their gradients.

    Every replica adds all gradients up itself, in the order of the replicas, so that all get the same bits. The threads meet, and
    their devices' streams wait for each other; no thread waits for a device. With several nodes the first replica does it for all of its
    node: it alone exchanges sums with the other nodes, and the others copy what comes out.
    """

    def __init__(self, replicas: int, nodes: Nodes = ALONE) -> None:
        self._nodes = nodes
        # With several nodes: the first replica's means, and when they are there.
        self._shared: list[Tensor] = []
        self._averaged: devices.Event = None
        # Each replica writes its own place.
        self._gradients: list[list[Tensor]] = [[] for _ in range(replicas)]
        self._made: list[devices.Event] = [None] * replicas
        self._added: list[devices.Event] = [None] * replicas
        self._meeting = Meeting(replicas)

    def stop(self) -> None:
        """End every wait, now and later, with `Stopped`."""
        self._nodes.stop()
        self._meeting.stop()

    def average(self, replica: int, parameters: list[nn.Parameter]) -> None:
        """Replace the gradients of this replica's parameters, all on one device, by the mean over all replicas.

        Raises:
            NodeError: if another node has ended or does not come.
            Stopped: if the run is over.
        """
        device = parameters[0].device
        self._gradients[replica] = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        self._made[replica] = devices.mark(device)
        self._meeting.wait()
        devices.wait(device, self._made)
        if self._nodes.count == 1:
            means = mean_gradients(self._gradients, device)
        else:
            means = self._mean_over_nodes(replica, device)
        self._added[replica] = devices.mark(device)
        self._meeting.wait()
        # Nobody gives up the memory of a gradient that another one still reads.
        devices.wait(device, self._added)
        self._gradients[replica] = []
        if replica == 0:
            self._shared = []
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean

    def _mean_over_nodes(self, replica: int, device: torch.device) -> list[Tensor]:
        """Return the means over the replicas of all nodes, on ``device``."""
        if replica == 0:
            self._shared = mean_gradients(self._gradients, device)
            self._nodes.mean_(self._shared, "the mean of gradients")
            self._averaged = devices.mark(device)
            self._meeting.wait()
            return self._shared
        self._meeting.wait()
        devices.wait(device, [self._averaged])
        return [mean.to(device, copy=True) for mean in self._shared]


@dataclass(frozen=True)
class Drafted:
    """How well the blocks of one step were drafted, in slots 1 to ``B - 1``, see `blocks.shares`; NaN for a slot that no block counts in.

    Attributes:
        accuracy: of each slot by itself.
        acceptance: of each slot with all before it.
    """

    accuracy: list[float]
    acceptance: list[float]

    @property
    def eal(self) -> float:
        """Expected acceptance length, the drafted tokens and the target's own, if the drafter were to decode the labels (paper, equation 1).

        One more than the sum of ``acceptance``, whose products are taken block by block, while speculators' ``eal`` adds products of the slots'
        mean accuracies up, without the one. A slot that no block counts in adds nothing.
        """
        return 1.0 + sum(share for share in self.acceptance if not math.isnan(share))

    def as_json(self) -> dict[str, Any]:
        """Return all numbers in JSON's types, which have no NaN, by the names that lines of metrics have for them."""
        accuracy, acceptance = (
            [None if math.isnan(share) else round(share, 4) for share in shares]
            for shares in (self.accuracy, self.acceptance)
        )
        return {"accuracy": accuracy, "acceptance_by_position": acceptance, "eal": round(self.eal, 4)}


class Replica:
    """One drafter thread's model, optimizer and frozen vocabulary.

    Weights and optimizer are in float32 whatever the forward pass computes in: in bfloat16 the steps of a norm's weights are
    below half a unit in the last place, and are lost.

    Attributes:
        index: its place among the node's replicas.
        number: its place among the replicas of all nodes, which says what it learns from.
        step: whole steps behind the weights, those before a resume among them.
        losses: of the steps since the start or the resume.
        drafted: in the last of them; None before the first.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        drafter: Drafter,
        vocabulary: Vocabulary,
        mask_id: int,
        nodes: Nodes = ALONE,
    ) -> None:
        self.config = config
        self.index = index
        self.number = nodes.rank * config.drafters + index
        self.drafter = drafter
        self.step = 0
        self.losses: list[float] = []
        self.drafted: Drafted | None = None
        self._within_update = False
        self._updated: Callable[[], list[float]] | None = None  # waits for the update that has begun
        self._rates: dict[str, float] = {}
        self._mask_id = mask_id
        self._vocabulary = vocabulary
        self._device = vocabulary.head.device
        # A CPU has made an update when it has begun. Its step would be lost if the next gradients took longer than the end of a run.
        self._runs_ahead = self._device.type == "cuda"
        self._dense = config.attention == "dense" or self._device.type != "cuda"
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
        dpace = config.position_weights == "dpace"
        weights = torch.ones(config.block_size) if dpace else blocks.slot_weights(config.block_size, config.gamma)
        self._weights = weights[1:].to(self._device)
        # Tensors, so that other values, or a schedule of them, make no new compiles.
        self._kl_weight = torch.tensor(config.kl_weight, device=self._device)
        self._dpace_alpha = torch.tensor(config.dpace_alpha, device=self._device) if dpace else None

    def run(
        self,
        queue: OrderedQueue[Work],
        exchange: GradientExchange,
        report: Report,
        monitor: Monitor,
    ) -> None:
        """Be a drafter thread: take work in order, train on it step by step together with the other replicas.

        Raises:
            FloatingPointError: if training has diverged; the weights are then not `whole`.
            Stopped: if the run is over.
        """
        with devices.own_stream(self._device):
            try:
                for made in self._gradients_of_steps(queue, monitor):
                    # Only now: while a GPU was at the update, this thread has queued the next step's gradients.
                    self._complete(report, monitor)
                    if made is not None:
                        self._update(exchange, made, monitor)
                    if not self._runs_ahead:
                        self._complete(report, monitor)
            finally:
                self._complete(report, monitor)

    def _gradients_of_steps(self, queue: OrderedQueue[Work], monitor: Monitor) -> Iterator[BlockLoss | None]:
        """Make gradient after gradient, and yield what each came from; None before waiting for work."""
        work = None
        for step in range(self.step, self.config.steps):
            # After a resume, the first batch of work may have some of its steps behind it.
            if work is None or step % self.config.uses == 0:
                if not queue.ready():
                    yield None
                    monitor.now("waits for work")
                work = queue.get().received()
            monitor.now("trains")
            yield self.gradients(work, step)

    def _update(self, exchange: GradientExchange, made: BlockLoss, monitor: Monitor) -> None:
        """Begin the update of the weights, which `_complete` ends."""
        monitor.now("waits for replicas")
        # From before the meeting on: a replica that has passed it makes this step, however late its thread wakes up.
        self._within_update = True
        try:
            exchange.average(self.index, self._optimizers.parameters)
        except BaseException:
            self._within_update = False  # no weight has changed
            raise
        monitor.now("trains")
        self._rates = self._optimizers.rates
        norm = self._optimizers.step()
        self._updated = devices.read_later(torch.cat((torch.stack((made.loss, norm)), made.accuracy, made.acceptance)))

    def _complete(self, report: Report, monitor: Monitor) -> None:
        """Wait for the update that has begun, if any, and report its step."""
        if self._updated is None:
            return
        (value, size, *shares), self._updated = self._updated(), None
        # Not the loss alone: one replica's gradient spoils the weights of all. Raised inside the update, so that none is saved.
        if not (math.isfinite(value) and math.isfinite(size)):
            raise FloatingPointError(
                f"training diverged at step {self.step}: its loss is {value:g} and the norm of its gradient {size:g}; weights of "
                "this step are not saved: begin again in another --run folder with a lower lr or muon_lr, or a longer warmup_ratio"
            )
        self.step += 1
        self.losses.append(value)
        drafts = len(shares) // 2
        self.drafted = Drafted(shares[:drafts], shares[drafts:])
        self._within_update = False
        monitor.count(self.config.batch * self.config.length)
        report(self.step - 1, {"loss": value, "gradient_norm": size, **self._rates, **self.drafted.as_json()})

    @property
    def whole(self) -> bool:
        """Whether the weights are those after a whole step: not while an update is under way, or if one failed."""
        return not self._within_update

    def snapshot(self) -> Snapshot:
        """Return the state after the last step, in tensors that the next one changes."""
        return Snapshot(self.step, self.drafter.state_dict(), self._optimizers.state())

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a copy of ``snapshot``."""
        self.step = snapshot.step
        self.drafter.load_state_dict(snapshot.weights)
        self._optimizers.restore(snapshot.optimizer, snapshot.step)

    def make_step(self, work: Work, step: int) -> BlockLoss:
        """Make one step alone, without other replicas; return its loss, without gradient. Nothing waits for the device."""
        made = self.gradients(work, step)
        self._optimizers.step()
        return made

    def gradients(self, work: Work, step: int) -> BlockLoss:
        """Let the parameters have the gradients of one step; return its loss, without gradient."""
        made = self.loss(work, step)
        made.loss.backward()
        return made._replace(loss=made.loss.detach())

    def loss(self, work: Work, step: int) -> BlockLoss:
        """Return the loss of one step: some of the work's sequences, with anchors drawn for this step alone.

        Anchors are drawn anew each time a sequence is used (paper, section 4.2 and A.1).
        """
        config, shape = self.config, self.drafter.shape
        key = (config.seed, "step", step, self.number)
        rows = torch.randperm(config.sequences, generator=data.generator(*key))[: config.batch]
        # All that is drawn is on the CPU, and goes to the device without waiting for what that does: asking would leave it idle.
        loss_mask, documents = work.loss_mask[rows], None if work.documents is None else work.documents[rows]
        rngs = [data.generator(*key, i) for i in range(config.batch)]
        sampled = blocks.sample_anchors(loss_mask, config.anchors, rngs, documents)
        anchors, keep, loss_mask, rows = (sent(x, self._device) for x in (*sampled, loss_mask, rows))
        documents = None if documents is None else sent(documents, self._device)
        tokens, tapped, normed = (x[rows] for x in (work.tokens, *work.features))
        inputs = blocks.input_tokens(tokens, anchors, config.block_size, self._mask_id)
        labels, counts = blocks.labels(tokens, loss_mask, anchors, keep, config.block_size, documents)
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=config.autocast):
            draft_normed = self.drafter(
                tapped,
                nn.functional.embedding(inputs, self._vocabulary.embedding),
                self._context_positions,
                blocks.positions(anchors, config.block_size),
                attention.build_masks(
                    shape.layer_types,
                    shape.sliding_window,
                    attention.Layout(anchors, keep, config.length, config.block_size, documents),
                    dense=self._dense,
                ),
            )

            def drafted(rows: Tensor) -> Tensor:
                return blocks.drafted(rows, config.block_size)

            return chunked_loss(
                drafted(draft_normed),
                drafted(blocks.teacher_rows(normed, anchors, config.block_size)) if config.kl_weight else None,
                self._weights,
                drafted(counts),
                self._vocabulary.head,
                self._kl_weight,
                drafted(labels),
                chunk_blocks=config.chunk_blocks,
                gradient=config.gradient,
                dpace_alpha=self._dpace_alpha,
            )


class Training:
    """A training run: replicas, queues and threads.

    Attributes:
        compiled: graphs that all threads together compiled in it.

    Args:
        config: validated options.
        source: what sequences are drawn from.
        targets: one for each target thread.
        snapshot: to go on from; None for an untrained drafter.
        cache: of the targets' work, which they then do not make: only the first of them is looked at.
        evaluator: measures the weights while training goes on; it changes nothing in them.
        nodes: this node and the others that train with it.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        targets: list[Target],
        snapshot: Snapshot | None = None,
        cache: Cache | None = None,
        evaluator: Evaluator | None = None,
        nodes: Nodes = ALONE,
    ) -> None:
        self.config = config
        self.source = source
        self.nodes = nodes
        self.targets = targets
        self.cache = cache
        self._evaluator = evaluator
        self._first_item = snapshot.step // config.uses if snapshot else 0
        self.queues: list[OrderedQueue[Work]] = [
            OrderedQueue(config.queue_depth, self._first_item) for _ in range(config.drafters)
        ]
        self.monitor = Monitor()
        self.compiled = 0
        self._started: float | None = None
        self._ended: float | None = None
        self.replicas = [
            Replica(
                config,
                index,
                new_drafter(config, targets[0].shape, len(targets[0].taps), device),
                targets[0].vocabulary(device),
                targets[0].language.mask_id,
                nodes,
            )
            for index, device in enumerate(config.devices()[config.targets :])
        ]
        if snapshot:
            for replica in self.replicas:
                replica.restore(snapshot)
        self._exchange = GradientExchange(config.drafters, nodes)
        stops = [self._exchange.stop, *(queue.stop for queue in self.queues)]
        self.crew = Crew(stops if evaluator is None else [*stops, evaluator.stop])

    def run(self, report: Report, tick: Callable[[], None] = lambda: None) -> None:
        """Train ``config.drafters`` replicas on work from the targets, each in a thread of its own.

        However it ends, replicas whose threads have ended are all at the end of the same step, unless an update failed.

        Args:
            report: called in the first replica's thread after each of its steps.
            tick: called about ten times a second in this thread.

        Raises:
            WorkerError: if a thread failed; all have been told to stop by then.
        """
        config, nodes = self.config, self.nodes
        if self.step == config.steps:
            return
        items = range(self._first_item, -(-config.steps // config.uses))
        tickets = Tickets(itertools.product(items, range(config.drafters)))
        self._started = time.monotonic()
        compiled = statistics().compiled
        try:  # around the starts, too: an interrupt between two of them has to end those that run
            if self.cache is None:
                for index, target in enumerate(self.targets):
                    work = partial(produce, config, self.source, target, tickets, self.queues, self.monitor, nodes)
                    self._start(f"target-{index}", work)
            else:
                for index, queue in enumerate(self.queues):
                    work = partial(read, config, self.cache, index, items, queue, self.monitor, nodes)
                    self._start(f"reader-{index}", work)
            if self._evaluator:
                self._start("evaluation", partial(self._evaluator.run, self.monitor))
            self._start("drafter-0", partial(self._train_first, report))
            for replica in self.replicas[1:]:
                work = partial(replica.run, self.queues[replica.index], self._exchange, _silent, self.monitor)
                self._start(f"drafter-{replica.index}", work)
            self.crew.wait(tick)
        finally:
            self.crew.end()
            self._ended = time.monotonic()
            self.compiled = statistics().compiled - compiled
        self.crew.check()

    def doing(self) -> str:
        """Return what the threads do, for other nodes."""
        threads = ", ".join(f"{name} {thread.state}" for name, thread in list(self.monitor.threads.items()))
        return f"has made {self.step} steps: {threads}"

    def numbers(self) -> dict[str, Any]:
        """Return what other nodes may know, in JSON's types."""
        losses = self.replicas[0].losses
        return {
            "step": self.step,
            "loss": losses[-1] if losses else None,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "waiting": self.waiting,
        }

    @property
    def step(self) -> int:
        """Steps that the first replica has behind it, those before a resume among them."""
        return self.replicas[0].step

    @property
    def seconds(self) -> float:
        """Wall time of `run` so far."""
        return 0.0 if self._started is None else (self._ended or time.monotonic()) - self._started

    @property
    def waiting(self) -> int:
        """Batches of work in the queues."""
        return sum(map(len, self.queues))

    @property
    def drafters(self) -> list[Drafter]:
        """The replicas' models, which are equal between steps."""
        return [replica.drafter for replica in self.replicas]

    @property
    def losses(self) -> list[float]:
        """Mean loss of the replicas at each step that all have made since the start or the resume."""
        return [sum(same) / len(same) for same in zip(*(r.losses for r in self.replicas), strict=False)]

    @property
    def tokens(self) -> int:
        """Context tokens used since the start or the resume, of all replicas."""
        return sum(len(r.losses) for r in self.replicas) * self.config.batch * self.config.length

    @property
    def tokens_per_second(self) -> float:
        """Context tokens that all replicas used in a second, until the last of them ended: an evaluation may go on after that."""
        if self._started is None:
            return 0.0
        now = self._ended or time.monotonic()
        # A copy: other threads ask while this one adds threads.
        threads = [t for name, t in list(self.monitor.threads.items()) if name.startswith("drafter")]
        return self.tokens / max(1e-9, max((t.ended or now for t in threads), default=now) - self._started)

    def at_rest(self) -> Replica | None:
        """Return a replica whose weights are those after a whole step, and stay so: to be called before or after `run` only.

        Its thread may have been left behind, inside a compile or a pass, but cannot come to an update any more.
        """
        return next((r for r in self.replicas if r.whole), None)

    def _train_first(self, report: Report) -> None:
        """Be the first replica's thread, which reports, and hands its weights over to be evaluated."""
        replica, evaluator = self.replicas[0], self._evaluator

        def tell(step: int, numbers: Numbers) -> None:
            report(step, numbers)
            if evaluator and evaluator.is_due(replica.step):
                evaluator.offer(replica.step, replica.drafter)

        # The evaluation of the step that a run is resumed at may have been lost with what came after it.
        if evaluator and evaluator.is_due(replica.step):
            evaluator.offer(replica.step, replica.drafter)
        replica.run(self.queues[0], self._exchange, tell, self.monitor)
        if evaluator:
            evaluator.close()

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            self.monitor.now("starts")
            try:
                work()
            finally:
                self.monitor.now("done")

        self.monitor.add(name)
        self.crew.start(name, run)


def compiles_of_one_thread(config: Config, source: Source, target: Target, cache: Cache | None = None) -> int:
    """Return how many graphs this thread alone compiles, from nothing, for two steps of all replicas, the shapes of a whole run.

    All compiled code of the process is thrown away first. One batch of work serves all replicas. Comparable with the threads'
    number only where those are on one device: on several, each compiles for itself.
    """
    torch.compiler.reset()
    before = statistics().compiled
    vocabulary = target.vocabulary(target.device)
    work = make_work(config, source, target, 0, 0) if cache is None else Work(*cache.read(0)).sent(target.device)
    for index in range(config.drafters):
        drafter = new_drafter(config, target.shape, len(target.taps), target.device)
        replica = Replica(config, index, drafter, vocabulary, target.language.mask_id)
        for step in range(2):
            replica.make_step(work, step)
        del drafter, replica  # before the next one takes as much memory for weights, gradients and optimizer
    return statistics().compiled - before


@torch.no_grad()
def largest_difference(drafters: list[Drafter]) -> float:
    """Return the largest absolute difference between the first drafter's weights and any other's."""
    first, *others = ([p.cpu() for p in d.parameters()] for d in drafters)
    return max((float((a - b).abs().max()) for other in others for a, b in zip(first, other, strict=True)), default=0.0)


def _own(named: int | None, targets: int) -> int:
    return targets if named is None else named


def _silent(step: int, numbers: Numbers) -> None:
    pass

"""Training: target threads make work, drafter threads learn from it in step with each other."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import attention
import blocks
import data
import optimizer
from cache import Cache
from checkpoints import Snapshot
from config import Config
from data import Source
from drafter import Drafter, DrafterShape
from evaluator import Evaluator
from loss import chunked_loss
from monitor import Monitor
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
    """

    tokens: Tensor
    loss_mask: Tensor
    features: Features
    documents: Tensor | None = None


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
) -> Work:
    """Make the work of one item and replica, which depends on nothing but the seed and these two numbers.

    The answers are the target's own, unless ``config.answers`` is ``data``: a drafter learns what the target says, not what the
    text says (paper, A.1). Half of them are greedy, half are sampled at ``config.temperature``. ``check`` is called before each
    token, and may raise to give up.
    """
    rngs = [data.generator(config.seed, "sequence", item, replica, i) for i in range(config.sequences)]
    first = (item * config.drafters + replica) * config.sequences
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
) -> None:
    """Be a target thread: make the work of ticket after ticket."""
    if target.device.type == "cuda":
        torch.cuda.set_device(target.device)
    for item, replica in tickets:
        monitor.now("answers")
        work = make_work(config, source, target, item, replica, queues[replica].check)
        monitor.now("waits for room")
        queues[replica].put(item, work)
        monitor.count(work.tokens.numel())


def read(config: Config, cache: Cache, replica: int, items: range, queue: OrderedQueue[Work], monitor: Monitor) -> None:
    """Be a reader thread, in place of target threads: hand one replica the work that is stored."""
    for item in items:
        monitor.now("reads")
        work = Work(*cache.read(item * config.drafters + replica))
        monitor.now("waits for room")
        queue.put(item, work)
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
        if target.device.type == "cuda":
            torch.cuda.set_device(target.device)
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


class GradientExchange:
    """The meeting place where replicas average their gradients.

    Every replica adds all gradients up itself, in the order of the replicas, so that all get the same bits.
    """

    def __init__(self, replicas: int) -> None:
        self._gradients: list[list[Tensor]] = [[] for _ in range(replicas)]  # each replica writes its own
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
    """One drafter thread's model, optimizer and frozen vocabulary.

    Weights and optimizer are in float32 whatever the forward pass computes in: in bfloat16 the steps of a norm's weights are
    below half a unit in the last place, and are lost.

    Attributes:
        step: whole steps behind the weights, those before a resume among them.
        losses: of the steps since the start or the resume.
    """

    def __init__(self, config: Config, index: int, drafter: Drafter, vocabulary: Vocabulary, mask_id: int) -> None:
        self.config = config
        self.index = index
        self.drafter = drafter
        self.step = 0
        self.losses: list[float] = []
        self._within_update = False
        self._mask_id = mask_id
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
        self._weights = blocks.slot_weights(config.block_size, config.gamma)[1:].repeat(config.anchors).to(self._device)
        # A tensor, so that a schedule of it makes no new compiles.
        self._kl_weight = torch.tensor(config.kl_weight, device=self._device)

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
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while self.step < self.config.steps:
            monitor.now("waits for work")
            work = queue.get()
            # After a resume, the first batch of work may have some of its steps behind it.
            end = (self.step // self.config.uses + 1) * self.config.uses
            for step in range(self.step, min(end, self.config.steps)):
                monitor.now("trains")
                loss = self.gradients(work, step)
                monitor.now("waits for replicas")
                numbers = self._update(exchange, loss, monitor)
                monitor.count(self.config.batch * self.config.length)
                report(step, numbers)

    def _update(self, exchange: GradientExchange, loss: Tensor, monitor: Monitor) -> Numbers:
        # From before the meeting on: a replica that has passed it makes this step, however late its thread wakes up.
        self._within_update = True
        try:
            exchange.average(self.index, self._optimizers.parameters)
        except BaseException:
            self._within_update = False  # no weight has changed
            raise
        monitor.now("trains")
        rates = self._optimizers.rates
        norm = self._optimizers.step()
        value, size = torch.stack((loss, norm)).tolist()  # waits for the device: the update is complete
        # Not the loss alone: one replica's gradient spoils the weights of all. Raised inside the update, so that none is saved.
        if not (math.isfinite(value) and math.isfinite(size)):
            raise FloatingPointError(
                f"training diverged at step {self.step}: its loss is {value:g} and the norm of its gradient {size:g}; weights of "
                "this step are not saved: begin again in another --run folder with a lower lr or muon_lr, or a longer warmup_ratio"
            )
        self.step += 1
        self.losses.append(value)
        self._within_update = False
        return {"loss": value, "gradient_norm": size, **rates}

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

    def make_step(self, work: Work, step: int) -> Tensor:
        """Make one step alone, without other replicas; return its loss, a scalar tensor. Nothing waits for the device."""
        loss = self.gradients(work, step)
        self._optimizers.step()
        return loss

    def gradients(self, work: Work, step: int) -> Tensor:
        """Let the parameters have the gradients of one step; return its loss, a scalar tensor."""
        loss = self.loss(work, step)
        loss.backward()
        return loss.detach()

    def loss(self, work: Work, step: int) -> Tensor:
        """Return the loss of one step: some of the work's sequences, with anchors drawn for this step alone.

        Anchors are drawn anew each time a sequence is used (paper, section 4.2 and A.1).
        """
        config, shape = self.config, self.drafter.shape
        key = (config.seed, "step", step, self.index)
        rows = torch.randperm(config.sequences, generator=data.generator(*key))[: config.batch]
        # All that is drawn is on the CPU, and goes to the device without waiting for what that does: asking would leave it idle.
        loss_mask, documents = work.loss_mask[rows], None if work.documents is None else work.documents[rows]
        rngs = [data.generator(*key, i) for i in range(config.batch)]
        anchors, keep = map(self._sent, blocks.sample_anchors(loss_mask, config.anchors, rngs, documents))
        loss_mask, documents = self._sent(loss_mask), None if documents is None else self._sent(documents)
        rows = rows.to(work.tokens.device, non_blocking=True)
        tokens, tapped, normed = (self._sent(x[rows]) for x in (work.tokens, *work.features))
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
                    anchors,
                    keep,
                    config.length,
                    config.block_size,
                    documents,
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
                chunk_rows=config.chunk_rows,
                gradient=config.gradient,
            )

    def _sent(self, tensor: Tensor) -> Tensor:
        # What goes to a CPU without waiting is read there before it has come.
        return tensor.to(self._device, non_blocking=self._device.type == "cuda")


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
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        targets: list[Target],
        snapshot: Snapshot | None = None,
        cache: Cache | None = None,
        evaluator: Evaluator | None = None,
    ) -> None:
        self.config = config
        self.source = source
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
            )
            for index, device in enumerate(config.devices()[config.targets :])
        ]
        if snapshot:
            for replica in self.replicas:
                replica.restore(snapshot)
        self._exchange = GradientExchange(config.drafters)
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
        config = self.config
        if self.step == config.steps:
            return
        items = range(self._first_item, -(-config.steps // config.uses))
        tickets = Tickets(itertools.product(items, range(config.drafters)))
        self._started = time.monotonic()
        compiled = statistics().compiled
        try:  # around the starts, too: an interrupt between two of them has to end those that run
            if self.cache is None:
                for index, target in enumerate(self.targets):
                    work = partial(produce, config, self.source, target, tickets, self.queues, self.monitor)
                    self._start(f"target-{index}", work)
            else:
                for index, queue in enumerate(self.queues):
                    work = partial(read, config, self.cache, index, items, queue, self.monitor)
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
        threads = [t for name, t in self.monitor.threads.items() if name.startswith("drafter")]
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
    work = make_work(config, source, target, 0, 0) if cache is None else Work(*cache.read(0))
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

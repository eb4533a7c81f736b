"""A replica: the drafter of one thread, which learns in step with those of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import attention
import blocks
import data
import devices
import optimizer
from checkpoints import Snapshot
from config import Config
from drafter import Drafter
from loss import BlockLoss, chunked_loss
from monitor import Monitor
from nodes import ALONE, Nodes
from pipeline import Meeting, OrderedQueue
from target import Vocabulary
from work import Work, sent

Numbers = dict[str, Any]
"""What a replica knows of its step, by names that metrics have, in JSON's types: loss, norm of the gradient, learning rates."""


Report = Callable[[int, Numbers], None]
"""Called after each step with its number, from 0, and its numbers."""


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
        norm = self.step_optimizers()
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
        self.step_optimizers()
        return made

    def step_optimizers(self) -> Tensor:
        """Change the weights by the gradients that they have, and drop those; return the gradients' norm before clipping."""
        return self._optimizers.step()

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

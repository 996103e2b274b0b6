"""Bytes on one rank by part: model states exactly as `zero/` holds them, and what a step needs beside them.

Neighbours: `groups.py` gives the flat groups, `activations.py` the micro-batch, `estimate.py` asks for it all. The
parts of the states are those of the Memory table of `zero/README.md`, between backward and step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from raydz.plan.groups import EngineSizes, GroupShape, kept_units, packed_bytes
from raydz.plan.shapes import UnitShape

_IN_FLIGHT = 3  # two reductions, and a third that was just launched
_STATES = ("weights", "masters", "moments", "gradients", "sums")


@dataclass(frozen=True)
class ElementBytes:
    """Bytes an element.

    Args:
        compute: of forward and backward.
        masters: of what the compute weights lack to fp32: a low half under bf16, all of it under fp16.
        moments: of all optimizer states.
        matrix_moments: of those of matrices that are updated as a whole (Muon); None: as of all others.
        average: of an average of the weights, where one is kept.
        wire: of a gradient that travels; None is the buffer's own.
    """

    compute: int
    masters: int
    moments: int
    matrix_moments: int | None = None
    average: int = 0
    wire: int | None = None

    @property
    def summed(self) -> int:
        """Of a sum over ranks that stays a shard: fp32, but for bf16 weights that are their own masters."""
        return 2 if self.compute == 2 and not self.masters else 4

    def of(self, group: GroupShape) -> ElementBytes:
        """Those of a group that may have a dtype of its own."""
        if group.compute_bytes in (None, self.compute):
            return self
        assert group.compute_bytes is not None
        return replace(self, compute=group.compute_bytes, masters=0 if group.compute_bytes >= 4 else self.masters)


@dataclass(frozen=True)
class Sharding:
    """What the stage's policy comes to.

    Args:
        ranks: of a shard group.
        sums_micro_batches: more than one micro-batch a step.
        at_boundary: gradients are kept whole and reduced once a step.
        sum_bytes: of an element where micro-batches add up.
        by_all_reduce: every rank receives whole sums of gradients.
        overlaps: reductions are under way while the next gradients are made.
        is_ordered: sums in rank order, by all-to-all (gloo).
        near: ranks that keep a second copy of released weights among themselves; None: nobody does.
        offloads_weights: those that are released live in host memory or on a disk, also where there is one rank.
        int8_weights, int8_frozen, int8_gradients: what travels as int8 blocks at stage 3, the first two being all
            weights, and frozen ones.
    """

    stage: int
    ranks: int
    sums_micro_batches: bool
    at_boundary: bool = False
    sum_bytes: int = 4
    by_all_reduce: bool = False
    overlaps: bool = True
    is_ordered: bool = True
    near: int | None = None
    offloads_weights: bool = False
    int8_weights: bool = False
    int8_frozen: bool = False
    int8_gradients: bool = False

    @property
    def keeps_gradients(self) -> bool:
        """Whether whole gradients live between micro-batches."""
        return self.stage < 2 or self.at_boundary or self.ranks == 1

    @property
    def frees_gradients(self) -> bool:
        return self.stage > 1 and self.ranks > 1

    def keeps_weights(self, group: GroupShape) -> bool:
        """Whether the group's gathered weights stay after use."""
        return self.stage < 3 or group.persistent or (self.ranks == 1 and not self.offloads_weights)

    def owned(self, group: GroupShape) -> int:
        """Elements whose masters and states this rank holds."""
        if not group.trainable:
            return group.padded_numel if self.keeps_weights(group) else group.shard_numel
        return group.shard_numel if self.stage else group.padded_numel

    def weights_sent(self, group: GroupShape, each: ElementBytes) -> int:
        """Bytes of all ranks' weights as a gather moves them."""
        if self.packs_weights(group, each):
            return packed_bytes(group.shard_numel) * self.ranks
        return group.padded_numel * each.of(group).compute

    def packs_weights(self, group: GroupShape, each: ElementBytes) -> bool:
        """Whether they travel as int8."""
        return self._may_round(group, each) and (self.int8_weights or (self.int8_frozen and not group.trainable))

    def packs_gradients(self, group: GroupShape, each: ElementBytes) -> bool:
        """Whether they travel as int8."""
        return self._may_round(group, each) and self.int8_gradients

    def _may_round(self, group: GroupShape, each: ElementBytes) -> bool:
        size = each.of(group).compute
        return not self.keeps_weights(group) and (size == 2 or size == 4 == each.compute)

    def gradients_sent(self, group: GroupShape, each: ElementBytes) -> int:
        """Bytes of a group's gradients as a reduction moves them."""
        if self.packs_gradients(group, each):
            return packed_bytes(group.shard_numel) * self.ranks
        return group.padded_numel * (each.wire or self.gradient_bytes(each.of(group)))

    def gradient_bytes(self, each: ElementBytes) -> int:
        """Bytes an element of a whole gradient buffer."""
        return self.sum_bytes if self.sums_micro_batches and self.keeps_gradients else each.compute


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. The first five are its model states between backward and step; the others come and go.

    Args:
        weights: what forward reads: whole, or this rank's shard (and persistent parameters, and its part of the second
            copy).
        masters: what the weights lack to fp32.
        moments: optimizer states.
        gradients: whole gradient buffers that stay between micro-batches.
        sums: fp32 sums of gradients over ranks and micro-batches.
        gathered: whole weights of the current unit and of those gathered ahead (stage 3).
        buckets: gradients being filled and in flight, and the largest one that autograd hands over.
        activations: what autograd keeps of a micro-batch; an estimate, 0 where the model is not raydz's.
        logits: the loss's; an estimate as well.
    """

    weights: int
    masters: int
    moments: int
    gradients: int
    sums: int
    gathered: int = 0
    buckets: int = 0
    activations: int = 0
    logits: int = 0

    @property
    def model_states(self) -> int:
        return sum(getattr(self, name) for name in _STATES)

    @property
    def certain(self) -> int:
        """Without the estimates."""
        return self.model_states + self.gathered + self.buckets

    @property
    def total(self) -> int:
        """All parts at once: an upper bound, for logits and the last gradients do not live at the same time."""
        return self.certain + self.activations + self.logits

    def parts(self) -> dict[str, int]:
        """Bytes by name, in the order above."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def state_bytes(groups: Sequence[GroupShape], sharding: Sharding, bytes_of: ElementBytes) -> dict[str, int]:
    """The parts that are model states."""
    found = dict.fromkeys(_STATES, 0)
    for group in groups:
        each, owned = bytes_of.of(group), sharding.owned(group)
        whole_gradient = sharding.gradient_bytes(each)
        kept = group.padded_numel if sharding.keeps_weights(group) else group.shard_numel
        found["weights"] += kept * each.compute
        if sharding.near and not sharding.keeps_weights(group):
            found["weights"] += sharding.weights_sent(group, bytes_of) // sharding.near
        if not group.trainable:
            continue
        found["masters"] += owned * each.masters
        found["moments"] += owned * (each.moments + each.average)
        if each.matrix_moments is not None:  # ranks differ in how much of their part is matrices: their mean
            saved = group.matrix_numel * (each.moments - each.matrix_moments)
            found["moments"] -= saved * owned // group.padded_numel
        if sharding.ranks == 1:  # the buffer is the sum
            found["sums" if whole_gradient == 4 else "gradients"] += group.padded_numel * whole_gradient
            continue
        if not sharding.frees_gradients:
            found["gradients"] += group.padded_numel * whole_gradient
        # Stage 0 gathers the sums where the gradients were, if those are fp32.
        if sharding.stage or whole_gradient < 4:
            in_shards = sharding.sums_micro_batches and not sharding.keeps_gradients
            summed = each.summed if sharding.stage else 4
            found["sums"] += owned * (sharding.sum_bytes if in_shards else summed)
    return found


def snapshot_bytes(groups: Sequence[GroupShape], sharding: Sharding, bytes_of: ElementBytes, replicas: int) -> int:
    """Host memory that a save behind training holds on a rank, wherever the state itself lives: what the rank stores.

    Of masters the merged fp32; of replicas each stores a part. Without buffers of the model and the file's header,
    which are a few hundred bytes a tensor.
    """
    total = 0
    for group in groups:
        each = bytes_of.of(group)
        numel = -(-group.shard_numel // replicas)
        if not group.trainable:
            total += numel * each.compute
            continue
        total += numel * ((4 if each.masters else each.compute) + each.moments + each.average)
        if each.matrix_moments is not None:  # the mean over ranks, as in `state_bytes`
            total -= group.matrix_numel * (each.moments - each.matrix_moments) * numel // group.padded_numel
    return total


def gathered_bytes(
    units: Sequence[UnitShape], groups: Sequence[GroupShape], sharding: Sharding, sizes: EngineSizes, each: ElementBytes
) -> int:
    """Most bytes of released weights that are gathered at once: root, current unit, those ahead and those kept."""
    numels, released, num_bytes, messages = ([0] * len(units) for _ in range(4))
    for group in groups:
        numels[group.unit] += group.padded_numel
        if not sharding.keeps_weights(group):
            released[group.unit] += group.padded_numel
            num_bytes[group.unit] += group.padded_numel * each.of(group).compute
        if sharding.packs_weights(group, each):
            messages[group.unit] += sharding.weights_sent(group, each)
    forward = list(range(1, len(units)))
    backward = [index for index in reversed(forward) if not units[index].is_lookup]
    kept = kept_units(units, groups, sizes)
    peak = num_bytes[0] + messages[0]
    for order in (forward, backward):
        for position, unit in enumerate(order):
            waiting = kept.intersection(order[:position] if order is forward else order[position + 1 :])
            live = released[0] + released[unit] + sum(released[index] for index in waiting)
            held = num_bytes[0] + num_bytes[unit] + messages[unit] + sum(num_bytes[index] for index in waiting)
            ahead = 0
            for following in order[position + 1 :]:
                added = 0 if following in waiting else released[following]
                if ahead >= sizes.prefetch_numel or live + added > sizes.max_live_numel:
                    break
                live, ahead = live + added, ahead + numels[following]
                held += num_bytes[following] + messages[following] if added else 0
            peak = max(peak, held)
    return peak


def bucket_bytes(
    units: Sequence[UnitShape], groups: Sequence[GroupShape], sharding: Sharding, each: ElementBytes
) -> int:
    """Most bytes of gradients that are filled or under way at once, beyond the buffers that stay."""
    handed_over = max((p.numel for unit in units for p in unit.parameters if p.trainable), default=0) * each.compute
    order = [group for group in reversed(groups) if group.trainable]
    in_flight = _IN_FLIGHT if sharding.overlaps else 1
    if sharding.ranks == 1:
        return handed_over
    if sharding.frees_gradients and sharding.at_boundary:  # whole gradients live until they are reduced
        return handed_over + _filled(order, sharding, each) + _sent(order[:in_flight], sharding, each)
    peak = 0
    for i, group in enumerate(order):
        under_way = order[max(0, i + 1 - in_flight) : i + 1]
        rest = [g for g in order[i + 1 :] if g.unit in (group.unit, 0)]
        filled = _filled([*under_way, *rest], sharding, each) if sharding.frees_gradients else 0
        peak = max(peak, filled + _sent(under_way, sharding, each))
    return handed_over + peak


def _filled(groups: Sequence[GroupShape], sharding: Sharding, each: ElementBytes) -> int:
    return sum(group.padded_numel * sharding.gradient_bytes(each.of(group)) for group in groups)


def _sent(groups: Sequence[GroupShape], sharding: Sharding, each: ElementBytes) -> int:
    """Copies in the wire's dtype or as int8, and what arrives."""
    total = 0
    for group in groups:
        if sharding.packs_gradients(group, each):
            total += 2 * sharding.gradients_sent(group, each)
            continue
        buffer = sharding.gradient_bytes(each.of(group))
        wire = each.wire or buffer
        arrives = group.padded_numel if sharding.is_ordered else group.shard_numel
        total += arrives * wire + (group.padded_numel * wire if wire != buffer else 0)
    return total

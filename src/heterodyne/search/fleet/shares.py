"""How a batch is shared out to unlike pipelines: as many micro-batches to each as it can do until all are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf

from heterodyne.plan.schedules.makespans import Makespans
from heterodyne.search.fleet.plan import TemplateGroup
from heterodyne.search.fleet.weighed import Mix

__all__ = ["groups_of", "micro_batches_each", "time_until"]

_SLACK = 1e-12
_STEPS = 3  # after which the rest is a few micro-batches


def micro_batches_each(
    mix: Mix,
    samples: int,
    played: Sequence[Makespans],
    most: Sequence[int],
    below_s: float,
    fits: Callable[[int, int], bool],
) -> list[int] | None:
    """Micro-batches of a pipeline of each template: the shortest time in which all together do the batch; None if not below a time.

    From the time that no plan can beat on: always the pipelines that would be done first get one more, or as many as it takes until
    they fit again.
    """
    sizes = [count * template.micro_batch for template, count in mix]
    if sum(size * own for size, own in zip(sizes, most, strict=True)) < samples:
        return None
    lines = [own.lines for own in played]
    if any(around == inf for own in lines for around, _ in own):
        return None
    if len(mix) == 1:  # there is nothing to share out
        alone = ceil(samples / sizes[0])
        count = next((n for n in range(alone, most[0] + 1) if fits(0, n)), 0)
        late = not count or played[0].bound_s(count) >= below_s or played[0].seconds(count) >= below_s
        return None if late else [count]
    low = time_until(list(zip(lines, sizes, strict=True)), most, samples)
    if low >= below_s:
        return None
    counts = [own.most_within(low, top) for own, top in zip(played, most, strict=True)]
    done = sum(size * count for size, count in zip(sizes, counts, strict=True))
    while done < samples:
        more = [
            next((n for n in range(count + 1, top + 1) if fits(number, n)), 0)
            for number, (count, top) in enumerate(zip(counts, most, strict=True))
        ]
        next_s = [own.seconds(count) if count else inf for own, count in zip(played, more, strict=True)]
        first = min(range(len(mix)), key=next_s.__getitem__)
        if next_s[first] >= below_s or not more[first]:
            return None
        done += sizes[first] * (more[first] - counts[first])
        counts[first] = more[first]
    return counts if all(counts) else None


def groups_of(mix: Mix, samples: int, counts: Sequence[int]) -> tuple[TemplateGroup, ...]:
    """Where more samples have room than there are, as many pipelines get a micro-batch less."""
    spare = sum(n * t.micro_batch * m for (t, n), m in zip(mix, counts, strict=True)) - samples
    groups = []
    for (template, replicas), count in sorted(
        zip(mix, counts, strict=True), key=lambda entry: -entry[0][0].micro_batch
    ):
        less = min(replicas, spare // template.micro_batch) if count > 1 else 0
        spare -= less * template.micro_batch
        for part, own in ((replicas - less, count), (less, count - 1)):
            if part:
                groups.append(TemplateGroup(template=template, replicas=part, num_microbatches=own))
    return tuple(groups)


def time_until(lines: Sequence[tuple[Sequence[tuple[float, float]], int]], most: Sequence[int], samples: int) -> float:
    """When so many samples are done, and no later. ``lines``: of each kind of pipeline, with the samples of a micro-batch of all of
    that kind (see `Makespans.lines`); ``most``: micro-batches of each, which must be able to do it.
    """
    if len(lines) == 1:  # there is nothing to share out
        (own, size), count = lines[0], -(-samples // lines[0][1])
        return max((around + count * each for around, each in own)) * (1 - _SLACK)
    seconds = _fractions_until(lines, most, samples)
    counts = [
        max(0, min(top, *(int((seconds - a) / e * (1 + _SLACK)) if e > 0 else top for a, e in own)))
        for (own, _), top in zip(lines, most, strict=True)
    ]
    done = sum(size * count for (_, size), count in zip(lines, counts, strict=True))
    ahead = [
        max(a + (count + 1) * e for a, e in own) if count < top else inf
        for (own, _), count, top in zip(lines, counts, most, strict=True)
    ]
    while done < samples:
        first = min(range(len(lines)), key=ahead.__getitem__)
        own, size = lines[first]
        seconds, done, counts[first] = ahead[first], done + size, counts[first] + 1
        ahead[first] = max(a + (counts[first] + 1) * e for a, e in own) if counts[first] < most[first] else inf
    return seconds * (1 - _SLACK)


def _fractions_until(
    lines: Sequence[tuple[Sequence[tuple[float, float]], int]], most: Sequence[int], samples: int
) -> float:
    """No later than `time_until`: about when the batch is done with fractions of micro-batches.

    What a pipeline has done is the least of some lines, so from its first micro-batch on it only ever slows down: Newton's steps come
    from below.
    """
    seconds = 0.0
    for _ in range(_STEPS):
        done = rate = 0.0
        for (own, size), top in zip(lines, most, strict=True):
            rounds, each = min((((seconds - a) / e, e) for a, e in own if e > 0), default=(inf, 1.0))
            if rounds < 0:
                rounds, each = 0.0, min(e for _, e in own if e > 0)
            done += size * min(rounds, top)
            rate += size / each if rounds < top else 0.0
        if done >= samples or not rate:
            break
        seconds += (samples - done) / rate
    return seconds * (1 - _SLACK)

"""Division of the batch over unlike pipelines: each gets as many micro-batches as it finishes by the time that all are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf

from heterodyne.plan.schedules.makespans import Makespans
from heterodyne.search.fleet.plan import Mix, TemplateGroup

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
    """Micro-batches per pipeline of each template with the least makespan; None if that is not below ``below_s``.

    Starting at a lower bound, the pipeline that would finish first gets one more micro-batch, or as many as it takes to fit again.
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
    """Where the micro-batches hold more samples than the batch, as many pipelines get one micro-batch less."""
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
    """A lower bound on the time at which ``samples`` are done.

    ``lines``: the piecewise linear capacity of each template, with the samples of a micro-batch of all its replicas (see
    `Makespans.lines`); ``most``: micro-batches of each, which must suffice.
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
    """A lower bound on `time_until`: when the batch is done with fractional micro-batches.

    The capacity of a pipeline is the least of some lines, so it is concave after its first micro-batch, and Newton's steps converge from
    below.
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

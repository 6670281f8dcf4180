"""Durations that differ from the estimate: what recorded orders and the static order lose, for `ablation.py`.

Every pack's duration on every stage is multiplied by exp(N(0, sigma)). Compared with a list schedule made with the
true times, which is greedy and so not the best there is: a loss may be slightly negative.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from evenload.plan.search.found_step import FoundStep
from evenload.schedule.packflow import packflow_list, packflow_static
from evenload.simulate.simulate import simulate

NOISES, DRAWS = (0.0, 0.03, 0.1, 0.2), 8


def noise_losses(found: FoundStep, seed: int) -> Iterator[tuple[float, float, float]]:
    """(sigma, loss of the recorded orders, loss of the faster word on the same packs) of every replica and draw."""
    generator = np.random.default_rng(seed)
    for search in found.own:
        chosen, cap = search.build(search.ranking()[0]), search.problem.cap_bytes
        if chosen is None or cap is None:
            continue  # the base is always built and capped
        words = [packflow_static(chosen.tasks, inject=inject) for inject in (False, True)]
        word_s = [simulate(chosen.tasks, word).makespan_s for word in words]
        word = words[int(np.argmin(word_s))]
        for sigma, _ in product(NOISES, range(DRAWS)):
            names = ("forward_s", "backward_s")
            shape = chosen.tasks.forward_s.shape, chosen.tasks.backward_s.shape
            factors = [np.exp(generator.normal(0.0, sigma, size)) for size in shape]
            drawn = {n: getattr(chosen.tasks, n) * factor for n, factor in zip(names, factors, strict=True)}
            tasks = replace(chosen.tasks, **drawn)
            known_s = simulate(tasks, packflow_list(tasks, cap_bytes=cap)).makespan_s
            recorded_s, static_s = (simulate(tasks, actions).makespan_s for actions in (chosen.actions, word))
            yield sigma, recorded_s / known_s - 1, static_s / known_s - 1

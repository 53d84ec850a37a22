"""Training with AutoByte leaves what training with DDP leaves, bit for bit where sums allow it.

gloo's sum of an element depends on the boundaries of the operation from three
ranks on, so four ranks are compared with gradients on a grid, on which sums
are exact, and three to a tolerance, for optimizers that don't amplify rounding.
Each number of ranks is started once and runs all its cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from cases import MODELS, OPTIMIZERS, PLANS, largest_difference, train_with_autobyte, train_with_ddp
from ranks import init_gloo, run_ranks

Case = tuple[str, str, str, bool]  # optimizer, model, plan, clipped

def alternate_clipping(*axes: Iterable[str]) -> list[Case]:
    """The product of the axes, every other case with clipping, so that each pair of values meets both."""
    indexed = itertools.product(*(enumerate(axis) for axis in axes))
    return [(*(value for _, value in case), sum(i for i, _ in case) % 2 == 1) for case in indexed]


CASES: dict[int, list[Case]] = {
    2: alternate_clipping(OPTIMIZERS, MODELS, PLANS),
    3: alternate_clipping(("sgd", "momentum-wd"), MODELS, ("tiny", "fused", "retuned")),
    4: alternate_clipping(OPTIMIZERS, MODELS, ("fused", "retuned")),
}
TOLERANCE = {2: 0.0, 3: 1e-5, 4: 0.0}


def run_cases(rank: int, world: int, cases: list[Case]) -> dict[Case, float]:
    """The largest difference from DDP of each case, on this rank."""
    init_gloo()
    grid = world == 4
    references = {}
    differences = {}
    for case in cases:
        optimizer, model, plan, clip = case
        key = (optimizer, model, clip)
        if key not in references:
            references[key] = train_with_ddp(model, optimizer, rank, clip, grid)
        ours = train_with_autobyte(model, optimizer, plan, rank, clip, grid)
        differences[case] = largest_difference(ours, references[key])
    return differences


@pytest.fixture(scope="module")
def differences() -> dict[int, dict[Case, float]]:
    """By number of ranks and case: the largest difference on any rank."""
    out = {}
    for world, cases in CASES.items():
        results = run_ranks(run_cases, world, cases, timeout_s=600)
        out[world] = {case: max(result[case] for result in results) for case in cases}
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in CASES.items() for case in cases])
def test_equals_ddp(differences, counted_cases, world: int, case: Case) -> None:
    assert differences[world][case] <= TOLERANCE[world]
    optimizer, model, plan, clip = case
    counted_cases.add(optimizer=optimizer, model=model, plan=plan, ranks=world, clipping="yes" if clip else "no")

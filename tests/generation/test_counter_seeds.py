"""Seeds of the counter sampler."""

import itertools

import numpy as np
import pytest

from gpu_workers.generation.counter_seeds import row_seeds, sampling_seed

WHO = {"prompt_id": 5, "epoch": 0, "generation_index": 3, "turn": 0}


def test_a_call_has_one_seed_of_63_bits():
    assert sampling_seed(1, **WHO) == sampling_seed(1, **WHO)
    assert 0 <= sampling_seed(1, **WHO) < 2**63


@pytest.mark.parametrize("field", sorted(WHO))
def test_everything_that_names_the_call_changes_its_seed(field: str):
    assert sampling_seed(1, **WHO) != sampling_seed(1, **(WHO | {field: WHO[field] + 1}))
    assert sampling_seed(1, **WHO) != sampling_seed(2, **WHO)


def test_a_saved_run_depends_on_these_very_numbers():
    assert sampling_seed(1, **WHO) == 1402961656175968829
    assert row_seeds(np.array([7], np.uint64), np.array([2], np.uint64)).tolist() == [5067083786226862413]


def test_row_seeds_depend_on_seed_and_position_elementwise():
    seeds, positions = np.array([1, 2, 3], np.uint64), np.array([0, 5, 9], np.uint64)
    together = row_seeds(seeds, positions)
    alone = [row_seeds(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone


def test_neighbouring_seeds_and_positions_never_share_a_row_seed():
    pairs = np.array(list(itertools.product(range(200), range(200))), np.uint64)
    rows = row_seeds(pairs[:, 0], pairs[:, 1])
    assert len(np.unique(rows)) == len(pairs)
    assert (rows >= 0).all()


def test_row_seeds_look_uniform_in_every_bit():
    rows = row_seeds(np.full(20_000, 11, np.uint64), np.arange(20_000, dtype=np.uint64))
    ones = [(rows >> bit & 1).mean() for bit in range(63)]
    assert np.abs(np.array(ones) - 0.5).max() < 0.02

"""How the pool of KV blocks grows."""

from itertools import pairwise

import pytest

from edgespec_models.decoders.kept import BLOCK, EXTENT, keys_and_values
from edgespec_runtimes import block_pool
from edgespec_runtimes.kv_cache import Stretch


@pytest.mark.parametrize("part", [1, 4])
def test_a_pool_grows_by_a_part_of_its_size(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """By less where the system counts room that nothing was written to."""
    monkeypatch.setattr(block_pool, "_GROWTH", part)
    pool = block_pool.BlockPool([*keys_and_values(0, 1, 8, "float16")], lambda: None)
    stretch, rooms = Stretch(), list[int]()
    for blocks in range(1, 40 * EXTENT):
        pool.extend(stretch, blocks * BLOCK)
        room = pool.arrays[0].shape[0] * EXTENT
        rooms += [room] if not rooms or room != rooms[-1] else []
        assert blocks <= room
    grown = [later - earlier for earlier, later in pairwise(rooms)]
    assert grown == [max(EXTENT, room // part // EXTENT * EXTENT) for room in rooms[:-1]]

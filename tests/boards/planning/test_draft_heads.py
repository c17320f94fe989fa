"""Sizes of draft heads against published counts, and times against bytes over bandwidth."""

import pytest

from flowspec_edge.boards.planning.draft_heads import head_costs
from flowspec_edge.device_profile import load_profile

NANO = load_profile("orin-nano-8gb")


def factor(rows: int, columns: int) -> float:
    """MB of a candidate head's factor of rank 256, in 16 bits."""
    return 2 * 256 * (rows + columns) / 1e6


@pytest.fixture(scope="module")
def costs():
    return {(cost.kind, cost.bits): cost for cost in head_costs("qwen3-8b", NANO)}


def test_sizes_are_those_of_published_heads(costs):
    """z-lab's DFlash for Qwen3-8B has 1.05 billion parameters; lm_head is 151,936 x 4096."""
    head = 151_936 * 4096 * 2 / 1e6
    assert costs["dflash", "16bit"].memory_mb == pytest.approx(2 * 1050 + head, rel=0.01)
    markov = 2 * 151_936 * 256 * 2 / 1e6
    assert costs["dspark", "16bit"].memory_mb == pytest.approx(costs["dflash", "16bit"].memory_mb + markov)
    # One layer of 193 million, fc over a state and an embedding, and biases on fc; a factor of rank 256.
    eagle = 2 * (193 + 33.6) + factor(151_936, 4096)
    assert costs["eagle2", "16bit"].memory_mb == pytest.approx(eagle + head, rel=0.01)
    for kind in ("eagle3", "dflash", "dspark"):
        sizes = [costs[kind, bits].memory_mb for bits in ("16bit", "int8", "int4")]
        assert 3.4 < sizes[0] / sizes[2] < 4.0
        assert sizes[1] - sizes[2] == pytest.approx(head / 4)  # lm_head alone has more bits: 8 instead of 4


def test_times_are_bytes_over_what_the_board_reads(costs):
    rate = 405 / 7.36  # MB a millisecond, by the profile
    dflash = costs["dflash", "16bit"]
    assert dflash.pass_ms == pytest.approx(dflash.memory_mb / rate, rel=0.01)
    assert dflash.tree_ms == dflash.pass_ms
    eagle = costs["eagle2", "16bit"]
    # Ten nodes look up 128 rows each, in the five pieces of lm_head: they are read once, and written and read again.
    read = 2 * (193 + 33.6) + factor(151_936, 4096) + 10 * 128 * 4096 * 2 / 1e6 * (1 + 2 * 5)
    assert eagle.tree_ms == pytest.approx(8 * read / rate, rel=0.01)
    # EAGLE-3's own lm_head is read, the target's is not; the Markov head's rows are looked up.
    assert costs["eagle3", "16bit"].pass_ms < 0.6 * dflash.pass_ms
    read = costs["dspark", "16bit"].pass_ms - dflash.pass_ms
    assert read == pytest.approx(151_936 * 256 * 2 / 1e6 / rate, rel=0.01)


def test_an_mtp_layer_where_the_family_has_one(costs):
    """Counted from Qwen3.6-35B-A3B's config.json: 0.84 billion parameters, of which ten rows read 70 of 256
    experts; lm_head is 248,320 x 2048."""
    assert ("mtp", "16bit") not in costs
    head = 248_320 * 2048 * 2 / 1e6
    all_costs = head_costs("qwen3.6-35b-a3b", NANO)
    found = {cost.bits: cost for cost in all_costs if cost.kind == "mtp"}
    assert found["16bit"].memory_mb == pytest.approx(1689 + head + factor(248_320, 2048), rel=0.001)
    experts = 256 * 3 * 2048 * 512 * 2 / 1e6
    read = 1689 - experts * (1 - 8 / 256) ** 10
    ranked = factor(248_320, 2048) + 10 * 128 * 2048 * 2 / 1e6 * (1 + 2 * 5)
    assert found["16bit"].pass_ms == pytest.approx((read + ranked) * 7.36 / 405, rel=0.001)
    assert found["16bit"].tree_ms == 8 * found["16bit"].pass_ms
    assert found["int4"].memory_mb < 0.3 * found["16bit"].memory_mb


def test_what_does_not_fit_is_told():
    found = head_costs("qwen3-14b", NANO)
    assert {(cost.kind, cost.bits) for cost in found if not cost.fits} == {("dflash", "16bit"),
                                                                           ("dspark", "16bit")}

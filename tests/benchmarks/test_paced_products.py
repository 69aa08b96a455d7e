"""Products that wait: how long, what they give, and what an exchange defers."""

from __future__ import annotations

import pytest
from layout_paces import divided
from testbed.paced_products import flops, flops_of

from estimator.graph.partition.layout import split_by_layout
from estimator.workload.layouts import Layout


def test_products_count_two_flops_for_each_pair_that_they_multiply() -> None:
    assert flops("mm", [(8, 4), (4, 2)]) == 2 * 8 * 4 * 2
    assert flops("bmm", [(3, 8, 4), (3, 4, 2)]) == 3 * 2 * 8 * 4 * 2
    assert flops("_grouped_mm", [(10, 4), (5, 4, 6), (5,)]) == 2 * 10 * 4 * 6
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    query, key = (2, 3, 8, 4), (2, 3, 16, 4)
    pairs = 2 * 3 * 8 * 16 * 4
    assert flops(attention, [query, key, key]) == 2 * 2 * pairs
    assert flops(f"{attention}_backward", [query, query, key, key]) == 5 * 2 * pairs


@pytest.mark.parametrize("layout", ["tp=2", "tp=4,sp", "cp=2,ring"])
def test_what_a_rank_of_a_layout_multiplies_is_timed_to_the_seconds_asked_for(layout: str) -> None:
    known = divided("decoder", layout, rank_s=0.5)
    local = split_by_layout(known.graph, Layout.parse(layout).of_layers, known.plan)
    waits = [known.graph.timings[op.call].seconds for op in local.ops if flops_of(op.call)]
    assert sum(waits) == pytest.approx(0.5)
    free = [known.graph.timings[op.call].seconds for op in local.ops if not flops_of(op.call)]
    assert max(free) < 1e-6

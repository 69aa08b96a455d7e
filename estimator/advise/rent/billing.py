"""Say what an allocation of rented instances costs, as their time is billed."""

from __future__ import annotations

from collections.abc import Iterator

from estimator.errors import PriceError
from estimator.machines.prices import Price, PriceList
from estimator.placement.allocation import Allocation


def paid_usd(
    prices: PriceList, allocation: Allocation, duration_s: float, *, spot: bool = False
) -> float:
    """What all instances of an allocation cost for a time, as it is billed; raises PriceError."""
    each = _instances(prices, allocation, spot)
    return sum(nodes * price.usd(duration_s, spot=spot) for nodes, price in each)


def hourly_usd(prices: PriceList, allocation: Allocation, *, spot: bool = False) -> float:
    """The rate of all instances of an allocation; raises PriceError."""
    each = _instances(prices, allocation, spot)
    return sum(nodes * (price.rate(spot=spot) or 0.0) for nodes, price in each)


def _instances(
    prices: PriceList, allocation: Allocation, spot: bool
) -> Iterator[tuple[int, Price]]:
    for group in allocation.groups:
        if group.machine is None:
            raise PriceError(f"'{group}' names a host, which has no price; name its machine type")
        yield group.nodes, prices.price(group.machine, group.devices_per_node, spot=spot)

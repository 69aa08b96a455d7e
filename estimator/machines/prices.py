"""Prices of rented machines, shipped or a user's own, in the columns of SkyPilot's catalogue."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from estimator.errors import PriceError, UnknownMachineError, quoted
from estimator.files import read_csv, shipped_data
from estimator.machines.catalogue import known_machines, named_profile, split_limit

_MOST_USD_PER_HOUR = 1e6
_MOST_S = 1e6
# Every instance type of every zone of a cloud is some ten thousand.
_MOST_ROWS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one instance costs, and how its time is counted.

    Time is rounded up to whole units of `billed_s`, and is at least `least_billed_s`. A price that
    is not known is None; `at` and `source` say when and where it was seen, `accelerator` and
    `cloud` what SkyPilot calls them.
    """

    machine: str
    instance_type: str
    devices: int
    usd_per_hour: float | None
    spot_usd_per_hour: float | None = None
    billed_s: float = 1.0
    least_billed_s: float = 0.0
    accelerator: str = ""
    cloud: str = ""
    at: str = ""
    source: str = ""

    def rate(self, *, spot: bool) -> float | None:
        """USD an hour, None where it is not known."""
        return self.spot_usd_per_hour if spot else self.usd_per_hour

    def usd(self, duration_s: float, *, spot: bool = False) -> float:
        """What one instance costs for a time; raises PriceError where its price is not known.

        >>> hourly = Price(machine="m", instance_type="i", devices=1, usd_per_hour=2, billed_s=3600)
        >>> hourly.usd(3601)
        4.0
        """
        rate = self.rate(spot=spot)
        if rate is None:
            raise PriceError(_no_price(self.machine, spot))
        # A whole number of units stays that number, whatever the last digit of a quotient is.
        units = math.ceil(duration_s / self.billed_s * (1 - 1e-12))
        return max(units * self.billed_s, self.least_billed_s) / 3600 * rate


class PriceList:
    """The prices of machines; of several rows of a machine, the cheapest with devices enough."""

    def __init__(self, prices: Iterable[Price]) -> None:
        self._of: dict[str, list[Price]] = {}
        for price in prices:
            self._of.setdefault(price.machine, []).append(price)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> PriceList:
        """The shipped prices; rows of a file stand for those of the machines that it names.

        Raises PriceError, naming the file and its row.
        """
        rows: list[Price] = []
        for shipped in sorted(shipped_data("prices").glob("*.csv")):
            rows += _read(shipped)
        own = list(_read(path, is_own=True)) if path is not None else []
        if path is not None and not own:
            raise PriceError(f"{path} has no price of a machine that is known; write one a line")
        named = {price.machine for price in own}
        return cls([*own, *(price for price in rows if price.machine not in named)])

    @property
    def machines(self) -> tuple[str, ...]:
        """Every machine with a price."""
        return tuple(self._of)

    @property
    def prices(self) -> tuple[Price, ...]:
        """All of them."""
        return tuple(price for known in self._of.values() for price in known)

    def price(self, machine: str, devices: int = 1, *, spot: bool = False) -> Price:
        """The cheapest instance of a machine type with at least some devices.

        A limit in the machine's name (``h100-sxm@500W``) has no price of its own.
        Raises PriceError where none is known, UnknownMachineError where there is no such machine.
        """
        known = self._of.get(split_limit(machine)[0])
        if known is None:
            # A name that is no machine's is told as such.
            named_profile(machine)
            known = []
        enough = [p for p in known if p.devices >= devices and p.rate(spot=spot) is not None]
        if not enough:
            raise PriceError(_no_price(machine, spot))
        return min(enough, key=lambda price: price.rate(spot=spot) or 0.0)


def _no_price(machine: str, spot: bool) -> str:
    if spot:
        return (
            f"no spot price of {quoted(machine)} is known; leave out --spot, or give one in the "
            "column SpotPrice of --prices FILE"
        )
    return (
        f"no price of {quoted(machine)} is known; give one with --prices FILE, a CSV with the "
        "columns Machine,AcceleratorCount,Price"
    )


def _read(path: str | os.PathLike[str], *, is_own: bool = False) -> Iterator[Price]:
    """The prices of a file, without rows of instances that no machine is.

    Of a user's own file every machine is looked up: a slip in its name is told.
    """
    try:
        rows = read_csv(path, most_rows=_MOST_ROWS)
        columns = next(rows, [])
        if not ({"Machine", "InstanceType"} & {*columns} and {"Price", "SpotPrice"} & {*columns}):
            raise PriceError(
                f"{path} has no prices of machines; begin it with the columns "
                "Machine,AcceleratorCount,Price"
            )
        machine_of = {} if "Machine" in columns else _machines_by_instance()
        for number, cells in enumerate(rows, start=2):
            if not cells:
                continue
            if len(cells) != len(columns):
                raise PriceError(
                    f"{path}, line {number} has other cells than the {len(columns)} columns named "
                    "in the first line; write one cell for each"
                )
            row = dict(zip(columns, cells, strict=True))
            machine = row.get("Machine") or machine_of.get(row.get("InstanceType") or "")
            if machine is not None:
                if is_own:
                    _check_known(machine, f"{path}, line {number}")
                yield _price(machine, row, f"{path}, line {number}")
    except OSError as error:
        raise PriceError(f"cannot read prices {path} ({error.strerror}); check --prices") from None
    except ValueError as error:
        if isinstance(error, PriceError):
            raise
        raise PriceError(f"{path} is no CSV ({error}); write one price a line") from None


def _check_known(machine: str, where: str) -> None:
    try:
        named_profile(machine)
    except UnknownMachineError as error:
        raise PriceError(f"{where}: {error}") from None


def _machines_by_instance() -> dict[str, str]:
    """Machine types of SkyPilot's own files, which name instances only."""
    machines = {}
    for name in known_machines():
        instance = named_profile(name).hardware.get("instance_type")
        if isinstance(instance, str):
            machines[instance] = name
    return machines


def _price(machine: str, row: Mapping[str, str], where: str) -> Price:
    def number(column: str, most: float) -> float | None:
        text = row.get(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= most:
            raise PriceError(
                f"{where}: {column} is {quoted(text)}; write a number from 0 to {most:g}"
            )
        return value

    devices = number("AcceleratorCount", 4096)
    if devices is not None and not (devices >= 1 and devices.is_integer()):
        raise PriceError(
            f"{where}: AcceleratorCount is {devices:g}; write a whole number from 1 on"
        )
    return Price(
        machine=machine,
        instance_type=row.get("InstanceType") or machine,
        devices=int(devices or len(named_profile(machine).devices)),
        usd_per_hour=number("Price", _MOST_USD_PER_HOUR),
        spot_usd_per_hour=number("SpotPrice", _MOST_USD_PER_HOUR),
        billed_s=number("BilledS", _MOST_S) or 1.0,
        least_billed_s=number("LeastBilledS", _MOST_S) or 0.0,
        accelerator=row.get("AcceleratorName") or "",
        cloud=row.get("Cloud") or "",
        at=row.get("At") or "",
        source=row.get("Source") or "",
    )
